/// \file
/// The callable behind cast_functions.h, and the walk over a call's arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/autocast/detail/op_policy/eligible.h>
#include <mezzo/base/version.h>

#include <array>
#include <concepts>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The device whose enabled autocast may cast this tensor, if there is one.
inline std::optional<c10::DeviceType> casting_device(const at::Tensor& tensor) {
  for (const auto device : kPolicyDevices) {
    if (is_eligible(tensor, device) && at::autocast::is_autocast_enabled(device)) {
      return device;
    }
  }
  return std::nullopt;
}

inline bool autocast_is_on() {
  for (const auto device : kPolicyDevices) {
    if (at::autocast::is_autocast_enabled(device)) {
      return true;
    }
  }
  return false;
}

// A tensor's place in nested containers: `map` gives a copy of the value with f applied to each
// tensor. The unspecialised form is for values without tensors, which are passed on untouched.
template <class T>
struct TensorsIn {
  static constexpr bool any = false;
};

template <std::derived_from<at::Tensor> T>
struct TensorsIn<T> {
  static constexpr bool any = true;
  template <class F>
  static at::Tensor map(const at::Tensor& tensor, F& f) {
    return f(tensor);
  }
};

template <class T>
requires TensorsIn<T>::any struct TensorsIn<std::optional<T>> {
  static constexpr bool any = true;
  template <class F>
  static std::optional<T> map(const std::optional<T>& value, F& f) {
    return value.has_value() ? std::optional<T>(TensorsIn<T>::map(*value, f)) : std::nullopt;
  }
};

template <class T, class Allocator>
requires TensorsIn<T>::any struct TensorsIn<std::vector<T, Allocator>> {
  static constexpr bool any = true;
  template <class F>
  static std::vector<T, Allocator> map(std::vector<T, Allocator> values, F& f) {
    for (auto& value : values) {
      value = TensorsIn<T>::map(value, f);
    }
    return values;
  }
};

template <class T>
requires TensorsIn<T>::any struct TensorsIn<c10::ArrayRef<T>> {
  static constexpr bool any = true;
  template <class F>
  static std::vector<T> map(c10::ArrayRef<T> values, F& f) {
    return TensorsIn<std::vector<T>>::map(values.vec(), f);
  }
};

template <class T, std::size_t Size>
requires TensorsIn<T>::any struct TensorsIn<std::array<T, Size>> {
  static constexpr bool any = true;
  template <class F>
  static std::array<T, Size> map(std::array<T, Size> values, F& f) {
    for (auto& value : values) {
      value = TensorsIn<T>::map(value, f);
    }
    return values;
  }
};

template <class Map>
struct TensorsInMap {
  static constexpr bool any = true;
  template <class F>
  static Map map(Map values, F& f) {
    for (auto& [key, value] : values) {
      value = TensorsIn<typename Map::mapped_type>::map(value, f);
    }
    return values;
  }
};

template <class Key, class T, class... Rest>
requires TensorsIn<T>::any struct TensorsIn<std::map<Key, T, Rest...>>
    : TensorsInMap<std::map<Key, T, Rest...>> {
};

template <class Key, class T, class... Rest>
requires TensorsIn<T>::any struct TensorsIn<std::unordered_map<Key, T, Rest...>>
    : TensorsInMap<std::unordered_map<Key, T, Rest...>> {
};

template <class Tuple>
struct TensorsInTuple {
  static constexpr bool any = true;
  template <class F>
  static Tuple map(Tuple values, F& f) {
    std::apply([&f](auto&... value) { (map_element(value, f), ...); }, values);
    return values;
  }

 private:
  template <class T, class F>
  static void map_element(T& value, F& f) {
    if constexpr (TensorsIn<T>::any) {
      value = TensorsIn<T>::map(value, f);
    }
  }
};

template <class... T>
requires(TensorsIn<T>::any || ...) struct TensorsIn<std::tuple<T...>>
    : TensorsInTuple<std::tuple<T...>> {
};

template <class A, class B>
requires(TensorsIn<A>::any || TensorsIn<B>::any) struct TensorsIn<std::pair<A, B>>
    : TensorsInTuple<std::pair<A, B>> {
};

/// The dtype of every cast tensor: fixed, the region's, or the widest among the arguments. `plan`
/// looks at all arguments before any of them is cast.
struct ToDtype {
  at::ScalarType dtype;

  template <class... Args>
  ToDtype plan(const Args&...) const {
    return *this;
  }
  at::ScalarType operator()(c10::DeviceType) const { return dtype; }
};

struct ToRegionDtype {
  template <class... Args>
  ToRegionDtype plan(const Args&...) const {
    return {};
  }
  at::ScalarType operator()(c10::DeviceType device) const {
    return at::autocast::get_autocast_dtype(device);
  }
};

struct ToWidest {
  template <class... Args>
  ToDtype plan(const Args&... args) const {
    std::optional<at::ScalarType> widest;
    auto look = [&widest](const at::Tensor& tensor) {
      if (casting_device(tensor).has_value()) {
        widest = wider(widest.value_or(tensor.scalar_type()), tensor.scalar_type());
      }
      return tensor;
    };
    (visit(args, look), ...);
    return {widest.value_or(at::kFloat)};
  }

 private:
  template <class T, class F>
  static void visit(const T& argument, F& look) {
    if constexpr (TensorsIn<T>::any) {
      TensorsIn<T>::map(argument, look);
    }
  }
};

/// Calls `F` on cast arguments with autocast off, and plainly where autocast is off.
template <class F, class Target>
class CastingFunction {
 public:
  template <class G>
  CastingFunction(G&& function, Target target)
      : function_(std::forward<G>(function)), target_(target) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return call(function_, std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return call(function_, std::forward<Args>(args)...);
  }

 private:
  template <class Function, class... Args>
  decltype(auto) call(Function& function, Args&&... args) const {
    if (!autocast_is_on()) {
      return std::invoke(function, std::forward<Args>(args)...);
    }
    const auto dtype_on = target_.plan(std::as_const(args)...);
    auto cast = [&dtype_on](const at::Tensor& tensor) {
      const auto device = casting_device(tensor);
      return device.has_value() ? at::autocast::cached_cast(dtype_on(*device), tensor, *device)
                                : tensor;
    };
    // Braces, so that the casts happen before autocast is switched off.
    std::tuple<decltype(cast_argument(std::forward<Args>(args), cast))...> arguments{
        cast_argument(std::forward<Args>(args), cast)...};
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
    return std::apply(
        [&function](auto&&... each) -> decltype(auto) {
          return std::invoke(function, std::forward<decltype(each)>(each)...);
        },
        std::move(arguments));
  }

  // A cast copy of an argument that holds tensors; a reference to any other.
  template <class Arg, class Cast>
  static decltype(auto) cast_argument(Arg&& argument, Cast& cast) {
    using Tensors = TensorsIn<std::remove_cvref_t<Arg>>;
    if constexpr (Tensors::any) {
      return Tensors::map(argument, cast);
    } else {
      return std::forward<Arg>(argument);
    }
  }

  F function_;
  Target target_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
