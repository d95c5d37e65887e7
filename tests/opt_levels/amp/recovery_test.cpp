// Amp after an exception or calls in an unusual order: gradients are unscaled exactly once.
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../../support/throwing_sgd.h"
#include "vector_model.h"

namespace {

using namespace initialize_test;
using mezzo::Amp;
using mezzo::InitializeOptions;
using mezzo::OptLevel;
using test_support::ThrowingSgd;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// One model and one optimizer whose step may throw.
struct Solo {
  explicit Solo(const OptLevel& level)
      : amp(mezzo::initialize(model, sgd, scaled(level), kQuiet)) {}

  void pass(double factor, bool delays = false) {
    amp.backward(amp.forward(model, filled(factor)), sgd, {.delay_unscale = delays});
  }
  void pass_that_throws(double factor) {
    const auto backward = [](const torch::Tensor& loss) {
      loss.backward();
      throw std::runtime_error("out of memory");
    };
    EXPECT_THROW(amp.scale_loss(amp.forward(model, filled(factor)), sgd, backward),
                 std::runtime_error);
  }
  void step_that_throws(double max_norm = kNoLimit) {
    sgd.throws = true;
    EXPECT_THROW(amp.step(sgd, {.max_norm = max_norm}), std::runtime_error);
    sgd.throws = false;
  }

  Vector model;
  ThrowingSgd sgd{model->parameters(), 1.0};
  Amp amp;
};

const std::vector<OptLevel> kLevels{OptLevel::O0(), OptLevel::O1(), OptLevel::O2()};

/// Two models and two optimizers that share a loss scale.
struct Pair {
  explicit Pair(const OptLevel& level = OptLevel::O1())
      : amp(mezzo::initialize({first, second}, {first_optimizer, second_optimizer}, scaled(level),
                              kQuiet)) {}

  void pass_for_both(double first_factor, double second_factor, bool delays = false) {
    amp.backward(
        amp.forward(first, filled(first_factor)) + amp.forward(second, filled(second_factor)),
        {first_optimizer, second_optimizer}, {.delay_unscale = delays});
  }
  double clean_iterations() { return amp.state_dict().at("loss_scaler0").at("unskipped"); }

  Vector first, second;
  torch::optim::SGD first_optimizer{first->parameters(), 1.0},
      second_optimizer{second->parameters(), 1.0};
  Amp amp;
};

TEST(AmpRecovery, StepSucceedsAfterStepThrew) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        Solo solo(level);
        solo.pass(0.25, delays);
        solo.step_that_throws(max_norm);
        EXPECT_TRUE(solo.amp.step(solo.sgd, {.max_norm = max_norm}).applied());
        EXPECT_EQ(weight_of(solo.model), 0.75F) << level.name() << delays << max_norm;
        EXPECT_EQ(solo.amp.scaler().get_scale(), kScale);
      }
    }
  }
}

TEST(AmpRecovery, NewBatchAfterStepThrew) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        for (const bool by_amp : {false, true}) {
          Solo solo(level);
          solo.pass(0.25, delays);
          solo.step_that_throws(max_norm);
          by_amp ? solo.amp.zero_grad(solo.sgd) : solo.sgd.zero_grad();
          solo.pass(0.5, delays);
          EXPECT_TRUE(solo.amp.step(solo.sgd, {.max_norm = max_norm}).applied());
          EXPECT_EQ(weight_of(solo.model), 0.5F) << level.name() << delays << max_norm << by_amp;
        }
      }
    }
  }
}

