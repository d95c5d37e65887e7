// A shared library that uses mezzo, built with and without CUDA kernels, with hidden and with
// default symbol visibility. mixed_libraries.cpp loads them.

#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/macros/Export.h>

using mezzo::detail::KernelBackend;

#ifdef REGISTERS_KERNELS
// Fake kernels instead of mezzo_cuda.cu, so that nvcc is not needed. Nothing runs on a GPU.
static constexpr mezzo::detail::CudaKernels kKernels = [] {
  mezzo::detail::CudaKernels kernels{};
  kernels.supports = [](at::Device device) { return device.is_cuda(); };
  kernels.current_capture_id = [](at::Device) -> uint64_t { return 0; };
  kernels.exchange_capture_mode = [](at::Device, int mode) { return mode; };
  return kernels;
}();
static const bool kIsRegistered = (mezzo::detail::register_cuda_kernels(kKernels), true);
#endif

extern "C" {

C10_EXPORT bool links_cuda_kernels() {
#ifdef REGISTERS_KERNELS
  return kIsRegistered;
#else
  return false;
#endif
}

C10_EXPORT bool has_cuda_kernels() {
  return mezzo::detail::kernel_backend({at::kCUDA, 0}) == KernelBackend::cuda;
}

// Reduces gradients of 2 in buckets of this library, which replace buckets of other libraries.
C10_EXPORT double norm_sq(const at::Tensor& parameter) {
  mezzo::GradBuckets buckets({parameter});
  buckets.zero_grad();
  parameter.mul(2).sum().backward();
  buckets.copy_grads_to_buckets();
  const auto stats = mezzo::detail::compute_grad_stats({parameter.grad()}, at::ones({}));
  return stats.norm_sq.item<double>();
}
}
