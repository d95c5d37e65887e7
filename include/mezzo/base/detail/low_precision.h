#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The 16-bit floating dtypes, which are trained with masters in float and accumulated in float.
inline bool is_low_precision(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}
inline bool is_low_precision(const at::Tensor& tensor) {
  return is_low_precision(tensor.scalar_type());
}

/// The dtype of a weight's master: double for double, otherwise float.
inline at::ScalarType accum_dtype(const at::Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
