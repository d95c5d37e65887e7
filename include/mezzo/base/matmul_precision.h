/// \file
/// MatmulPrecisionGuard: whether float32 products may use TF32, and in which dtype cuBLAS
/// accumulates.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Settings that a MatmulPrecisionGuard changes. Unset members do not change.
struct MatmulPrecisionOptions {
  /// Precision of float32 matrix products, as in `torch.set_float32_matmul_precision`:
  /// - HIGHEST: in float32.
  /// - HIGH: TF32 on CUDA with compute capability 8.0 or newer (factors with a 10-bit mantissa,
  ///   accumulation in float32); on a CPU, oneDNN's "tf32".
  /// - MEDIUM: as HIGH on CUDA; bfloat16 factors on a CPU with bfloat16 instructions.
  std::optional<at::Float32MatmulPrecision> float32 = std::nullopt;

  /// Allows TF32 in cuDNN's float32 convolutions and recurrent layers. libtorch's default is true.
  std::optional<bool> cudnn_tf32 = std::nullopt;

  /// Allows cuBLAS to add partial sums of float16 products in float16 when it splits a product.
  /// libtorch's default is true. False costs little, and keeps sums beyond 65504 finite until the
  /// result is rounded.
  std::optional<bool> fp16_reduction = std::nullopt;

  /// Allows cuBLAS to add partial sums of bfloat16 products in bfloat16, which has 8 bits of
  /// precision, when it splits a product.
  std::optional<bool> bf16_reduction = std::nullopt;

  /// Allows cuBLAS to accumulate float16 products in float16. libtorch's default is false. Faster
  /// on some GPUs, and rarely precise enough for training.
  std::optional<bool> fp16_accumulation = std::nullopt;
};

/// Sets the precision of libtorch's matrix products until the end of the scope:
///
///     mezzo::MatmulPrecisionGuard precision({.float32 = at::Float32MatmulPrecision::HIGH});
///
/// The destructor restores the settings that the options set. Within the scope libtorch's legacy
/// functions (`float32MatmulPrecision`, `allowTF32CuBLAS`) and `float32Precision` return the same
/// values. Afterwards a value that was inherited from a generic setting is set explicitly.
///
/// **The settings are global to the process**, and libtorch reads them without a lock: construct
/// and destroy the guard while no other thread runs matrix products. Guards nest. A CUDA graph
/// keeps the settings of its capture. No host sync.
class MatmulPrecisionGuard {
 public:
  /// Applies the settings that are set in `options`.
  [[nodiscard]] explicit MatmulPrecisionGuard(const MatmulPrecisionOptions& options)
      : options_(options) {
    if (options.float32) {
      prev_legacy_float32_ = get_legacy([this] { return context_.float32MatmulPrecision(); });
      context_.setFloat32MatmulPrecision(to_name(*options.float32));
      if (*options.float32 == at::Float32MatmulPrecision::HIGHEST) {
        // Some versions of libtorch leave these entries unset, and they would inherit.
        set(kMatmul, {at::Float32Precision::IEEE, at::Float32Precision::IEEE});
      }
    }
    if (options.cudnn_tf32) {
      prev_legacy_cudnn_ = get_legacy([this] { return context_.allowTF32CuDNN(); });
      context_.setAllowTF32CuDNN(*options.cudnn_tf32);
      const auto precision =
          *options.cudnn_tf32 ? at::Float32Precision::TF32 : at::Float32Precision::IEEE;
      set(kCudnn, {precision, precision});
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
    // The legacy setters also write the entries, so set the entries last.
    if (prev_legacy_float32_) context_.setFloat32MatmulPrecision(to_name(*prev_legacy_float32_));
    if (options_.float32) set(kMatmul, prev_matmul_);
    if (prev_legacy_cudnn_) context_.setAllowTF32CuDNN(*prev_legacy_cudnn_);
    if (options_.cudnn_tf32) set(kCudnn, prev_cudnn_);
    if (options_.fp16_reduction) {
      context_.setAllowFP16ReductionCuBLAS(allows_reduced_precision(prev_fp16_reduction_),
                                           allows_split_k(prev_fp16_reduction_));
    }
    if (options_.bf16_reduction) {
      context_.setAllowBF16ReductionCuBLAS(allows_reduced_precision(prev_bf16_reduction_),
                                           allows_split_k(prev_bf16_reduction_));
    }
    if (options_.fp16_accumulation)
      context_.setAllowFP16AccumulationCuBLAS(prev_fp16_accumulation_);
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

  Values get(const Entries& entries) const {
    return {context_.float32Precision(entries[0].first, entries[0].second),
            context_.float32Precision(entries[1].first, entries[1].second)};
  }
  void set(const Entries& entries, const Values& values) const {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      context_.setFloat32Precision(entries[i].first, entries[i].second, values[i]);
    }
  }

  /// Returns the value of a legacy getter; none if it throws because the interfaces were mixed.
  template <class Get>
  static auto get_legacy(const Get& get) -> std::optional<decltype(get())> {
    try {
      return get();
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  static const char* to_name(at::Float32MatmulPrecision precision) {
    if (precision == at::Float32MatmulPrecision::HIGHEST) return "highest";
    return precision == at::Float32MatmulPrecision::HIGH ? "high" : "medium";
  }
  static bool allows_reduced_precision(Reduction option) {
    return option == Reduction::AllowReducedPrecisionWithSplitK;
  }
  static bool allows_split_k(Reduction option) {
    return option != Reduction::DisallowReducedPrecisionDisallowSplitK;
  }

  at::Context& context_ = at::globalContext();
  MatmulPrecisionOptions options_;
  Values prev_matmul_ = get(kMatmul);
  Values prev_cudnn_ = get(kCudnn);
  std::optional<at::Float32MatmulPrecision> prev_legacy_float32_;
  std::optional<bool> prev_legacy_cudnn_;
  Reduction prev_fp16_reduction_ = context_.allowFP16ReductionCuBLAS();
  Reduction prev_bf16_reduction_ = context_.allowBF16ReductionCuBLAS();
  bool prev_fp16_accumulation_ = context_.allowFP16AccumulationCuBLAS();
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
