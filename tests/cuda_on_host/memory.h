#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstring>
#include <vector>

namespace cuda_on_host {

inline constexpr std::array<at::ScalarType, 4> kDtypes{at::kFloat, at::kDouble, at::kHalf,
                                                       at::kBFloat16};

/// A copy with the same strides, as far from an aligned address as the original.
inline at::Tensor copy_of(const at::Tensor& tensor) {
  const int64_t elements = static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
  return tensor.as_strided({elements}, {1}, 0)
      .clone()
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(copy_of(tensor));
  return copies;
}

/// The same bits, but for the payload of NaN, which is the machine's affair.
inline bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  const at::Tensor is_nan = left.isnan();
  if (!at::equal(is_nan, right.isnan())) return false;
  const at::Tensor a = left.masked_fill(is_nan, 0).contiguous();
  const at::Tensor b = right.masked_fill(is_nan, 0).contiguous();
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace cuda_on_host
