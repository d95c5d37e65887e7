/// \file
/// Descriptions of tensors and parameters in error messages.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns "float32 [64, 3, 7, 7] on cuda:0", after the layout if it is not strided.
inline std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string layout;
  if (tensor.layout() != at::kStrided) layout = c10::str(tensor.layout(), " ");
  return c10::str(layout, dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ",
                  tensor.device());
}

/// Returns "parameter 3 (float32 [10] on cpu)". `param_index` is the index in `parameters()`.
inline std::string describe_param(std::size_t param_index, const at::Tensor& parameter) {
  return c10::str("parameter ", param_index, " (", describe(parameter), ")");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
