// Micro-batches of a loader that know their place in a step.

#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/accumulate.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Samples 0, 1, ... in batches of one.
auto loader_of(int64_t samples) {
  auto data = torch::arange(samples, torch::kFloat).reshape({samples, 1});
  return torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      torch::data::datasets::TensorDataset(data).map(
          torch::data::transforms::Stack<torch::data::TensorExample>()),
      /*batch_size=*/1);
}

std::vector<std::string> places(int64_t samples, int64_t micro_batches) {
  std::vector<std::string> places;
  auto loader = loader_of(samples);
  for (auto& batch : mezzo::accumulate(*loader, micro_batches)) {
    places.push_back(std::to_string(batch.data.item<int64_t>()) + ": " +
                     std::to_string(batch.index()) + " of " + std::to_string(batch.count()) +
                     (batch.is_last() ? ", last" : ""));
  }
  return places;
}

TEST(Accumulate, BatchesOfALoaderKnowTheirGroupAlsoTheIncompleteLastOne) {
  EXPECT_THAT(places(5, 3), ElementsAre("0: 0 of 3", "1: 1 of 3", "2: 2 of 3, last", "3: 0 of 2",
                                        "4: 1 of 2, last"));
  EXPECT_THAT(places(2, 1), ElementsAre("0: 0 of 1, last", "1: 0 of 1, last"));
  EXPECT_THAT(places(1, 4), ElementsAre("0: 0 of 1, last"));
  EXPECT_THAT(places(0, 4), ElementsAre());
}

TEST(Accumulate, TrainsAsOnTheWholeBatch) {
  const auto batches = [](const std::vector<std::vector<float>>& groups) {
    std::vector<torch::Tensor> tensors;
    for (const auto& group : groups) tensors.push_back(torch::tensor(group).reshape({-1, 1}));
    return tensors;
  };
  torch::Tensor whole = torch::ones({1}, torch::requires_grad());
  torch::optim::SGD plain({whole}, 0.1);
  for (const torch::Tensor& batch : batches({{0, 1, 2}, {3, 4}})) {
    plain.zero_grad();
    (batch * whole).square().mean().backward();
    plain.step();
  }
  torch::Tensor weight = torch::ones({1}, torch::requires_grad());
  mezzo::optim::SGD optimizer({weight}, 0.1);
  mezzo::GradScaler scaler;
  auto loader = loader_of(5);
  int steps = 0;
  for (auto& batch : mezzo::accumulate(*loader, 3)) {
    scaler.scale(batch.divide((batch.data * weight).square().mean())).backward();
    if (!batch.is_last()) continue;
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    ++steps;
  }
  EXPECT_EQ(steps, 2);
  EXPECT_NEAR(weight.item<double>(), whole.item<double>(), 1e-6);
}

TEST(Accumulate, TakesAnyRangeAndLeavesItAsItWas) {
  struct Batch {
    std::vector<int> values;
  };
  std::vector<Batch> batches{{{1}}, {{2}}, {{3}}};
  std::vector<int> seen;
  for (auto& batch : mezzo::accumulate(batches, 2)) {
    seen.push_back(batch.values.at(0) * 10 + (batch.is_last() ? 1 : 0));
    batch.values.clear();
  }
  EXPECT_THAT(seen, ElementsAre(10, 21, 31));
  EXPECT_EQ(batches[0].values.size(), 1);
  EXPECT_THAT(test_support::error_of([&] { mezzo::accumulate(batches, 0); }),
              HasSubstr("micro_batches is 0"));
}

}  // namespace
