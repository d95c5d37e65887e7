/// \file
/// The descriptions of tensors and parameters in all messages.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a text such as "float32 [64, 3, 7, 7] on cuda:0". A layout other than dense precedes the
/// dtype.
inline std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string layout;
  if (tensor.layout() != at::kStrided) layout = c10::str(tensor.layout(), " ");
  return c10::str(layout, dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ",
                  tensor.device());
}

/// Returns a text such as "parameter 3 (float32 [10] on cpu)". `number` is the parameter's index in
/// `model->parameters()`.
inline std::string describe_param(std::size_t number, const at::Tensor& parameter) {
  return c10::str("parameter ", number, " (", describe(parameter), ")");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
