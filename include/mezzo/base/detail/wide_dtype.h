#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What keeps a weight in full: float, or double for double.
inline at::ScalarType wide_dtype(const at::Tensor& weight) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
