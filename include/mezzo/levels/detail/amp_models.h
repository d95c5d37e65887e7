/// \file
/// One call of a model: its tensors cast on the way in and out, under autocast where the level says
/// so.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <mezzo/autocast/detail/region.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A model that was given to initialize, and on which types of device it lies.
class AmpModel {
 public:
  explicit AmpModel(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    for (const at::Tensor& parameter : module_->parameters()) {
      if (!lies_on(parameter.device().type())) placed_.push_back(parameter);
    }
  }

  const torch::nn::Module& module() const noexcept { return *module_; }

  bool contains(const torch::nn::Module& wanted) const {
    if (module_.get() == &wanted) return true;
    for (const auto& module : module_->modules(/*include_self=*/false)) {
      if (module.get() == &wanted) return true;
    }
    return false;
  }

  /// By its parameters as they lie now; a model without parameters lies everywhere.
  bool lies_on(c10::DeviceType type) const {
    for (const at::Tensor& parameter : placed_) {
      if (parameter.device().type() == type) return true;
    }
    return false;
  }
  bool runs_on(c10::DeviceType type) const { return placed_.empty() || lies_on(type); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> placed_;  // one parameter for each type of device
};

/// Autocast on the devices of a model, or none.
class ForwardRegions {
 public:
  ForwardRegions() = default;

  void enter(const RegionState& region) {
    (region.device == c10::DeviceType::CPU ? cpu_ : cuda_).emplace(region);
  }

 private:
  std::optional<Region> cpu_;
  std::optional<Region> cuda_;
};

/// What `forward` gets: a cast copy of what holds tensors, and everything else as it is.
template <class Argument>
decltype(auto) forward_argument(std::optional<at::ScalarType> dtype, Argument&& argument) {
  if constexpr (carries_tensors<Argument>()) {
    OwningType<Argument> value = owned(std::forward<Argument>(argument));
    if (dtype) return cast_tensors(std::move(value), *dtype);
    return value;
  } else {
    return std::forward<Argument>(argument);
  }
}

/// What `run` returns, with its tensors cast.
template <class Run>
decltype(auto) cast_result(std::optional<at::ScalarType> dtype, const Run& run) {
  using Result = std::invoke_result_t<const Run&>;
  if constexpr (std::is_void_v<Result>) {
    run();
  } else if constexpr (carries_tensors<Result>()) {
    OwningType<Result> value = owned(run());
    if (dtype) return cast_tensors(std::move(value), *dtype);
    return value;
  } else {
    return run();
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
