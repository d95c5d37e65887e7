#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <vector>

// Selects the implementation for tensors of a device: mezzo's CUDA kernels if the program links
// them, mezzo's CPU kernels, or ATen.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {

struct GradScalerOptions;
struct GradStats;

namespace detail {

// Callers include the headers of the argument types.
struct AdamW8bitParamArgs;
enum class OptimizerKind : std::uint8_t;
struct ScaleTensors;
struct ContiguousRange;
struct DeviceStepArgs;
struct ParamArgs;
struct DeviceGroupArgs;

/// Functions of mezzo/kernels/cuda/mezzo_cuda.cu, the source of the CMake target mezzo::cuda. They
/// run asynchronously on the current stream of their tensors' device; all pointers are of that
/// device.
struct CudaKernels {
  /// Returns whether these kernels support tensors of `device`.
  bool (*supports)(at::Device device);

  /// Returns the id of the graph capture of the device's current stream, or 0.
  uint64_t (*current_capture_id)(at::Device device);

  /// Sets this thread's capture mode, if `device` has captures. Returns the previous mode.
  int (*exchange_capture_mode)(at::Device device, int mode);

  /// Returns an uninitialized tensor in pinned memory. May be called during a capture.
  at::Tensor (*empty_pinned)(at::IntArrayRef sizes, at::ScalarType dtype);

  /// Multiplies gradients of any floating dtypes by `inv_scale` in place, and sets `found_inf` to 1
  /// if a product is inf or NaN. Both are float32 of one element.
  void (*unscale_and_check_)(const std::vector<ContiguousRange>& gradients,
                             const at::Tensor& found_inf, const at::Tensor& inv_scale);

  /// Writes the statistics of gradients of any floating dtypes times stats.inv_scale to the other
  /// tensors of `stats`. Two launches for one dtype, and one for every 300 further ranges.
  void (*compute_grad_stats_)(const std::vector<ContiguousRange>& gradients,
                              const GradStats& stats);

  /// GradScalerOptions::next, in one launch; `found_inf` is a float32 of one element.
  void (*update_scale_)(const GradScalerOptions& options, const ScaleTensors& tensors,
                        const at::Tensor& found_inf);

  /// Steps parameters; `groups[param.group]` has the HyperParams of a parameter. One launch for
  /// each combination of dtype, functor and weight format, and one for every further 300 parameters
  /// or 8 groups. Does not change step counts.
  void (*step_)(at::Device device, OptimizerKind kind, const std::vector<ParamArgs>& params,
                const std::vector<DeviceGroupArgs>& groups, const DeviceStepArgs& step_args);

  /// Steps the parameters of AdamW8bit. One launch for each dtype and 150 parameters.
  void (*step_adamw8bit_)(at::Device device, const std::vector<AdamW8bitParamArgs>& params);

  /// Writes four tensors of one element to `values`, four float64 in pinned memory, in one launch.
  /// `scale` and `found_inf` are float32; the others are float64 or undefined, which writes 0. The
  /// host may read `values` once an event recorded after this call has completed. `address` is null
  /// in the first call for `values`, and caches their device address.
  void (*write_step_values_)(const at::Tensor& scale, const at::Tensor& found_inf,
                             const at::Tensor& norm_sq, const at::Tensor& max_abs,
                             const at::Tensor& values, void*& address);

  /// Adds 1 to each step count, unless `found_inf` is not null and *found_inf is not 0. One launch
  /// for every 480.
  void (*increment_state_steps_)(at::Device device, const std::vector<float*>& state_steps,
                                 const float* found_inf);
};

/// The registered kernels. Shared libraries with hidden inline functions have a variable, and
/// kernels, of their own.
inline constinit std::atomic<const CudaKernels*> registered_cuda_kernels = nullptr;

/// Registers the kernels of a program or shared library, unless some are registered. Pins the
/// library, so that it is not unloaded.
inline void register_cuda_kernels(const CudaKernels& kernels) {
  const CudaKernels* none = nullptr;
  if (registered_cuda_kernels.compare_exchange_strong(none, &kernels)) pin_library(&kernels);
}

/// Returns the registered kernels; null if the program does not link mezzo::cuda.
inline const CudaKernels* cuda_kernels() noexcept {
  return registered_cuda_kernels.load(std::memory_order_acquire);
}

enum class KernelBackend : std::uint8_t { cpu, cuda, aten };

/// Returns the implementation for tensors of `device`.
inline KernelBackend kernel_backend(at::Device device) {
  const CudaKernels* const cuda = cuda_kernels();
  if (cuda != nullptr && cuda->supports(device)) return KernelBackend::cuda;
  return device.is_cpu() ? KernelBackend::cpu : KernelBackend::aten;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
