#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/detail/gradient_stash.h>
#include <mezzo/scaling/finite_grad_accumulator.h>
#include <mezzo/scaling/grad_scaler.h>
#include <mezzo/scaling/gradient_accumulation.h>
#include <mezzo/scaling/micro_batches.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/special_values.h"

namespace {

using mezzo::detail::GradientStash;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

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
  for (auto& batch : mezzo::micro_batches(*loader, micro_batches)) {
    places.push_back(std::to_string(batch.data.item<int64_t>()) + ": " +
                     std::to_string(batch.index()) + " of " + std::to_string(batch.count()) +
                     (batch.is_last() ? ", last" : ""));
  }
  return places;
}

TEST(MicroBatches, ReportsPositionInIncompleteLastWindow) {
  EXPECT_THAT(places(5, 3), ElementsAre("0: 0 of 3", "1: 1 of 3", "2: 2 of 3, last", "3: 0 of 2",
                                        "4: 1 of 2, last"));
  EXPECT_THAT(places(2, 1), ElementsAre("0: 0 of 1, last", "1: 0 of 1, last"));
  EXPECT_THAT(places(1, 4), ElementsAre("0: 0 of 1, last"));
  EXPECT_THAT(places(0, 4), ElementsAre());
}

// A checkpoint after a step must contain the data position of that step.
TEST(MicroBatches, DrawsNoBatchBeyondWindow) {
  int drawn = 0;
  auto loader = std::views::iota(0, 6) | std::views::transform([&](int number) {
                  struct Number {
                    int number;
                  };
                  return Number{number};
                }) |
                std::views::filter([&](const auto&) { return ++drawn > 0; });
  for (const auto& batch : mezzo::micro_batches(loader, 2)) {
    EXPECT_EQ(drawn, batch.number + (batch.is_last() ? 1 : 2));
  }
  EXPECT_EQ(drawn, 6);
}

TEST(MicroBatches, HoldsBatchesOfOneWindow) {
  struct Held {
    std::shared_ptr<int> memory;
  };
  std::vector<std::weak_ptr<int>> read;
  auto loader = std::views::iota(0, 6) | std::views::transform([&](int number) {
                  Held batch{std::make_shared<int>(number)};
                  read.emplace_back(batch.memory);
                  return batch;
                });
  for (auto& batch : mezzo::micro_batches(loader, 2)) {
    const auto held =
        std::count_if(read.begin(), read.end(), [](auto& memory) { return !memory.expired(); });
    EXPECT_EQ(held, 2) << *batch.memory;
  }
}

TEST(MicroBatches, MatchesTrainingOnWholeBatch) {
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
  for (auto& batch : mezzo::micro_batches(*loader, 3)) {
    scaler.scale(batch.normalize_loss((batch.data * weight).square().mean())).backward();
    if (!batch.is_last()) continue;
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    ++steps;
  }
  EXPECT_EQ(steps, 2);
  EXPECT_NEAR(weight.item<double>(), whole.item<double>(), 1e-6);
}

TEST(MicroBatches, AcceptsAnyRangeWithoutModifyingIt) {
  struct Batch {
    std::vector<int> values;
  };
  std::vector<Batch> batches{{{1}}, {{2}}, {{3}}};
  std::vector<int> seen;
  for (auto& batch : mezzo::micro_batches(batches, 2)) {
    seen.push_back(batch.values.at(0) * 10 + (batch.is_last() ? 1 : 0));
    batch.values.clear();
  }
  EXPECT_THAT(seen, ElementsAre(10, 21, 31));
  EXPECT_EQ(batches[0].values.size(), 1);
  EXPECT_THAT(test_support::message_of([&] { mezzo::micro_batches(batches, 0); }),
              HasSubstr("gradient_accumulation_steps is 0"));
}

TEST(MicroBatches, PositionHidesMembersOfBatch) {
  struct Batch {
    int index = 7;
    int count = 8;
  };
  std::vector<Batch> batches(1);
  for (auto& batch : mezzo::micro_batches(batches, 4)) {
    EXPECT_EQ(batch.index(), 0);
    EXPECT_EQ(batch.Batch::index, 7);
  }
}

