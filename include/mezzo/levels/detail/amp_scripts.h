/// \file
/// Which tensors are a batch norm's, in C++ and in TorchScript, and how a script's values are cast
/// on the way in and out.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/script_module.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/symbol.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

/// The parameters and buffers that `aten::batch_norm` reads in a script's `forward`. The classes of
/// scripts can have any name; what they do tells what they are.
class ScriptBatchNorms {
 public:
  static void collect(const torch::jit::Module& script, TensorSet& tensors) {
    if (!script.find_method("forward")) return;
    const auto graph = inlined_forward(script);
    ScriptBatchNorms(graph->inputs().at(0), script._ivalue(), tensors).visit(*graph->block());
  }

 private:
  ScriptBatchNorms(const torch::jit::Value* self, c10::IValue model, TensorSet& tensors)
      : self_(self), model_(std::move(model)), tensors_(tensors) {}

  void visit(const torch::jit::Block& block) {
    for (const torch::jit::Node* const node : block.nodes()) {
      for (const torch::jit::Block* const inner : node->blocks()) visit(*inner);
      if (node->kind() != c10::aten::batch_norm) continue;
      for (std::size_t i = 1; i <= 4; ++i) keep(node->input(i));  // weight, bias, mean, variance
    }
  }

  /// What a value is: an attribute, one of several by a condition, or an optional's content.
  void keep(const torch::jit::Value* value) {
    const torch::jit::Node* const node = value->node();
    if (node->kind() == c10::prim::If) {
      for (const torch::jit::Block* const branch : node->blocks()) {
        keep(branch->outputs().at(value->offset()));
      }
    } else if (node->kind() == c10::prim::unchecked_cast) {
      keep(node->input());
    } else if (const auto attribute = attribute_of(value); attribute && attribute->isTensor()) {
      tensors_.insert(attribute->toTensor().unsafeGetTensorImpl());
    }
  }

  std::optional<c10::IValue> attribute_of(const torch::jit::Value* value) const {
    if (value == self_) return model_;
    if (value->node()->kind() != c10::prim::GetAttr) return std::nullopt;
    const auto owner = attribute_of(value->node()->input());
    if (!owner || !owner->isObject()) return std::nullopt;
    return owner->toObjectRef().getAttr(value->node()->s(c10::attr::name));
  }

  const torch::jit::Value* self_;
  c10::IValue model_;
  TensorSet& tensors_;
};

inline bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

/// The parameters and buffers of the batch norms in `model`.
inline TensorSet tensors_of_batch_norms(torch::nn::Module& model) {
  TensorSet tensors;
  model.apply([&tensors](torch::nn::Module& module) {
    if (const auto* const script = dynamic_cast<const ScriptModuleImpl*>(&module)) {
      ScriptBatchNorms::collect(script->script(), tensors);
    } else if (is_batch_norm(module)) {
      for (const auto& item : module.parameters(false)) tensors.insert(item.unsafeGetTensorImpl());
      for (const auto& item : module.buffers(false)) tensors.insert(item.unsafeGetTensorImpl());
    }
  });
  return tensors;
}

/// `value` with its floating tensors in `dtype`, in tuples, lists and dicts too, which are copied.
inline c10::IValue cast_script_value(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    const bool casts = tensor.defined() && is_training_dtype(tensor.scalar_type());
    return casts ? tensor.to(dtype) : tensor;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(cast_script_value(element, dtype));
    }
    return c10::ivalue::Tuple::createNamed(std::move(elements), value.toTupleRef().type());
  }
  if (value.isList()) {
    const c10::List<c10::IValue> list = value.toList();
    c10::List<c10::IValue> copy(list.elementType());
    for (const c10::IValue& element : list) copy.push_back(cast_script_value(element, dtype));
    return copy;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      copy.insert(entry.key(), cast_script_value(entry.value(), dtype));
    }
    return copy;
  }
  return value;
}

/// What a level makes of a call.
struct CastDtypes {
  std::optional<at::ScalarType> input;
  std::optional<at::ScalarType> output;
};

template <class... Args>
c10::IValue run_cast(ScriptModuleImpl& script, const CastDtypes& dtypes, Args&&... args) {
  std::vector<c10::IValue> arguments = script_arguments(std::forward<Args>(args)...);
  if (dtypes.input) {
    for (c10::IValue& argument : arguments) argument = cast_script_value(argument, *dtypes.input);
  }
  const c10::IValue result = script.forward(std::move(arguments));
  return dtypes.output ? cast_script_value(result, *dtypes.output) : result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
