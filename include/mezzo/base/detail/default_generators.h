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
  in_use,  ///< the devices that this process has begun to use
  all,     ///< all devices; initialises CUDA if there is one
};

/// The default generators of the CPU and of CUDA devices.
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

/// Returns the generator's state. No device work and no sync: a CUDA generator's state is a seed
/// and an offset on the host.
inline at::Tensor state_of(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

inline void set_state(at::Generator generator, const at::Tensor& state) {
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

/// The state of random generators as a value; by default, of libtorch's default ones in use.
class RandomState {
 public:
  explicit RandomState(
      const std::vector<at::Generator>& generators = default_generators(CudaDevices::in_use)) {
    for (const at::Generator& generator : generators) {
      states_.emplace_back(generator, state_of(generator));
    }
  }

  void install() const {
    for (const auto& [generator, state] : states_) set_state(generator, state);
  }

  /// Installs a state, and restores the generators at the end of the scope.
  class Scope;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

class RandomState::Scope {
 public:
  explicit Scope(const RandomState& state) : found_(state) {
    for (auto& [generator, found] : found_.states_) found = state_of(generator);
    state.install();
  }
  ~Scope() { found_.install(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  RandomState found_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
