/// \file
/// The state of libtorch's default random generators as a value.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <mezzo/version.h>

#include <mutex>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The default generators of the CPU and of every CUDA device that this process uses.
inline std::vector<at::Generator> default_generators() {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (at::hasCUDA()) {
    const auto& cuda = at::detail::getCUDAHooks();
    for (c10::DeviceIndex i = 0; i < cuda.deviceCount(); ++i) {
      if (cuda.hasPrimaryContext(i)) {
        generators.push_back(at::globalContext().defaultGenerator(at::Device(at::kCUDA, i)));
      }
    }
  }
  return generators;
}

/// Where a set of generators stands. Reading and setting needs no device work and no sync: a CUDA
/// generator is a seed and an offset on the host.
class RandomState {
 public:
  explicit RandomState(const std::vector<at::Generator>& generators = default_generators()) {
    for (at::Generator generator : generators) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      states_.emplace_back(generator, generator.get_state());
    }
  }

  void install() const {
    for (auto [generator, state] : states_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }

  /// Installs a state and puts its generators back at the end of the scope.
  class Scope;

 private:
  std::vector<at::Generator> generators() const {
    std::vector<at::Generator> generators;
    for (const auto& [generator, state] : states_) generators.push_back(generator);
    return generators;
  }

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

class RandomState::Scope {
 public:
  explicit Scope(const RandomState& state) : found_(state.generators()) { state.install(); }
  ~Scope() { found_.install(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  RandomState found_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
