// All ranks have the same bits.
#pragma once

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <string>

#include "test_backends.h"

namespace distributed_test {

/// All ranks call it; `name` says what differs, should it.
inline void expect_same_bits_on_all_ranks(const BackendPtr& world, const at::Tensor& tensor,
                                          const std::string& name) {
  const at::Tensor bits = tensor.detach().flatten().view(at::kByte);
  const at::Tensor all = at::empty({world->getSize(), bits.numel()}, at::kByte);
  all_gather(world, all, bits);
  for (int rank = 0; rank < world->getSize(); ++rank) {
    EXPECT_TRUE(at::equal(all[rank], bits)) << name << " on rank " << rank;
  }
}

/// The same of all parameters of `model`, a module holder.
template <class Holder>
void expect_same_weights_on_all_ranks(const BackendPtr& world, const Holder& model) {
  for (const auto& item : model->named_parameters()) {
    expect_same_bits_on_all_ranks(world, item.value(), item.key());
  }
}

}  // namespace distributed_test
