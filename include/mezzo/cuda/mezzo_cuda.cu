// The one source of mezzo::cuda: the kernels, and the functions through which host code reaches
// them. The target mezzo::cuda adds it to every program and library that links it.

#include <mezzo/detail/kernels/cuda_launch.h>
#include <mezzo/detail/kernels/dense_gradients.h>
#include <mezzo/cuda/unscale.cuh>
#include <mezzo/cuda/update_scale.cuh>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

static_assert(std::is_trivially_copyable_v<LossScale>, "a kernel takes it by value");

namespace {

/// Launches over the tensors of `Element`'s dtype, as many at a time as a table holds.
template <class Element>
void unscale_dtype(const std::vector<at::Tensor>& tensors, const float* inv_scale, float* found_inf,
                   cudaStream_t stream) {
  GradientTable table(kElementsPerBlock<Element>);
  const auto launch = [&] {
    launch_unscale<Element>(table, inv_scale, found_inf, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    table.clear();
  };
  for (const at::Tensor& tensor : tensors) {
    const bool is_ours = tensor.scalar_type() == c10::CppTypeToScalarType<Element>::value;
    if (!is_ours || tensor.numel() == 0) continue;
    if (table.full()) launch();
    // Asked for writing, a copy-on-write tensor gets memory of its own; a check leaves it shared.
    table.push_back(inv_scale != nullptr ? tensor.mutable_data_ptr()
                                         : const_cast<void*>(tensor.const_data_ptr()),
                    tensor.numel());
  }
  if (!table.empty()) launch();
}

void unscale_all(const DenseGradients& gradients, const float* inv_scale,
                 const at::Tensor& found_inf) {
  const c10::cuda::CUDAGuard guard(found_inf.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  auto* const found = found_inf.mutable_data_ptr<float>();
  unscale_dtype<float>(gradients.tensors(), inv_scale, found, stream);
  unscale_dtype<c10::BFloat16>(gradients.tensors(), inv_scale, found, stream);
  unscale_dtype<c10::Half>(gradients.tensors(), inv_scale, found, stream);
  unscale_dtype<double>(gradients.tensors(), inv_scale, found, stream);
}

}  // namespace

__attribute__((weak)) void unscale_and_check_(const std::vector<at::Tensor>& gradients,
                                              const at::Tensor& found_inf,
                                              const at::Tensor& inv_scale) {
  const DenseGradients dense(gradients);
  unscale_all(dense, inv_scale.const_data_ptr<float>(), found_inf);
  dense.written();
}

__attribute__((weak)) void check_(const std::vector<at::Tensor>& gradients,
                                  const at::Tensor& found_inf) {
  unscale_all(DenseGradients(gradients), nullptr, found_inf);
}

__attribute__((weak)) void update_scale_(const LossScale& rule, const at::Tensor& scale,
                                         const at::Tensor& growth_tracker,
                                         const at::Tensor& hysteresis_left,
                                         const at::Tensor& found_inf) {
  const c10::cuda::CUDAGuard guard(scale.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  update_scale_kernel<<<1, 1, 0, stream>>>(
      rule, scale.mutable_data_ptr<float>(), growth_tracker.mutable_data_ptr<int32_t>(),
      hysteresis_left.mutable_data_ptr<int32_t>(), found_inf.const_data_ptr<float>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  scale.unsafeGetTensorImpl()->bump_version();  // a graph may still hold the scale for its backward
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
