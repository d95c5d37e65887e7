#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns whether `dtype` is float16 or bfloat16.
inline bool is_low_precision(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}
inline bool is_low_precision(const at::Tensor& tensor) {
  return is_low_precision(tensor.scalar_type());
}

/// Returns the dtype of a weight's master and of sums: float64 for float64, otherwise float32.
inline at::ScalarType accum_dtype(const at::Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