TEST(AmpRecovery, AccumulatesAfterStepThrew) {
  for (const OptLevel& level : kLevels) {
    Solo solo(level);
    solo.pass(0.25);
    solo.step_that_throws();
    solo.pass(0.5);
    solo.amp.step(solo.sgd);
    EXPECT_EQ(weight_of(solo.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, PreservesUnscaledGradientsWhenBackwardThrows) {
  for (const OptLevel& level : kLevels) {
    Solo solo(level);
    solo.pass(0.25);
    solo.pass_that_throws(8);
    EXPECT_EQ(solo.amp.master_params(solo.sgd)[0].grad()[0].item<float>(), 0.25F) << level.name();
    solo.pass_that_throws(8);
    solo.pass(0.5);
    solo.amp.step(solo.sgd);
    EXPECT_EQ(weight_of(solo.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, OptimizerZeroGradDiscardsBatch) {
  for (const OptLevel& level : kLevels) {
    for (const bool set_to_none : {false, true}) {
      for (const bool by_amp : {false, true}) {
        for (const bool throws : {false, true}) {
          Solo solo(level);
          solo.pass(0.25);
          if (throws) solo.pass_that_throws(8);
          by_amp ? solo.amp.zero_grad(solo.sgd, set_to_none) : solo.sgd.zero_grad(set_to_none);
          if (by_amp) {
            EXPECT_NO_THROW((void)solo.amp.state_dict()) << "there is nothing to step";
          }
          solo.pass(0.5);
          solo.amp.step(solo.sgd);
          EXPECT_EQ(weight_of(solo.model), 0.5F) << level.name() << set_to_none << by_amp << throws;
        }
      }
    }
  }
}

/// An optimizer whose gradients were removed between the last unscale and the step.
template <class Optimizer, class Options>
void expect_to_step_without_gradients(const Options& options) {
  for (const double factor : {0.25, kNoLimit}) {
    Vector model;
    Optimizer optimizer(model->parameters(), options);
    Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O0()), kQuiet);
    amp.backward(amp.forward(model, filled(factor)), optimizer);
    optimizer.zero_grad();
    EXPECT_TRUE(amp.step(optimizer).applied()) << "there is nothing to skip";
    EXPECT_EQ(weight_of(model), 1.0F);
    EXPECT_EQ(amp.scaler().get_scale(), factor == 0.25 ? kScale : kScale / 2);
  }
}

TEST(AmpRecovery, StepsWithoutGradients) {
  expect_to_step_without_gradients<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1.0));
  expect_to_step_without_gradients<torch::optim::SGD>(torch::optim::SGDOptions(1.0));
}

TEST(AmpRecovery, ThrowsForCallsDuringBackward) {
  Solo solo(OptLevel::O2());
  Amp& amp = solo.amp;
  const auto within = [&](auto&& call) {
    return [&amp, &solo, call] {
      amp.scale_loss(amp.forward(solo.model, filled(0.25)), solo.sgd,
                     [&](const torch::Tensor& loss) {
                       call();
                       loss.backward();
                     });
    };
  };
  const auto throws_error = ThrowsMessage<c10::Error>(HasSubstr("called during amp.backward"));
  EXPECT_THAT(within([&] { solo.pass(0.5); }), throws_error);
  EXPECT_THAT(within([&] { amp.step(solo.sgd); }), throws_error);
  EXPECT_THAT(within([&] { amp.zero_grad(solo.sgd); }), throws_error);
  solo.pass(0.5);
  EXPECT_TRUE(amp.step(solo.sgd).applied());
  EXPECT_EQ(weight_of(solo.model), 0.5F);
}

TEST(AmpRecovery, ContinuesAfterSkipCallbackThrew) {
  Solo solo(OptLevel::O1());
  solo.amp.scaler().on_skip([](const mezzo::SkippedStep&) { throw std::runtime_error("stop"); });
  EXPECT_THROW(solo.pass(kInfinity), std::runtime_error);
  EXPECT_FALSE(solo.amp.step(solo.sgd).applied());
  solo.sgd.zero_grad();
  solo.pass(0.25);
  EXPECT_TRUE(solo.amp.step(solo.sgd).applied());
  EXPECT_EQ(solo.amp.scaler().get_scale(), kScale / 2);
}

// A step that throws after the optimizer has stepped.
TEST(AmpRecovery, StepSucceedsAfterOptimizerThrewLate) {
  struct Hiding : torch::optim::SGD {
    using SGD::SGD;
    torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
      torch::Tensor value = SGD::step();
      if (hides) {  // a tensor that zero_ cannot write
        param_groups()[0].params()[0].mutable_grad() = at::detail::make_tensor<c10::TensorImpl>(
            c10::DispatchKeySet(c10::DispatchKey::XLA), caffe2::TypeMeta::Make<float>(),
            c10::Device(torch::kXLA));
      }
      return value;
    }
    bool hides = true;
  };
  for (const OptLevel& level : {OptLevel::O0(), OptLevel::O1()}) {
    Vector model;
    Hiding sgd(model->parameters(), 1.0);
    Amp amp = mezzo::initialize(model, sgd, scaled(level), kQuiet);
    for (const bool hides : {true, false, false}) {
      sgd.hides = hides;
      amp.zero_grad(sgd);
      amp.backward(amp.forward(model, filled(0.25)), sgd);
      const auto step = [&] { return amp.step(sgd, {.zero_grad = true}).applied(); };
      if (hides) {
        EXPECT_THROW(step(), c10::Error);
        model->weight.mutable_grad() = torch::Tensor();
      } else {
        EXPECT_TRUE(step());
      }
    }
    EXPECT_EQ(weight_of(model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, ContinuesAfterGradientCannotBeAdded) {
  Solo solo(OptLevel::O1());
  solo.pass(0.25);
  const auto backward = [&](const torch::Tensor& loss) {
    loss.backward();
    solo.model->weight.mutable_grad() = torch::ones({3});
  };
  EXPECT_THROW(solo.amp.scale_loss(solo.amp.forward(solo.model, filled(8)), solo.sgd, backward),
               c10::Error);
  solo.pass(0.5);
  EXPECT_TRUE(solo.amp.step(solo.sgd).applied());
  EXPECT_EQ(weight_of(solo.model), 0.25F);
}

TEST(AmpBackward, InfInOneOptimizerSkipsAllOfLoss) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      Pair pair(level);
      const auto steps = [&] {
        return std::pair(pair.amp.step(pair.first_optimizer).applied(),
                         pair.amp.step(pair.second_optimizer).applied());
      };
      if (delays) pair.pass_for_both(0.25, 0.25, /*delays=*/true);
      pair.pass_for_both(kInfinity, 0.25);
      EXPECT_EQ(steps(), std::pair(false, false)) << level.name() << delays;
      EXPECT_EQ(weight_of(pair.second), 1.0F);
      EXPECT_EQ(pair.amp.scaler().get_scale(), kScale / 2) << "lowered once";
      pair.first_optimizer.zero_grad();
      pair.second_optimizer.zero_grad();
      pair.pass_for_both(0.25, 0.25);
      EXPECT_EQ(steps(), std::pair(true, true)) << level.name() << delays;
      EXPECT_EQ(weight_of(pair.second), 0.75F);
    }
  }
}

TEST(AmpBackward, OptimizerStepsAfterScaleUpdate) {
  Pair pair;
  pair.pass_for_both(0.25, 0.25);
  pair.amp.step(pair.first_optimizer);
  pair.first_optimizer.zero_grad();
  pair.amp.backward(pair.amp.forward(pair.first, filled(0.25)), pair.first_optimizer);
  pair.amp.step(pair.first_optimizer);
  EXPECT_THAT([&] { (void)pair.amp.state_dict(); },
              ThrowsMessage<c10::Error>(HasSubstr("has not stepped yet")));
  EXPECT_TRUE(pair.amp.step(pair.second_optimizer).applied());
  EXPECT_EQ(pair.clean_iterations(), 2);
  pair.second_optimizer.zero_grad();
  pair.amp.backward(pair.amp.forward(pair.second, filled(0.5)), pair.second_optimizer);
  EXPECT_TRUE(pair.amp.step(pair.second_optimizer).applied());
  EXPECT_EQ(weight_of(pair.second), 0.25F);
  EXPECT_EQ(pair.clean_iterations(), 3);
}

TEST(AmpBackward, ThrowsForParameterInTwoOptimizers) {
  Vector model;
  torch::optim::SGD first(model->parameters(), 1.0);
  torch::optim::SGD second(model->parameters(), 1.0);
  Amp amp = mezzo::initialize(model, {first, second}, scaled(OptLevel::O1()), kQuiet);
  const auto throws_error = ThrowsMessage<c10::Error>(HasSubstr("pass it to one of them"));
  EXPECT_THAT(
      [&] {
        amp.backward(amp.forward(model, filled(0.25)), {first, second});
      },
      throws_error);
  EXPECT_THAT([&] { amp.backward(amp.forward(model, filled(0.25)), first); }, throws_error);
}

}  // namespace
