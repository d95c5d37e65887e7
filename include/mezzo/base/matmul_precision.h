/// \file
/// Internal precision of libtorch's matrix products: whether float32 products may use TF32, and in
/// which dtype cuBLAS accumulates. Autocast (mezzo/autocast/autocast.h) chooses the dtype of the
/// matrices; this header chooses how products of that dtype are computed.
#pragma once

#include <mezzo/base/detail/settings.h>
#include <mezzo/base/version.h>

#include <ATen/Context.h>

#include <optional>

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
/// The end of the scope restores all of these settings exactly as the constructor found them, also
/// those that code within the scope has changed. Values set through libtorch's older functions
/// (`setFloat32MatmulPrecision`, `setAllowTF32CuBLAS`), values set through its newer
/// `setFloat32Precision`, and unset values that inherit are all restored. Within the scope both
/// interfaces report the same values, so neither throws "mix of the legacy and new APIs".
///
/// **These settings belong to the process**, not to a thread, and libtorch reads them without a
/// lock: enter and leave while no other thread runs matrix products. Guards nest within a thread.
/// The constructor throws while another thread holds a guard, since guards that overlap without
/// nesting would restore each other's settings. A CUDA graph keeps the settings of its capture.
///
/// No host sync.
class MatmulPrecisionGuard {
 public:
  /// \throws c10::Error, and changes nothing, while another thread holds a guard
  [[nodiscard]] explicit MatmulPrecisionGuard(const MatmulPrecisionOptions& options)
      : saved_(detail::MatmulSettings::read(at::globalContext())) {
    detail::set_float32_matmul(at::globalContext(), options.float32);
    detail::set_cudnn_tf32(at::globalContext(), options.cudnn_tf32);
    detail::set_cublas(at::globalContext(), options.fp16_reduction, options.bf16_reduction,
                       options.fp16_accumulation);
  }
  MatmulPrecisionGuard(const MatmulPrecisionGuard&) = delete;
  MatmulPrecisionGuard& operator=(const MatmulPrecisionGuard&) = delete;
  ~MatmulPrecisionGuard() { saved_.write(at::globalContext()); }

 private:
  detail::MatmulPrecisionTurn turn_;  // first, so that it is taken before anything is read
  detail::MatmulSettings saved_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
