// One bad micro-batch does not spoil the others.

#include <mezzo/scaling/accumulate_if_finite.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "../support/error_of.h"
#include "../support/special_values.h"

namespace {

using mezzo::accumulate_if_finite;
using torch::Tensor;

class AccumulateIfFinite : public testing::Test {
 protected:
  /// One micro-batch whose gradients are `a` and `b`; whether it was dropped.
  bool run(float a, float b) {
    return accumulate_if_finite({a_, b_}, [&] { (a_ * a + b_ * b).sum().backward(); });
  }
  static void expect_all(const Tensor& gradient, float value) {
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, value))) << gradient;
  }
  bool found_inf() const { return !torch::isfinite(a_.grad() + b_.grad()).all().item<bool>(); }
  void zero_grad() {
    a_.mutable_grad().reset();
    b_.mutable_grad().reset();
  }

  Tensor a_ = torch::ones({3}).requires_grad_();
  Tensor b_ = torch::ones({3}).requires_grad_();
};

TEST_F(AccumulateIfFinite, ABadMicroBatchIsDroppedAndTheRestSurvives) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_TRUE(run(kNan, 4));
  EXPECT_TRUE(run(8, kInfinity));
  EXPECT_FALSE(run(16, 32));
  expect_all(a_.grad(), 17);
  expect_all(b_.grad(), 34);
}

TEST_F(AccumulateIfFinite, ABadFirstOneIsReplacedByTheNext) {
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_FALSE(run(2, 3));
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 3);
  EXPECT_FALSE(run(2, 3));
  expect_all(a_.grad(), 4);
}

TEST_F(AccumulateIfFinite, IfAllAreBadTheStepsCheckFindsTheLast) {
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_TRUE(run(1, kNan));
  EXPECT_TRUE(found_inf());
  expect_all(a_.grad(), 1);
  zero_grad();
  EXPECT_FALSE(run(1, 1));
  EXPECT_FALSE(run(1, 1));
  expect_all(a_.grad(), 2);
}

TEST_F(AccumulateIfFinite, NothingIsRememberedOfGradientsThatWereCleared) {
  EXPECT_TRUE(run(kNan, 1));
  zero_grad();
  EXPECT_FALSE(run(1, 2));
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(AccumulateIfFinite, GradientsOfZeroCountAsAccumulated) {
  EXPECT_TRUE(run(kNan, 1));
  a_.grad().zero_();
  b_.grad().zero_();
  EXPECT_TRUE(run(kNan, 1));
  expect_all(a_.grad(), 0);
  EXPECT_FALSE(run(1, 2));
  expect_all(b_.grad(), 2);
}

TEST_F(AccumulateIfFinite, AddsToGradientsOfAnOrdinaryPass) {
  (a_ * 5).sum().backward();
  EXPECT_TRUE(run(kNan, 1));
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 6);
  expect_all(b_.grad(), 2);
}

TEST_F(AccumulateIfFinite, KeepsParametersThatItDoesNotUse) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_FALSE(accumulate_if_finite({a_, b_}, [&] { a_.sum().backward(); }));
  expect_all(a_.grad(), 2);
  expect_all(b_.grad(), 2);
  EXPECT_FALSE(accumulate_if_finite({a_, b_}, [] {}));
  expect_all(a_.grad(), 2);
}

TEST_F(AccumulateIfFinite, PutsBackWhatWasAccumulatedIfBackwardThrows) {
  EXPECT_FALSE(run(1, 2));
  const auto throws = [&] {
    (a_ * 7).sum().backward();
    throw std::runtime_error("out of memory");
  };
  EXPECT_THROW(accumulate_if_finite({a_, b_}, throws), std::runtime_error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  zero_grad();
  EXPECT_THROW(accumulate_if_finite({a_, b_}, throws), std::runtime_error);
  EXPECT_FALSE(a_.grad().defined());
}

TEST_F(AccumulateIfFinite, PutsBackWhatWasAccumulatedIfAGradientCannotBeAdded) {
  EXPECT_FALSE(run(1, 2));
  EXPECT_THROW(accumulate_if_finite({a_, b_},
                                    [&] {
                                      (a_ * 7).sum().backward();
                                      b_.mutable_grad() = torch::ones({2});
                                    }),
               c10::Error);
  expect_all(a_.grad(), 1);
  expect_all(b_.grad(), 2);
  EXPECT_FALSE(run(1, 2));
  expect_all(a_.grad(), 2);
}

TEST_F(AccumulateIfFinite, TakesAParameterThatIsGivenTwice) {
  const std::vector<Tensor> tied{a_, a_};
  for (const float value : {1.0F, kNan, 2.0F}) {
    accumulate_if_finite(tied, [&] { (a_ * value).sum().backward(); });
  }
  expect_all(a_.grad(), 3);
}

TEST_F(AccumulateIfFinite, TakesSparseGradients) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  const auto run_sparse = [&](float weight) {
    return accumulate_if_finite(embedding->parameters(), [&] {
      (embedding->forward(torch::tensor({1})) * weight).sum().backward();
    });
  };
  EXPECT_FALSE(run_sparse(1));
  EXPECT_TRUE(run_sparse(kNan));
  EXPECT_FALSE(run_sparse(2));
  EXPECT_EQ(embedding->weight.grad().to_dense().sum().item<double>(), 6);
}

TEST_F(AccumulateIfFinite, SaysWhatIsWrongWithItsArguments) {
  EXPECT_NE(test_support::error_of([&] {
              accumulate_if_finite({a_}, nullptr);
            }).find("backward is an empty function"),
            std::string::npos);
  EXPECT_NE(test_support::error_of([&] {
              accumulate_if_finite({a_, Tensor()}, [] {});
            }).find("parameter 1 is undefined"),
            std::string::npos);
}

}  // namespace
