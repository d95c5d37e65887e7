// Built with and without MEZZO_WITH_CUDA, with hidden and with default visibility: shared libraries
// that hold mezzo without knowing of each other. mixed_libraries.cpp loads them.

#include <mezzo/base/loss_scale.h>
#include <mezzo/kernels/gradient_passes.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <stdexcept>
#include <typeinfo>
#include <vector>

#ifdef MEZZO_WITH_CUDA

// In place of mezzo_cuda.cu, which takes nvcc: nothing here runs on a GPU.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

[[noreturn]] static void no_gpu() { throw std::logic_error("a kernel was asked for on the CPU"); }

void unscale_and_check_(const std::vector<Stretch>&, const at::Tensor&, const at::Tensor&) {
  no_gpu();
}
void update_scale_(const LossScale&, const ScaleTensors&, const at::Tensor&) { no_gpu(); }
void summarize_(const std::vector<Stretch>&, const Verdict&) { no_gpu(); }

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#endif

extern "C" {

C10_EXPORT bool was_built_with_cuda() {
#ifdef MEZZO_WITH_CUDA
  return true;
#else
  return false;
#endif
}

// An inline function whose body depends on the macro: which body does this library call?
C10_EXPORT bool has_cuda_kernels() {
  bool (*const volatile ask)(at::Device) = &mezzo::detail::has_own_kernels;
  return ask(at::Device(at::kCUDA, 0));
}

C10_EXPORT const char* type_name() { return typeid(mezzo::GradBuckets).name(); }

// Gradients of 2 in buckets of this library's, which takes them from those of the other libraries.
C10_EXPORT double sum_of_squares(const at::Tensor& parameter) {
  mezzo::GradBuckets buckets({parameter});
  buckets.zero_grad();
  parameter.mul(2).sum().backward();
  buckets.reattach_gradients();
  const auto summary = mezzo::detail::summarize_gradients({parameter.grad()}, at::ones({}));
  return summary.sum_of_squares.item<double>();
}
}
