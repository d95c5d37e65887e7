// Expects bitwise identical tensors on all ranks.
#pragma once

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <string>

#include "test_backends.h"

namespace distributed_test {

/// Collective call. `name` is printed on failure.
inline void expect_equal_on_all_ranks(const BackendPtr& world, const at::Tensor& tensor,
                                      const std::string& name) {
  const at::Tensor bits = tensor.detach().flatten().view(at::kByte);
  const at::Tensor all = at::empty({world->getSize(), bits.numel()}, at::kByte);
  all_gather(world, all, bits);
  for (int rank = 0; rank < world->getSize(); ++rank) {
    EXPECT_TRUE(at::equal(all[rank], bits)) << name << " on rank " << rank;
  }
}

/// Compares all parameters of `model`, a module holder.
template <class Holder>
void expect_equal_weights_on_all_ranks(const BackendPtr& world, const Holder& model) {
  for (const auto& item : model->named_parameters()) {
    expect_equal_on_all_ranks(world, item.value(), item.key());
  }
}

}  // namespace distributed_test
