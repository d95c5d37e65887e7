// A schedule as a table, indexed by the steps that were applied.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <vector>

namespace {

using mezzo::Verdict;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using testing::HasSubstr;
using testing::ThrowsMessage;

Verdict verdict_of(bool found_inf) {
  return {torch::ones({}), torch::full({}, found_inf ? 1.0F : 0.0F)};
}

/// Steps of SGD with gradient 1: how far each one went.
class Distances : public testing::TestWithParam<bool> {
 protected:
  double step(bool found_inf = false) {
    const double before = parameter_.item<double>();
    parameter_.mutable_grad() = torch::ones({}, torch::kDouble);
    if (GetParam()) {
      optimizer_.apply_with_aten(optimizer_.plan(), verdict_of(found_inf));
    } else {
      optimizer_.apply(optimizer_.plan(), verdict_of(found_inf));
    }
    return before - parameter_.item<double>();
  }

  torch::Tensor parameter_ = torch::zeros({}, torch::kDouble).requires_grad_();
  SGD optimizer_ = SGD({parameter_}, SGDOptions(0.5));
};

TEST_P(Distances, AreThoseOfTheFactorsAndThenOfTheLast) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.0, 2.0});
  for (const double expected : {0.5, 0.25, 0.0, 1.0, 1.0, 1.0}) {
    EXPECT_DOUBLE_EQ(step(), expected);
  }
  EXPECT_EQ(optimizer_.applied_steps(), 6);
}

TEST_P(Distances, AreNotUsedUpBySkippedSteps) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.25});
  EXPECT_EQ(step(true), 0);
  EXPECT_EQ(optimizer_.applied_steps(), 0);
  EXPECT_DOUBLE_EQ(step(), 0.5);
  EXPECT_EQ(step(true), 0);
  EXPECT_EQ(step(true), 0);
  EXPECT_DOUBLE_EQ(step(), 0.25);
  EXPECT_EQ(optimizer_.applied_steps(), 2);
}

TEST_P(Distances, GoOnFromTheNumberThatIsSet) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.25, 0.125});
  optimizer_.set_applied_steps(2);
  EXPECT_DOUBLE_EQ(step(), 0.125) << "before any step";
  optimizer_.set_applied_steps(1);
  EXPECT_EQ(step(true), 0);
  EXPECT_DOUBLE_EQ(step(), 0.25);
  EXPECT_EQ(optimizer_.applied_steps(), 2);
  std::stringstream file;
  torch::save(optimizer_, file);
  SGD resumed({parameter_}, SGDOptions(3));
  torch::load(resumed, file);
  EXPECT_EQ(resumed.applied_steps(), 2);
}

INSTANTIATE_TEST_SUITE_P(OfEachWayToStep, Distances, testing::Bool(), [](const auto& one) {
  return one.param ? "ThroughAten" : "ByMezzosKernels";
});

TEST(LrFactors, CountStepsOfTheOptimizerNotThoseOfAParameter) {
  const auto always = torch::zeros({1}).requires_grad_();
  const auto seldom = torch::zeros({1}).requires_grad_();
  SGD optimizer({always, seldom}, SGDOptions(1.0));
  optimizer.set_lr_factors({1.0, 0.5, 0.25});
  always.mutable_grad() = torch::ones({1});
  optimizer.step();
  optimizer.step();
  seldom.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_EQ(seldom.item<float>(), -0.25F);
}

TEST(LrFactors, AreChecked) {
  const auto parameter = torch::zeros({1}).requires_grad_();
  SGD optimizer({parameter}, SGDOptions(1.0));
  for (const double bad :
       {-0.5, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(
        [&] {
          optimizer.set_lr_factors({1.0, bad});
        },
        ThrowsMessage<c10::Error>(HasSubstr("factors[1] is")));
  }
  EXPECT_TRUE(optimizer.lr_factors().empty());
}

TEST(AppliedSteps, LeaveWhatParametersCountAsItIs) {
  const auto parameter = torch::zeros({4}).requires_grad_();
  AdamW optimizer({parameter}, AdamWOptions(0.1));
  parameter.mutable_grad() = torch::ones({4});
  optimizer.step();
  optimizer.set_applied_steps(1000);
  const auto& state =
      static_cast<mezzo::optim::AdamWParamState&>(*optimizer.state().begin()->second);
  EXPECT_EQ(state.step(), 1);
  EXPECT_EQ(optimizer.applied_steps(), 1000);
  EXPECT_THAT([&] { optimizer.set_applied_steps(-1); },
              ThrowsMessage<c10::Error>(HasSubstr("applied_steps is -1")));
  EXPECT_EQ(optimizer.applied_steps(), 1000);
}

}  // namespace
