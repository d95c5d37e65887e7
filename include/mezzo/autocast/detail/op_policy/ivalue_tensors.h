/// \file
/// The tensors among an op's boxed arguments or results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Calls `visit` with every tensor among the arguments, those in lists included.
template <class Visit>
void for_each_tensor(c10::ArrayRef<const c10::IValue> arguments, Visit visit) {
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        visit(tensor);
      }
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) {
        if (tensor.has_value()) {
          visit(*tensor);
        }
      }
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
