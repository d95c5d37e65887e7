/// \file
/// How libtorch multiplies matrices that stay float32, half or bfloat16: whether float32 may go
/// through TF32, and in what cuBLAS adds up. Autocast (mezzo/autocast/autocast.h) chooses the
/// matrices' dtype; this chooses what is done with it.
#pragma once

#include <mezzo/base/detail/settings.h>
#include <mezzo/base/version.h>

#include <ATen/Context.h>

#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a guard changes; what is left out stays as it is.
struct MatmulPrecisionOptions {
  /// Products of float32 matrices, by the names of `torch.set_float32_matmul_precision`:
  /// - HIGHEST: in float32.
  /// - HIGH: TF32 on CUDA from compute capability 8.0 on, which rounds the factors to 10 bits of
  ///   mantissa and adds in float32; on a CPU as oneDNN reads "tf32".
  /// - MEDIUM: as HIGH on CUDA; bfloat16 factors on a CPU with instructions for them.
  std::optional<at::Float32MatmulPrecision> float32 = std::nullopt;

  /// Whether cuDNN's float32 convolutions and recurrent layers may use TF32, as they do unless told
  /// otherwise.
  std::optional<bool> cudnn_tf32 = std::nullopt;

  /// Whether cuBLAS, where it splits a product of half matrices into partial sums, may add those in
  /// half, as it does unless told otherwise. False costs little and keeps sums beyond 65504 finite
  /// until the result is rounded.
  std::optional<bool> fp16_reduction = std::nullopt;

  /// The same for bfloat16, where it is 8 bits of mantissa that are at stake.
  std::optional<bool> bf16_reduction = std::nullopt;

  /// Whether cuBLAS may accumulate products of half matrices in half throughout; off unless asked
  /// for, faster on some GPUs, and rarely fit for training.
  std::optional<bool> fp16_accumulation = std::nullopt;
};

/// Sets libtorch's precision of matrix products until the end of the scope:
///
///     mezzo::MatmulPrecisionGuard precision({.float32 = at::Float32MatmulPrecision::HIGH});
///
/// Leaving the scope, also by return or exception, restores all of these settings exactly as they
/// were when it was entered, whether the guard changed them or code within its scope: what had been
/// set through libtorch's older functions (`setFloat32MatmulPrecision`, `setAllowTF32CuBLAS`), what
/// through its newer `setFloat32Precision`, and what had not been set and inherits. Inside, both
/// report the same, so that no "mix of the legacy and new APIs" error comes of it.
///
/// **These settings belong to the process**, not to a thread, and libtorch reads them without a
/// lock: enter and leave while no other thread runs matrix products. Guards nest within a thread;
/// where another thread holds one, the constructor throws, since guards that overlap without
/// nesting would restore each other's settings. A CUDA graph keeps what it was captured with.
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
