#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <vector>

// Chooses the kernels for tensors of a device: mezzo's CUDA kernels where the program links them,
// mezzo's CPU loops, or otherwise ATen's.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {

struct GradScalerOptions;
struct GradStats;

namespace detail {

// Callers include the headers of the arguments (step_use.h, launch_table.h).
struct AdamW8bitParamArgs;
enum class OptimizerKind : std::uint8_t;
struct ScaleTensors;
struct ContiguousRange;
struct DeviceStepArgs;
struct ParamArgs;
struct DeviceGroupArgs;

/// The functions of mezzo/kernels/cuda/mezzo_cuda.cu, the source of the CMake target mezzo::cuda.
/// All run on the current stream of their tensors' device, and none waits.
struct CudaKernels {
  /// Returns whether these kernels serve tensors of `device`.
  bool (*supports)(at::Device device);

  /// Returns the id of the capture that the device's current stream is part of, or 0.
  uint64_t (*current_capture_id)(at::Device device);

  /// Sets this thread's capture mode, if `device` has captures, and returns the mode before.
  int (*exchange_capture_mode)(at::Device device, int mode);

  /// Returns an uninitialised tensor in pinned memory. May be called in a capture.
  at::Tensor (*empty_pinned)(at::IntArrayRef sizes, at::ScalarType dtype);

  /// Multiplies gradients (on one device, of any floating dtypes) by `inv_scale` in place and sets
  /// `found_inf` to 1 if a product is inf or NaN; both are floats of one element on that device.
  void (*unscale_and_check_)(const std::vector<ContiguousRange>& gradients,
                             const at::Tensor& found_inf, const at::Tensor& inv_scale);

  /// Summarises gradients (on one device, of any floating dtypes) times its inv_scale
  /// into its other numbers, a float and two doubles on that device. Two launches for one dtype,
  /// and one more for every 300 stretches beyond the first 300; gradients next to each other in one
  /// buffer are one stretch.
  void (*compute_grad_stats_)(const std::vector<ContiguousRange>& gradients,
                              const GradStats& stats);

  /// GradScalerOptions::next on the device, in one launch; found_inf is a float of one element
  /// there.
  void (*update_scale_)(const GradScalerOptions& options, const ScaleTensors& tensors,
                        const at::Tensor& found_inf);

  /// Takes one step of a rule over parameters of one device. One launch for each combination of
  /// parameters' dtype, variant and weight storage, and one more for every 300 parameters or 8
  /// groups beyond the first. `groups[row.group]` has a row's numbers and the rule's constants; all
  /// pointers are of the device. Does not change step counts.
  void (*step_)(at::Device device, OptimizerKind kind, const std::vector<ParamArgs>& rows,
                const std::vector<DeviceGroupArgs>& groups, const DeviceStepArgs& inputs);

  /// Takes the steps of an AdamW8bit's parameters of one device. One launch for each dtype, and one
  /// more for every 150 parameters beyond the first.
  void (*step_adamw8bit_)(at::Device device, const std::vector<AdamW8bitParamArgs>& steps);

  /// Writes four tensors of one element into `letter`, four doubles in pinned memory, in one
  /// launch. `scale` and `found_inf` are floats, the other two doubles or undefined, for which 0 is
  /// written. The host may read `letter` once an event that is recorded after this call has
  /// completed. `address` is null in a letter's first call and keeps its address on the device for
  /// the next.
  void (*write_step_values_)(const at::Tensor& scale, const at::Tensor& found_inf,
                             const at::Tensor& norm_sq, const at::Tensor& max_abs,
                             const at::Tensor& values, void*& address);

  /// Adds 1 to each counter, unless `found_inf` points to a value other than 0 (null means 0). One
  /// launch for each 480 state_steps.
  void (*increment_state_steps_)(at::Device device, const std::vector<float*>& state_steps,
                                 const float* found_inf);
};

/// The kernels that are registered in this process. Shared libraries whose inline functions are
/// hidden have a variable of their own, and with it kernels of their own.
inline constinit std::atomic<const CudaKernels*> registered_cuda_kernels = nullptr;

/// Registers the kernels of a shared library or program, unless there are some already.
/// mezzo_cuda.cu calls it when it is loaded; its library is not unloaded afterwards.
inline void register_cuda_kernels(const CudaKernels& kernels) {
  const CudaKernels* none = nullptr;
  if (registered_cuda_kernels.compare_exchange_strong(none, &kernels)) pin_library(&kernels);
}

/// Returns the registered kernels; null in a program that does not link mezzo::cuda.
inline const CudaKernels* cuda_kernels() noexcept {
  return registered_cuda_kernels.load(std::memory_order_acquire);
}

/// The implementations of a kernel.
enum class KernelBackend : std::uint8_t { cpu, cuda, aten };

/// Returns which kernels serve tensors of `device`.
inline KernelBackend kernel_backend(at::Device device) {
  const CudaKernels* const cuda = cuda_kernels();
  if (cuda != nullptr && cuda->supports(device)) return KernelBackend::cuda;
  return device.is_cpu() ? KernelBackend::cpu : KernelBackend::aten;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
