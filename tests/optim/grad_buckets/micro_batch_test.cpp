// One bad micro-batch does not spoil the others.

#include <mezzo/optim/grad_buckets.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <vector>

#include "../../support/special_values.h"

namespace {

using mezzo::GradBuckets;
using mezzo::GradBucketsOptions;
using mezzo::GradStorage;
using torch::Tensor;

class MicroBatch : public testing::Test {
 protected:
  /// One micro-batch whose gradients are `a` and `b`.
  bool run(float a, float b) {
    return buckets_.accumulate_if_finite([&] { (a_ * a + b_ * b).sum().backward(); }).item<bool>();
  }
  static void expect_all(const Tensor& gradient, float value) {
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, value))) << gradient;
  }
  bool found_inf() { return buckets_.summarize(torch::ones({})).found_inf.item<float>() != 0; }

  Tensor a_ = torch::ones({3}).requires_grad_();
  Tensor b_ = torch::ones({3}).requires_grad_();
  GradBuckets buckets_{{a_, b_},
                       GradBucketsOptions().storage(GradStorage::flat).check_during_backward(true)};
};

TEST_F(MicroBatch, ABadOneIsDroppedAndTheRestSurvives) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_TRUE(run(kNan, 4));
  EXPECT_TRUE(run(8, std::numeric_limits<float>::infinity()));
  EXPECT_FALSE(run(16, 32));
  expect_all(a_.grad(), 17);
  expect_all(b_.grad(), 34);
  EXPECT_FALSE(found_inf());
  EXPECT_TRUE(a_.grad().storage().is_alias_of(buckets_.buckets()[0].flat.storage()));
}

TEST_F(MicroBatch, ABadFirstOneIsReplacedByTheNext) {
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_FALSE(run(2, 3));
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 3);
  EXPECT_FALSE(run(2, 3));
  expect_all(a_.grad(), 4);
}

TEST_F(MicroBatch, AllBadAreFoundByTheStepsCheck) {
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_TRUE(run(1, kNan));
  EXPECT_TRUE(found_inf());
  buckets_.zero_grad();
  EXPECT_FALSE(run(1, 1));
  EXPECT_FALSE(run(1, 1));
  expect_all(a_.grad(), 2);
}

TEST_F(MicroBatch, ForgetsABadOneThatTheModelZeroed) {
  EXPECT_TRUE(run(kNan, 1));
  a_.mutable_grad().reset();
  b_.mutable_grad().reset();
  EXPECT_FALSE(run(1, 2));
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(MicroBatch, CountsZeroedGradientsAsAccumulated) {
  EXPECT_TRUE(run(kNan, 1));
  buckets_.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(run(kNan, 1));
  expect_all(a_.grad(), 0);
  EXPECT_FALSE(run(1, 2));
  expect_all(b_.grad(), 2);
}

TEST_F(MicroBatch, AddsToGradientsOfAnOrdinaryPass) {
  (a_ * 5).sum().backward();
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 6);
  expect_all(b_.grad(), 2);
}

TEST_F(MicroBatch, KeepsParametersThatItDoesNotUse) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_FALSE(buckets_.accumulate_if_finite([&] { a_.sum().backward(); }).item<bool>());
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 2);
  EXPECT_FALSE(buckets_.accumulate_if_finite([] {}).item<bool>());
  expect_all(a_.grad(), 2);
}

TEST_F(MicroBatch, PutsBackWhatWasAccumulatedIfBackwardThrows) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_THROW(buckets_.accumulate_if_finite([&] {
    (a_ * 7).sum().backward();
    throw std::runtime_error("out of memory");
  }),
               std::runtime_error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(MicroBatch, PutsBackWhatWasAccumulatedIfAGradientCannotBe) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_THROW(buckets_.accumulate_if_finite([&] {
    (a_ * 7).sum().backward();
    b_.mutable_grad() = torch::ones({2});
  }),
               c10::Error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(MicroBatch, TakesSparseGradients) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  GradBuckets buckets({embedding->weight}, GradBucketsOptions().storage(GradStorage::flat));
  const auto run_sparse = [&](float weight) {
    return buckets
        .accumulate_if_finite(
            [&] { (embedding->forward(torch::tensor({1})) * weight).sum().backward(); })
        .item<bool>();
  };
  EXPECT_FALSE(run_sparse(1));
  EXPECT_TRUE(run_sparse(kNan));
  EXPECT_FALSE(run_sparse(2));
  EXPECT_EQ(embedding->weight.grad().to_dense().sum().item<double>(), 6);
}

// What runs where the host does not know: on the CPU it can be looked at.
TEST_F(MicroBatch, DecidesOnTheDeviceAsOnTheHost) {
  const auto flag = [](bool value) { return torch::full({}, value, torch::kBool); };
  for (const bool is_bad : {false, true}) {
    for (const bool holds_bad : {false, true}) {
      const auto accumulated = torch::full({3}, holds_bad ? kNan : 1.0F);
      const auto gradient = torch::full({3}, is_bad ? kNan : 2.0F);
      const auto host =
          mezzo::detail::accumulated_on_host(accumulated.clone(), gradient, is_bad, holds_bad);
      const auto device = mezzo::detail::accumulated_on_device(accumulated.clone(), gradient,
                                                               flag(is_bad), flag(holds_bad));
      EXPECT_TRUE(torch::allclose(host, device, 0, 0, /*equal_nan=*/true))
          << is_bad << holds_bad << host << device;
    }
  }
  const auto ones = torch::ones({3});
  EXPECT_TRUE(
      torch::equal(mezzo::detail::accumulated_on_device({}, ones, flag(false), flag(true)), ones));
  EXPECT_TRUE(torch::equal(
      mezzo::detail::accumulated_on_device(ones.clone(), {}, flag(false), flag(false)), ones));
  EXPECT_FALSE(mezzo::detail::accumulated_on_device({}, {}, flag(false), flag(false)).defined());
}

}  // namespace
