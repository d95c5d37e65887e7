#include <torch/torch.h>
//
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/check_equal_on_all_ranks.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "../support/message_of.h"
#include "test_backends.h"

namespace {

using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using mezzo::TensorsByName;
using test_support::message_of;
using testing::AllOf;
using testing::HasSubstr;

TensorsByName some_tensors() {
  return {{"weight", torch::randn({3, 4}).requires_grad_()},
          {"half", torch::randn({5}).to(at::kHalf)},
          {"count", torch::randint(100, {2})},
          {"none", at::Tensor()},
          {"empty", torch::empty({0, 7})}};
}

TEST(BroadcastParameters, CopiesRank0ToAllRanks) {
  const BackendPtr world = make_world_backend();
  torch::manual_seed(world->getRank());
  const TensorsByName tensors = some_tensors();
  mezzo::broadcast_parameters(tensors, world);
  torch::manual_seed(0);
  const TensorsByName expected = some_tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].second.defined()) continue;
    EXPECT_TRUE(at::equal(tensors[i].second, expected[i].second)) << tensors[i].first;
  }
  EXPECT_TRUE(tensors[0].second.is_leaf() && tensors[0].second.requires_grad());
}

TEST(BroadcastParameters, DifferentModelThrowsWithoutWriting) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) GTEST_SKIP() << "needs two ranks";
  const int last = world->getSize() - 1;
  const auto expect_error = [&](const TensorsByName& of_the_last, const std::string& line,
                                const std::string& root_line) {
    TensorsByName tensors = {{"a", torch::full({2, 3}, 7.F)}, {"b", torch::zeros({4})}};
    if (world->getRank() == last) tensors = of_the_last;
    EXPECT_THAT(message_of([&] { mezzo::broadcast_parameters(tensors, world); }),
                AllOf(HasSubstr("broadcast_parameters: "),
                      HasSubstr("rank " + std::to_string(last) + " has \"" + line +
                                "\" where rank 0 has \"" + root_line + "\"")));
    if (!tensors.empty()) {
      EXPECT_EQ(tensors[0].second.flatten()[0].item<float>(), world->getRank() == last ? 1.F : 7.F);
    }
  };
  const at::Tensor one = torch::ones({2, 3});
  const at::Tensor b = torch::zeros({4});
  const std::string root_a = "a: Float [2, 3], does not require grad";
  expect_error({{"a", torch::ones({3, 2})}, {"b", b}}, "a: Float [3, 2], does not require grad",
               root_a);
  expect_error({{"a", one.to(at::kHalf)}, {"b", b}}, "a: Half [2, 3], does not require grad",
               root_a);
  expect_error({{"c", one}, {"b", b}}, "c: Float [2, 3], does not require grad", root_a);
  expect_error({{"a", one.clone().requires_grad_()}, {"b", b}}, "a: Float [2, 3], requires grad",
               root_a);
  expect_error({{"a", one}}, "nothing more", "b: Float [4], does not require grad");
  expect_error({{"a", one}, {"b", b}, {"c", b}}, "c: Float [4], does not require grad",
               "nothing more");
  expect_error({}, "nothing more", root_a);
}

TEST(CheckEqualOnAllRanks, ReportsUnequalValue) {
  const BackendPtr world = make_world_backend();
  mezzo::check_equal_on_all_ranks(world, "batches", 10);
  if (world->getSize() == 1) return;
  const int last = world->getSize() - 1;
  EXPECT_THAT(message_of([&] {
                mezzo::check_equal_on_all_ranks(world, "batches",
                                                world->getRank() == last ? 9 : 10);
              }),
              testing::HasSubstr("rank " + std::to_string(last) +
                                 " has \"9 batches\" where rank 0 has \"10 batches\""));
}

}  // namespace
