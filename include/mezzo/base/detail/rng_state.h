#pragma once

#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>

#include <mutex>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class CudaDevices {
  initialized,  ///< the devices that this process uses
  all,          ///< all devices; initializes CUDA
};

/// Returns the default generators of the CPU and of CUDA devices.
inline std::vector<at::Generator> default_generators(CudaDevices cuda_devices) {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (!at::hasCUDA()) return generators;
  const auto& cuda = at::detail::getCUDAHooks();
  const c10::DeviceIndex device_count = cuda.deviceCount();
  if (cuda_devices == CudaDevices::all && device_count > 0)
    at::globalContext().lazyInitDevice(at::kCUDA);
  for (c10::DeviceIndex i = 0; i < device_count; ++i) {
    if (cuda_devices == CudaDevices::initialized && !cuda.hasPrimaryContext(i)) continue;
    generators.push_back(at::globalContext().defaultGenerator(c10::Device(at::kCUDA, i)));
  }
  return generators;
}

/// Returns the generator's state. No host sync: a CUDA generator's state is a seed and an offset on
/// the host.
inline at::Tensor get_rng_state(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

inline void set_rng_state(at::Generator generator, const at::Tensor& state) {
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

/// The state of random generators; by default of the default generators in use.
class RngState {
 public:
  explicit RngState(
      const std::vector<at::Generator>& generators = default_generators(CudaDevices::initialized)) {
    for (const at::Generator& generator : generators) {
      states_.emplace_back(generator, get_rng_state(generator));
    }
  }

  void restore() const {
    for (const auto& [generator, state] : states_) set_rng_state(generator, state);
  }

  friend class RngStateGuard;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Restores `state` for a scope, and the previous states at its end.
class RngStateGuard {
 public:
  explicit RngStateGuard(const RngState& state) : prev_(state) {
    for (auto& [generator, prev] : prev_.states_) prev = get_rng_state(generator);
    state.restore();
  }
  ~RngStateGuard() { prev_.restore(); }
  RngStateGuard(const RngStateGuard&) = delete;
  RngStateGuard& operator=(const RngStateGuard&) = delete;

 private:
  RngState prev_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