// --- GradientAccumulation

/// Returns the positions of micro-batches as "index/count", with "!" after the last of a window.
std::string get_positions(mezzo::GradientAccumulation& accumulation, int num_batches) {
  std::string positions;
  for (int i = 0; i < num_batches; ++i) {
    accumulation.next();
    positions += std::to_string(accumulation.index()) + "/" + std::to_string(accumulation.count()) +
                 (accumulation.is_last() ? "! " : " ");
  }
  return positions;
}

TEST(GradientAccumulation, EndsWindowWithEpoch) {
  mezzo::GradientAccumulation unknown(3), five(3, 5), two(3, 2);
  EXPECT_EQ(get_positions(unknown, 5), "0/3 1/3 2/3! 0/3 1/3 ");
  EXPECT_EQ(get_positions(five, 6), "0/3 1/3 2/3! 0/2 1/2! 0/3 ");
  EXPECT_EQ(get_positions(two, 4), "0/2 1/2! 0/2 1/2! ");
}

TEST(GradientAccumulation, ResetBeginsWindow) {
  mezzo::GradientAccumulation accumulation(2, 5);
  EXPECT_EQ(get_positions(accumulation, 1), "0/2 ");
  accumulation.reset();
  EXPECT_FALSE(accumulation.is_last());
  EXPECT_EQ(get_positions(accumulation, 6), "0/2 1/2! 0/2 1/2! 0/1! 0/2 ");
  accumulation.reset(4);
  EXPECT_EQ(get_positions(accumulation, 2), "0/1! 0/2 ");
}

TEST(GradientAccumulation, InvalidUseThrows) {
  using test_support::message_of;
  mezzo::GradientAccumulation accumulation(4);
  EXPECT_THAT(message_of([&] { (void)accumulation.normalize_loss(torch::ones({})); }),
              HasSubstr("call next() at the beginning"));
  EXPECT_THAT(message_of([] { mezzo::GradientAccumulation(0); }),
              HasSubstr("gradient_accumulation_steps is 0"));
  EXPECT_THAT(message_of([] { mezzo::GradientAccumulation(4, -1); }),
              HasSubstr("batches_per_epoch is -1"));
  EXPECT_THAT(message_of([&] { accumulation.reset(3); }), HasSubstr("batches_done is 3"));
}

// --- FiniteGradAccumulator

class FiniteGradAccumulator : public testing::Test {
 protected:
  /// Adds a micro-batch whose gradients are `a` and `b`; returns whether it was added.
  bool add(float a, float b) {
    return accumulator_.add([&] { (a_ * a + b_ * b).sum().backward(); });
  }
  static void expect_all(const Tensor& gradient, float value) {
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, value))) << gradient;
  }
  /// Starts the next step.
  void zero_grad() {
    a_.mutable_grad().reset();
    b_.mutable_grad().reset();
    accumulator_ = mezzo::FiniteGradAccumulator({a_, b_});
  }

  Tensor a_ = torch::ones({3}).requires_grad_();
  Tensor b_ = torch::ones({3}).requires_grad_();
  mezzo::FiniteGradAccumulator accumulator_{{a_, b_}};
};

TEST_F(FiniteGradAccumulator, NonfiniteMicroBatchIsDropped) {
  EXPECT_TRUE(add(1, 2));
  EXPECT_FALSE(add(kNan, 4));
  EXPECT_FALSE(add(8, kInfinity));
  EXPECT_TRUE(add(16, 32));
  expect_all(a_.grad(), 17);
  expect_all(b_.grad(), 34);
}

TEST_F(FiniteGradAccumulator, NonfiniteFirstMicroBatchIsReplaced) {
  EXPECT_FALSE(add(kNan, 1));
  EXPECT_TRUE(add(2, 3));
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 3);
  EXPECT_TRUE(add(2, 3));
  expect_all(a_.grad(), 4);
}

