#pragma once

#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>

#include <mutex>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class CudaDevices {
  in_use,  ///< those that this process has begun to use
  all,     ///< and the others too, which initialises CUDA, where there is one
};

/// Those that ops draw from unless they are given another: the CPU's, and CUDA devices'.
inline std::vector<at::Generator> default_generators(CudaDevices which) {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (!at::hasCUDA()) return generators;
  const auto& cuda = at::detail::getCUDAHooks();
  const c10::DeviceIndex devices = cuda.deviceCount();
  if (which == CudaDevices::all && devices > 0) at::globalContext().lazyInitDevice(at::kCUDA);
  for (c10::DeviceIndex i = 0; i < devices; ++i) {
    if (which == CudaDevices::in_use && !cuda.hasPrimaryContext(i)) continue;
    generators.push_back(at::globalContext().defaultGenerator(c10::Device(at::kCUDA, i)));
  }
  return generators;
}

/// Reading and setting needs no device work and no sync: a CUDA generator is a seed and an offset
/// on the host.
inline at::Tensor state_of(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

inline void set_state(at::Generator generator, const at::Tensor& state) {
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
