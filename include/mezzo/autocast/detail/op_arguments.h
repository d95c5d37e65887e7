/// \file
/// An op's boxed arguments, as the dispatcher and at::RecordFunction's start callbacks have them.
#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using OpArguments = c10::ArrayRef<const c10::IValue>;

struct RecordedInputsMember {
  friend constexpr auto private_member(RecordedInputsMember);
};
template struct PrivateMember<RecordedInputsMember, &at::RecordFunction::inputs_>;

/// Returns the op's arguments. Reads the member: without NDEBUG RecordFunction::inputs() asserts a
/// flag that only a libtorch built without NDEBUG sets, and so throws in a debug build against a
/// release libtorch. TorchScript's interpreter records its whole stack, which ends with the
/// arguments.
inline OpArguments get_recorded_inputs(const at::RecordFunction& function) {
  const OpArguments stack = function.*private_member(RecordedInputsMember());
  return stack.slice(stack.size() - std::min(stack.size(), function.num_inputs()));
}

/// Calls `visit` with every tensor among the arguments, also in lists.
template <class Visit>
void for_each_tensor(OpArguments arguments, const Visit& visit) {
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) {
        if (tensor.has_value()) visit(*tensor);
      }
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
