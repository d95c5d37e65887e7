#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a copy of a script's value with each defined tensor replaced by `map(tensor)`, in
/// tuples, lists and dictionaries too.
template <class Map>
c10::IValue map_script_tensors(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? at::Tensor(map(tensor)) : tensor;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(map_script_tensors(element, map));
    }
    return c10::ivalue::Tuple::createNamed(std::move(elements), value.toTupleRef().type());
  }
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    c10::List<c10::IValue> copy(list.elementType());
    for (const c10::IValue& element : list) copy.push_back(map_script_tensors(element, map));
    return copy;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      copy.insert(entry.key(), map_script_tensors(entry.value(), map));
    }
    return copy;
  }
  return value;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
