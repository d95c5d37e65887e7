#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Outputs>
inline constexpr bool kNotScalable = false;

/// Applies `scale_tensor` to every tensor in a nested container, and rebuilds the container.
/// A specialisation names what it takes apart; the map's keys are left alone.
template <class Outputs>
struct ScaledOutputs {
  template <class F>
  static Outputs apply(const Outputs& outputs, const F& scale_tensor) {
    if constexpr (std::same_as<Outputs, at::Tensor>) {
      return scale_tensor(outputs);
    } else {
      static_assert(kNotScalable<Outputs>,
                    "outputs must be a Tensor or an iterable of Tensors. In C++: give "
                    "GradScaler::scale the loss itself, as in scaler.scale(out.loss)");
    }
  }
};

template <class Outputs, class F>
Outputs scaled_outputs(const Outputs& outputs, const F& scale_tensor) {
  return ScaledOutputs<Outputs>::apply(outputs, scale_tensor);
}

template <class T, class Allocator>
struct ScaledOutputs<std::vector<T, Allocator>> {
  template <class F>
  static std::vector<T, Allocator> apply(const std::vector<T, Allocator>& outputs, const F& f) {
    std::vector<T, Allocator> scaled(outputs.get_allocator());
    scaled.reserve(outputs.size());
    for (const T& output : outputs) scaled.push_back(scaled_outputs(output, f));
    return scaled;
  }
};

template <class T, std::size_t kSize>
struct ScaledOutputs<std::array<T, kSize>> {
  template <class F>
  static std::array<T, kSize> apply(const std::array<T, kSize>& outputs, const F& f) {
    return [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      return std::array<T, kSize>{scaled_outputs(outputs[kIndex], f)...};
    }
    (std::make_index_sequence<kSize>{});
  }
};

template <class... Ts>
struct ScaledOutputs<std::tuple<Ts...>> {
  template <class F>
  static std::tuple<Ts...> apply(const std::tuple<Ts...>& outputs, const F& f) {
    return std::apply(
        [&](const Ts&... output) { return std::tuple<Ts...>{scaled_outputs(output, f)...}; },
        outputs);
  }
};

template <class First, class Second>
struct ScaledOutputs<std::pair<First, Second>> {
  template <class F>
  static std::pair<First, Second> apply(const std::pair<First, Second>& outputs, const F& f) {
    return {scaled_outputs(outputs.first, f), scaled_outputs(outputs.second, f)};
  }
};

template <class T>
struct ScaledOutputs<std::optional<T>> {
  template <class F>
  static std::optional<T> apply(const std::optional<T>& output, const F& f) {
    if (!output) return std::nullopt;
    return scaled_outputs(*output, f);
  }
};

template <class Map>
struct ScaledMap {
  template <class F>
  static Map apply(const Map& outputs, const F& f) {
    Map scaled = outputs;
    for (auto& [key, output] : scaled) output = scaled_outputs(output, f);
    return scaled;
  }
};

template <class Key, class T, class... Rest>
struct ScaledOutputs<std::map<Key, T, Rest...>> : ScaledMap<std::map<Key, T, Rest...>> {};

template <class Key, class T, class... Rest>
struct ScaledOutputs<std::unordered_map<Key, T, Rest...>>
    : ScaledMap<std::unordered_map<Key, T, Rest...>> {};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
