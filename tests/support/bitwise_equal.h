#pragma once

#include <torch/types.h>

#include <gmock/gmock.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace test_support {

/// Returns whether dtype, shape and bits are equal, except for NaN payloads, which are unspecified.
/// 0 and -0 differ; undefined tensors are equal.
inline bool bitwise_equal(const torch::Tensor& left, const torch::Tensor& right) {
  if (!left.defined() || !right.defined()) return left.defined() == right.defined();
  if (left.scalar_type() != right.scalar_type()) return false;
  const torch::Tensor is_nan = left.detach().isnan();
  if (!torch::equal(is_nan, right.detach().isnan())) return false;  // of another shape too
  const torch::Tensor a = left.detach().masked_fill(is_nan, 0).contiguous();
  const torch::Tensor b = right.detach().masked_fill(is_nan, 0).contiguous();
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

inline bool bitwise_equal(const std::vector<torch::Tensor>& left,
                          const std::vector<torch::Tensor>& right) {
  bool are_same = left.size() == right.size();
  for (std::size_t i = 0; are_same && i < left.size(); ++i)
    are_same = bitwise_equal(left[i], right[i]);
  return are_same;
}

/// Matcher: EXPECT_THAT(actual, BitwiseEqual(expected)) prints both sides if they differ.
MATCHER_P(BitwiseEqual, expected, "is bitwise equal to " + testing::PrintToString(expected)) {
  return bitwise_equal(arg, expected);
}

inline std::vector<torch::Tensor> clone_all(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

}  // namespace test_support
