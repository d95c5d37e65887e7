/// \file
/// The state of libtorch's default random generators as a value.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/version.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Where a set of generators stands.
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
