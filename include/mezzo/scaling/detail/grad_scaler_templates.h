/// \file
/// GradScaler's templates, which every unit that calls them compiles for itself.
#pragma once

#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr std::array<std::string_view, 5> kTorchStateKeys{
    "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"};
inline constexpr std::array<std::string_view, 5> kMezzoStateKeys{
    "min_scale", "max_scale", "hysteresis", "_hysteresis_left", "_loss_scale_kind"};

template <class T>
consteval bool is_scalable();

template <class T, std::size_t... I>
consteval bool elements_are_scalable(std::index_sequence<I...>) {
  return (is_scalable<std::tuple_element_t<I, T>>() && ...);
}

/// Whether a `T` is tensors and nothing else, which can be copied; but for the keys of maps.
template <class T>
consteval bool is_scalable() {
  if constexpr (std::same_as<T, at::Tensor>) {
    return true;
  } else if constexpr (kIsOptional<T>) {
    return is_scalable<typename T::value_type>();
  } else if constexpr (TupleLike<T>) {
    return elements_are_scalable<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (requires { typename T::mapped_type; }) {
    return is_scalable<typename T::mapped_type>();
  } else if constexpr (Collection<T> && requires { typename T::allocator_type; }) {
    return is_scalable<std::ranges::range_value_t<T>>();
  } else {
    return false;
  }
}

template <class Argument>
inline constexpr bool kMayBeClosure = std::is_convertible_v<const std::remove_cvref_t<Argument>&,
                                                            torch::optim::Optimizer::LossClosure>;

/// Of an argument of `optimizer.step`; no closure, said aloud, is not one.
template <class Argument>
bool is_closure(const Argument& argument) {
  if constexpr (kMayBeClosure<Argument>) {
    return torch::optim::Optimizer::LossClosure(argument) != nullptr;
  } else {
    return false;
  }
}

}  // namespace detail

template <class Outputs>
std::remove_cvref_t<Outputs> GradScaler::scale(const Outputs& outputs) {
  static_assert(detail::is_scalable<Outputs>(),
                "outputs must be a Tensor or an iterable of Tensors. In C++: give "
                "GradScaler::scale the loss itself, as in scaler.scale(out.loss)");
  if (!enabled_) return outputs;
  return detail::map_tensors(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor& scale = scale_on(output.device());
    return rule_.kind() == LossScaleKind::none ? output : output.mul(scale);
  });
}

template <class OptimizerType, class... Args>
requires(std::convertible_to<OptimizerType&, AnyOptimizer> &&
         !(std::same_as<std::remove_cvref_t<Args>, StepOptions> ||
           ...)) StepResult GradScaler::step(OptimizerType& optimizer, Args&&... args) {
  const auto call_step = [&]() -> at::Tensor {
    return optimizer.step(std::forward<Args>(args)...);
  };
  const bool has_closure = (detail::is_closure(args) || ...);
  const bool is_bare = (detail::kMayBeClosure<Args> && ...) && !has_closure;
  const detail::StepTaker taker(optimizer);
  if (!enabled_) {
    (void)records_.of_masters(taker);
    const bool is_known = records_.find(taker.optimizer()) != nullptr;
    if (is_bare && is_known) return step(optimizer, StepOptions{});
    return StepResult(StepOutcome{.ran = true, .value = call_step()});
  }
  TORCH_CHECK(
      !has_closure,
      "Closure use is not currently supported if GradScaler is enabled. In C++: compute the loss "
      "and "
      "call scaler.scale(loss).backward() before scaler.step(optimizer), or make the scaler "
      "with GradScalerOptions().enabled(false)");
  if (is_bare && taker.fused() != nullptr) return step_on_device(taker, {});
  return step_on_host(taker, {}, call_step);
}

// The archives' headers take 14 s to compile, so that these are templates: who saves or loads has
// included them anyway.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const GradScaler& scaler) {
  TORCH_CHECK(
      scaler.records_.empty(),
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
      "end after scaler.update(). In C++: call torch::save(scaler, path) after scaler.update()");
  for (const auto& [key, value] : scaler.state_dict()) {
    archive.write(key, at::scalar_tensor(value, at::kDouble), /*is_buffer=*/true);
  }
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, GradScaler& scaler) {
  GradScaler::StateDict state;
  const auto read = [&](std::string_view name) {
    const std::string key(name);
    at::Tensor value;
    if (archive.try_read(key, value, /*is_buffer=*/true))
      state[key] = value.template item<double>();
  };
  for (const std::string_view key : detail::kTorchStateKeys) read(key);
  for (const std::string_view key : detail::kMezzoStateKeys) read(key);
  scaler.load_state_dict(state);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
