#pragma once

#include <mezzo/base/version.h>

#include <c10/core/Device.h>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

// Chooses the kernels for tensors of a device: mezzo's CUDA kernels, mezzo's CPU loops, or
// otherwise ATen's. All of mezzo asks here, so that tests can run the CUDA kernels on a simulated
// device (mezzo/kernels/cuda/device.h).
#ifdef MEZZO_DEVICE_ON_HOST
namespace host_device {
bool serves(c10::Device device);
}
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool has_cuda_kernels([[maybe_unused]] at::Device device) {
#if defined(MEZZO_DEVICE_ON_HOST)
  return host_device::serves(device);
#elif defined(MEZZO_WITH_CUDA)
  return device.is_cuda();
#else
  return false;
#endif
}

inline bool has_cpu_loops(at::Device device) {
  return device.is_cpu() && !has_cuda_kernels(device);
}

inline bool has_own_kernels(at::Device device) {
  return has_cuda_kernels(device) || has_cpu_loops(device);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
