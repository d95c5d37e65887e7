/// \file
/// How messages name a tensor and a parameter: everywhere in the same way.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// "float32 [64, 3, 7, 7] on cuda:0"; a layout other than dense stands before the dtype.
inline std::string tensor_words(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string layout;
  if (tensor.layout() != at::kStrided) layout = c10::str(tensor.layout(), " ");
  return c10::str(layout, dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ",
                  tensor.device());
}

/// "parameter 3 (float32 [10] on cpu)": the number is that in `model->parameters()`, whose names
/// `model->named_parameters()` has.
inline std::string parameter_words(std::size_t number, const at::Tensor& parameter) {
  return c10::str("parameter ", number, " (", tensor_words(parameter), ")");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
