/// \file
/// Internal precision of libtorch's matrix products: whether float32 products may use TF32, and in
/// which dtype cuBLAS accumulates. Autocast (mezzo/autocast/autocast_guard.h) chooses the dtype of
/// the matrices; this header chooses how products of that dtype are computed.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Settings that a guard changes. Members left unset keep the present setting.
struct MatmulPrecisionOptions {
  /// Products of float32 matrices, by the names of `torch.set_float32_matmul_precision`:
  /// - HIGHEST: in float32.
  /// - HIGH: TF32 on CUDA with compute capability 8.0 or newer, which rounds the factors to 10 bits
  ///   of mantissa and accumulates in float32; on a CPU, oneDNN's "tf32".
  /// - MEDIUM: the same as HIGH on CUDA; bfloat16 factors on a CPU with instructions for them.
  std::optional<at::Float32MatmulPrecision> float32 = std::nullopt;

  /// Whether cuDNN's float32 convolutions and recurrent layers may use TF32. libtorch's default is
  /// true.
  std::optional<bool> cudnn_tf32 = std::nullopt;

  /// Whether cuBLAS may add partial sums in half when it splits a product of half matrices.
  /// libtorch's default is true. False costs little, and sums beyond 65504 stay finite until the
  /// result is rounded.
  std::optional<bool> fp16_reduction = std::nullopt;

  /// Whether cuBLAS may add partial sums in bfloat16, which has 8 bits of mantissa, when it splits
  /// a product of bfloat16 matrices.
  std::optional<bool> bf16_reduction = std::nullopt;

  /// Whether cuBLAS may accumulate products of half matrices entirely in half. libtorch's default
  /// is false. Faster on some GPUs, and rarely precise enough for training.
  std::optional<bool> fp16_accumulation = std::nullopt;
};

/// Sets libtorch's precision of matrix products until the end of the scope:
///
///     mezzo::MatmulPrecisionGuard precision({.float32 = at::Float32MatmulPrecision::HIGH});
///
/// The end of the scope restores what was in effect for each setting that the options name. Within
/// the scope libtorch's older functions (`float32MatmulPrecision`, `allowTF32CuBLAS`) and its newer
/// `float32Precision` report the same values. A value that was inherited from a setting of all
/// backends or ops is set for its own op afterwards.
///
/// **These settings belong to the process**, not to a thread, and libtorch reads them without a
/// lock: enter and leave while no other thread runs matrix products. Guards nest; guards of several
/// threads that overlap restore each other's settings. A CUDA graph keeps the settings of its
/// capture.
///
/// No host sync.
class MatmulPrecisionGuard {
 public:
  /// Sets what `options` name.
  [[nodiscard]] explicit MatmulPrecisionGuard(const MatmulPrecisionOptions& options)
      : options_(options) {
    if (options.float32) {
      older_float32_ = unless_mixed([this] { return context_.float32MatmulPrecision(); });
      context_.setFloat32MatmulPrecision(name(*options.float32));
      if (*options.float32 == at::Float32MatmulPrecision::HIGHEST) {
        // Set explicitly: some versions leave these entries unset, and they would inherit.
        set(kMatmul, {at::Float32Precision::IEEE, at::Float32Precision::IEEE});
      }
    }
    if (options.cudnn_tf32) {
      older_cudnn_ = unless_mixed([this] { return context_.allowTF32CuDNN(); });
      context_.setAllowTF32CuDNN(*options.cudnn_tf32);
      const auto each =
          *options.cudnn_tf32 ? at::Float32Precision::TF32 : at::Float32Precision::IEEE;
      set(kCudnn, {each, each});
    }
    if (options.fp16_reduction) context_.setAllowFP16ReductionCuBLAS(*options.fp16_reduction);
    if (options.bf16_reduction) context_.setAllowBF16ReductionCuBLAS(*options.bf16_reduction);
    if (options.fp16_accumulation) {
      context_.setAllowFP16AccumulationCuBLAS(*options.fp16_accumulation);
    }
  }
  MatmulPrecisionGuard(const MatmulPrecisionGuard&) = delete;
  MatmulPrecisionGuard& operator=(const MatmulPrecisionGuard&) = delete;
  ~MatmulPrecisionGuard() {
    // The older setters write the newer entries too, so these come last.
    if (older_float32_) context_.setFloat32MatmulPrecision(name(*older_float32_));
    if (options_.float32) set(kMatmul, matmul_);
    if (older_cudnn_) context_.setAllowTF32CuDNN(*older_cudnn_);
    if (options_.cudnn_tf32) set(kCudnn, cudnn_);
    if (options_.fp16_reduction) {
      context_.setAllowFP16ReductionCuBLAS(is_reduced(fp16_), splits(fp16_));
    }
    if (options_.bf16_reduction) {
      context_.setAllowBF16ReductionCuBLAS(is_reduced(bf16_), splits(bf16_));
    }
    if (options_.fp16_accumulation) context_.setAllowFP16AccumulationCuBLAS(accumulates_);
  }

 private:
  using Entry = std::pair<at::Float32Backend, at::Float32Op>;
  using Entries = std::array<Entry, 2>;
  using Values = std::array<at::Float32Precision, 2>;
  using Reduction = at::CuBLASReductionOption;

  static constexpr Entries kMatmul = {Entry{at::Float32Backend::CUDA, at::Float32Op::MATMUL},
                                      Entry{at::Float32Backend::MKLDNN, at::Float32Op::MATMUL}};
  static constexpr Entries kCudnn = {Entry{at::Float32Backend::CUDA, at::Float32Op::CONV},
                                     Entry{at::Float32Backend::CUDA, at::Float32Op::RNN}};

  Values values_of(const Entries& entries) const {
    return {context_.float32Precision(entries[0].first, entries[0].second),
            context_.float32Precision(entries[1].first, entries[1].second)};
  }
  void set(const Entries& entries, const Values& values) const {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      context_.setFloat32Precision(entries[i].first, entries[i].second, values[i]);
    }
  }

  /// Returns what an older getter returns. It throws where newer setters were called beside it;
  /// then there is nothing older to restore.
  template <class Get>
  static auto unless_mixed(const Get& get) -> std::optional<decltype(get())> {
    try {
      return get();
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  static const char* name(at::Float32MatmulPrecision precision) {
    if (precision == at::Float32MatmulPrecision::HIGHEST) return "highest";
    return precision == at::Float32MatmulPrecision::HIGH ? "high" : "medium";
  }
  static bool is_reduced(Reduction option) {
    return option == Reduction::AllowReducedPrecisionWithSplitK;
  }
  static bool splits(Reduction option) {
    return option != Reduction::DisallowReducedPrecisionDisallowSplitK;
  }

  at::Context& context_ = at::globalContext();
  MatmulPrecisionOptions options_;
  Values matmul_ = values_of(kMatmul);
  Values cudnn_ = values_of(kCudnn);
  std::optional<at::Float32MatmulPrecision> older_float32_;
  std::optional<bool> older_cudnn_;
  Reduction fp16_ = context_.allowFP16ReductionCuBLAS();
  Reduction bf16_ = context_.allowBF16ReductionCuBLAS();
  bool accumulates_ = context_.allowFP16AccumulationCuBLAS();
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
