/// \file
/// Visits the tensors in a value: in optionals, pairs, tuples, arrays, vectors and maps, nested to
/// any depth, in an IValue, and in a struct with a member `tensors()`:
///
///     struct Output {
///       torch::Tensor logits, loss;
///       auto tensors() { return std::tie(logits, loss); }
///     };
///
/// Pointers are not followed.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <concepts>
#include <cstddef>
#include <optional>
#include <ranges>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class T>
concept HasTensorsMethod = requires(T& value) {
  value.tensors();
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

/// A range whose element type differs from the range, which excludes std::filesystem::path.
template <class T>
concept Collection = std::ranges::input_range<T> &&
    !std::same_as<std::remove_cvref_t<std::ranges::range_reference_t<T>>, T>;

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <class T>
consteval bool contains_tensors();

template <class T, std::size_t... I>
consteval bool any_element_contains_tensors(std::index_sequence<I...>) {
  return (contains_tensors<std::tuple_element_t<I, T>>() || ...);
}

/// Returns whether for_each_tensor visits tensors in a `T`.
template <class T>
consteval bool contains_tensors() {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::derived_from<Value, at::Tensor> || std::same_as<Value, c10::IValue> ||
                HasTensorsMethod<Value>) {
    return true;
  } else if constexpr (kIsOptional<Value>) {
    return contains_tensors<typename Value::value_type>();
  } else if constexpr (TupleLike<Value>) {
    return any_element_contains_tensors<Value>(
        std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (Collection<Value>) {
    return contains_tensors<std::ranges::range_reference_t<Value>>();
  } else {
    return false;
  }
}

/// Returns a copy of an IValue with each tensor, also in tuples, lists and dictionaries, replaced
/// by `map(tensor)`.
template <class Map>
c10::IValue map_ivalue(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) {
    return at::Tensor(map(value.toTensor()));
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(map_ivalue(element, map));
    }
    return c10::ivalue::Tuple::createNamed(std::move(elements), value.toTupleRef().type());
  }
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    c10::List<c10::IValue> copy(list.elementType());
    for (const c10::IValue& element : list) copy.push_back(map_ivalue(element, map));
    return copy;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      copy.insert(entry.key(), map_ivalue(entry.value(), map));
    }
    return copy;
  }
  return value;
}

/// Calls `visit(tensor)` for every tensor in `value` in order, including undefined ones.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using Value = std::remove_cv_t<T>;
  if constexpr (!contains_tensors<Value>()) {
    return;
  } else if constexpr (std::derived_from<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (std::same_as<Value, c10::IValue>) {
    auto mapped = map_ivalue(value, [&visit](at::Tensor tensor) {
      visit(tensor);
      return tensor;
    });
    if constexpr (!std::is_const_v<T>) value = std::move(mapped);
  } else if constexpr (HasTensorsMethod<T>) {
    auto&& tensors = value.tensors();
    for_each_tensor(tensors, visit);
  } else if constexpr (HasTensorsMethod<Value>) {  // const value, non-const tensors()
    Value copy = value;
    for_each_tensor(copy, [&visit](const at::Tensor& tensor) { visit(tensor); });
  } else if constexpr (kIsOptional<Value>) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (TupleLike<Value>) {
    std::apply([&](auto&... element) { (for_each_tensor(element, visit), ...); }, value);
  } else {
    for (auto&& element : value) for_each_tensor(element, visit);
  }
}

/// The owning type of a `T`: a vector for a `TensorList` or a span, otherwise `T`.
template <class T>
struct Owning {
  using Type = T;
};
template <class T>
struct Owning<c10::ArrayRef<T>> {
  using Type = std::vector<T>;
};
template <class T, std::size_t Size>
struct Owning<std::span<T, Size>> {
  using Type = std::vector<std::remove_const_t<T>>;
};
template <class T>
using OwningType = typename Owning<std::decay_t<T>>::Type;

/// Returns an owning copy of `value`; moves from an rvalue.
template <class T>
OwningType<T> to_owning(T&& value) {
  if constexpr (std::same_as<OwningType<T>, std::decay_t<T>>) {
    return std::forward<T>(value);
  } else {
    return OwningType<T>(value.begin(), value.end());
  }
}

/// Returns an owning copy of `value` (moves from an rvalue) with each tensor replaced by
/// `map(tensor)`, or a reference to `value` if its type contains no tensors.
template <class T, class Map>
decltype(auto) map_tensors(T&& value, const Map& map) {
  if constexpr (contains_tensors<T>()) {
    OwningType<T> mapped = to_owning(std::forward<T>(value));
    for_each_tensor(mapped, [&map](at::Tensor& tensor) { tensor = map(tensor); });
    return mapped;
  } else {
    return static_cast<T&&>(value);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
