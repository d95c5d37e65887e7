#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <vector>

// Numbers of tensors on their way to the host.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The 2-norm, in a type that holds it where `values` are of 16 bits.
inline at::Tensor norm_of(const at::Tensor& values) {
  const auto wide = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return values.norm(2, wide).to(at::kDouble);
}

/// Tensors of equal sizes, on any devices, as one on the host.
inline at::Tensor stacked_on_host(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor = tensor.to(tensors.front().device());
  return at::stack(tensors).cpu();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
