#pragma once

#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "../support/bitwise_equal.h"

namespace cuda_emulation_test {

using test_support::bitwise_equal;
using test_support::BitwiseEqual;

inline constexpr std::array<at::ScalarType, 4> kDtypes{at::kFloat, at::kDouble, at::kHalf,
                                                       at::kBFloat16};

/// Returns a copy with equal strides and equal alignment.
inline at::Tensor copy_of(const at::Tensor& tensor) {
  const int64_t elements = static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
  return tensor.as_strided({elements}, {1}, 0)
      .clone()
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

inline std::vector<at::Tensor> clone_all(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(copy_of(tensor));
  return copies;
}

}  // namespace cuda_emulation_test