TEST_F(FiniteGradAccumulator, KeepsLastMicroBatchIfAllNonfinite) {
  EXPECT_FALSE(add(kNan, 1));
  EXPECT_FALSE(add(1, kNan));
  expect_all(a_.grad(), 1);
  EXPECT_TRUE(b_.grad().isnan().all().item<bool>());
  zero_grad();
  EXPECT_TRUE(add(1, 1));
  EXPECT_TRUE(add(1, 1));
  expect_all(a_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, OverflowedSumStaysInf) {
  a_ = torch::ones({3}, torch::kHalf).requires_grad_();
  for (const bool begins_bad : {false, true}) {
    zero_grad();
    if (begins_bad) {
      EXPECT_FALSE(add(kNan, 1));
    }
    for (const float gradient : {40000.0F, 40000.0F, 1.0F}) EXPECT_TRUE(add(gradient, 1));
    expect_all(a_.grad(), kInfinity);
    expect_all(b_.grad(), 3);
  }
}

TEST_F(FiniteGradAccumulator, NonfiniteGradientReplacedInNewTensor) {
  EXPECT_FALSE(add(kInfinity, 1));
  a_.mutable_grad() = a_.grad().clone();
  EXPECT_TRUE(add(1, 1));
  expect_all(a_.grad(), 1);
}

// An accumulator can be reused if zero_grad() ends each step.
TEST_F(FiniteGradAccumulator, ClearedGradientsAreNotReplaced) {
  EXPECT_FALSE(add(kNan, 1));
  a_.mutable_grad().reset();
  b_.mutable_grad().reset();
  EXPECT_TRUE(add(1, 2));
  EXPECT_TRUE(add(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, ZeroGradientsCountAsAccumulated) {
  EXPECT_FALSE(add(kNan, 1));
  a_.grad().zero_();
  b_.grad().zero_();
  EXPECT_FALSE(add(kNan, 1));
  expect_all(a_.grad(), 0);
  EXPECT_TRUE(add(1, 2));
  expect_all(b_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, AddsToGradientsOfOtherBackward) {
  (a_ * 5).sum().backward();
  EXPECT_FALSE(add(kNan, 1));
  EXPECT_TRUE(add(1, 2));
  expect_all(a_.grad(), 6);
  expect_all(b_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, UnusedParametersKeepGradients) {
  EXPECT_TRUE(add(1, 2));
  EXPECT_TRUE(accumulator_.add([&] { a_.sum().backward(); }));
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 2);
  EXPECT_TRUE(accumulator_.add([] {}));
  expect_all(a_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, ThrowingBackwardKeepsGradients) {
  EXPECT_TRUE(add(1, 2));
  const auto throws = [&] {
    (a_ * 7).sum().backward();
    throw std::runtime_error("out of memory");
  };
  EXPECT_THROW(accumulator_.add(throws), std::runtime_error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  zero_grad();
  EXPECT_THROW(accumulator_.add(throws), std::runtime_error);
  EXPECT_FALSE(a_.grad().defined());
}

TEST_F(FiniteGradAccumulator, ThrowsForGradientOfOtherShape) {
  EXPECT_TRUE(add(1, 2));
  EXPECT_THROW(accumulator_.add([&] {
    (a_ * 7).sum().backward();
    b_.mutable_grad() = torch::ones({2});
  }),
               c10::Error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  EXPECT_TRUE(add(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, OutOfMemoryKeepsGradients) {
  EXPECT_TRUE(add(1, 2));
  const Tensor base = torch::zeros({1});  // shares its storage, so it is copied
  const Tensor huge = torch::zeros({1}).expand({int64_t{1} << 61}).detach().requires_grad_();
  huge.mutable_grad() = base.expand({int64_t{1} << 61});
  EXPECT_THROW(mezzo::FiniteGradAccumulator({a_, b_, huge}).add([] {}), std::exception);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
}

TEST_F(FiniteGradAccumulator, DuplicateParameterIsAddedOnce) {
  mezzo::FiniteGradAccumulator tied({a_, a_});
  for (const float value : {1.0F, kNan, 2.0F}) {
    tied.add([&] { (a_ * value).sum().backward(); });
  }
  expect_all(a_.grad(), 3);
}

// Duplicate indices whose sum overflows are inf.
TEST_F(FiniteGradAccumulator, NonfiniteSparseMicroBatchIsDropped) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  mezzo::FiniteGradAccumulator accumulator(embedding->parameters());
  const auto add_at = [&](int64_t first, int64_t second, float weight) {
    return accumulator.add([&] {
      (embedding->forward(torch::tensor({first, second})) * weight).sum().backward();
    });
  };
  EXPECT_TRUE(add_at(1, 2, 1));
  EXPECT_FALSE(add_at(1, 2, kNan));
  EXPECT_FALSE(add_at(3, 3, 2e38F)) << "duplicate indices add up to 4e38";
  EXPECT_TRUE(add_at(0, 3, 2));
  EXPECT_EQ(embedding->weight.grad().to_dense().sum().item<double>(), 12);
}

TEST_F(FiniteGradAccumulator, InvalidArgumentThrows) {
  EXPECT_THAT(test_support::message_of([&] { accumulator_.add(nullptr); }),
              HasSubstr("backward is an empty function"));
  EXPECT_THAT(test_support::message_of([&] {
                mezzo::FiniteGradAccumulator({a_, Tensor()});
              }),
              HasSubstr("parameter 1 is undefined"));
}

// --- GradientStash

Tensor leaf(torch::ScalarType dtype = torch::kFloat) {
  return torch::ones({3}, dtype).requires_grad_();
}

Tensor sparse(double value, torch::ScalarType dtype = torch::kFloat) {
  return torch::sparse_coo_tensor(torch::tensor({{int64_t{1}}}), torch::full({1}, value, dtype),
                                  {3});
}

TEST(GradientStash, RestoresViewOverwrittenByNextBackward) {
  const auto a = leaf();
  const auto flat = torch::zeros({8});
  const auto place = flat.narrow(0, 2, 3);
  place.fill_(2);
  a.mutable_grad() = place;
  {
    const GradientStash before({a});
    place.fill_(7);  // as the hook of a bucket does
    a.mutable_grad() = place;
  }
  EXPECT_TRUE(a.grad().is_same(place));
  EXPECT_TRUE(torch::equal(place, torch::full({3}, 2.0F)));
}

TEST(GradientStash, AddsMixedDtypesInFloat32) {
  for (const auto low : {torch::kBFloat16, torch::kHalf}) {
    for (const bool is_old_wide : {false, true}) {
      const auto a = leaf(low);
      a.mutable_grad() = torch::full({3}, 2048.0, is_old_wide ? torch::kFloat : low);
      GradientStash before({a});
      a.mutable_grad() = torch::full({3}, 1.0, is_old_wide ? low : torch::kFloat);
      before.add_back();
      EXPECT_TRUE(torch::equal(a.grad(), torch::full({3}, 2049.0F)));
    }
  }
}

TEST(GradientStash, AddsSparseAndDense) {
  const auto expected = torch::tensor({1.0F, 3.0F, 1.0F});
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const bool is_old_sparse : {false, true}) {
      const auto a = leaf(dtype);
      a.mutable_grad() = is_old_sparse ? sparse(2) : torch::ones({3}, dtype);
      GradientStash before({a});
      a.mutable_grad() = is_old_sparse ? torch::ones({3}, dtype) : sparse(2);
      before.add_back();
      EXPECT_TRUE(torch::equal(a.grad(), expected)) << dtype << is_old_sparse << a.grad();
    }
  }
  const auto a = leaf();
  a.mutable_grad() = sparse(2);
  GradientStash before({a});
  a.mutable_grad() = sparse(3);
  before.add_back();
  EXPECT_TRUE(a.grad().is_sparse());
  EXPECT_TRUE(torch::equal(a.grad().to_dense(), torch::tensor({0.0F, 5.0F, 0.0F})));
}

}  // namespace
