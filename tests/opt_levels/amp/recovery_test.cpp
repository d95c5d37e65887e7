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
struct OneModelTraining {
  explicit OneModelTraining(const OptLevel& level)
      : amp(mezzo::initialize(model, sgd, scaled(level), kQuiet)) {}

  void run_backward(double factor, bool delays = false) {
    amp.backward(amp.forward(model, filled(factor)), sgd, {.delay_unscale = delays});
  }
  void run_throwing_backward(double factor) {
    const auto backward = [](const torch::Tensor& loss) {
      loss.backward();
      throw std::runtime_error("out of memory");
    };
    EXPECT_THROW(amp.scale_loss(amp.forward(model, filled(factor)), sgd, backward),
                 std::runtime_error);
  }
  void run_throwing_step(double max_norm = kNoLimit) {
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
struct TwoModelTraining {
  explicit TwoModelTraining(const OptLevel& level = OptLevel::O1())
      : amp(mezzo::initialize({first, second}, {first_optimizer, second_optimizer}, scaled(level),
                              kQuiet)) {}

  void run_joint_backward(double first_factor, double second_factor, bool delays = false) {
    amp.backward(
        amp.forward(first, filled(first_factor)) + amp.forward(second, filled(second_factor)),
        {first_optimizer, second_optimizer}, {.delay_unscale = delays});
  }
  double get_growth_tracker() { return amp.state_dict().at("loss_scaler0").at("unskipped"); }

  Vector first, second;
  torch::optim::SGD first_optimizer{first->parameters(), 1.0},
      second_optimizer{second->parameters(), 1.0};
  Amp amp;
};

TEST(AmpRecovery, StepSucceedsAfterStepThrew) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        OneModelTraining training(level);
        training.run_backward(0.25, delays);
        training.run_throwing_step(max_norm);
        EXPECT_TRUE(training.amp.step(training.sgd, {.max_norm = max_norm}).applied());
        EXPECT_EQ(get_weight(training.model), 0.75F) << level.name() << delays << max_norm;
        EXPECT_EQ(training.amp.scaler().get_scale(), kScale);
      }
    }
  }
}

TEST(AmpRecovery, ZeroGradDiscardsBatchAfterThrow) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        for (const bool uses_amp_zero_grad : {false, true}) {
          OneModelTraining training(level);
          training.run_backward(0.25, delays);
          training.run_throwing_step(max_norm);
          uses_amp_zero_grad ? training.amp.zero_grad(training.sgd) : training.sgd.zero_grad();
          training.run_backward(0.5, delays);
          EXPECT_TRUE(training.amp.step(training.sgd, {.max_norm = max_norm}).applied());
          EXPECT_EQ(get_weight(training.model), 0.5F)
              << level.name() << delays << max_norm << uses_amp_zero_grad;
        }
      }
    }
  }
}

TEST(AmpRecovery, AccumulatesAfterStepThrew) {
  for (const OptLevel& level : kLevels) {
    OneModelTraining training(level);
    training.run_backward(0.25);
    training.run_throwing_step();
    training.run_backward(0.5);
    training.amp.step(training.sgd);
    EXPECT_EQ(get_weight(training.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, PreservesUnscaledGradientsWhenBackwardThrows) {
  for (const OptLevel& level : kLevels) {
    OneModelTraining training(level);
    training.run_backward(0.25);
    training.run_throwing_backward(8);
    EXPECT_EQ(training.amp.master_params(training.sgd)[0].grad()[0].item<float>(), 0.25F)
        << level.name();
    training.run_throwing_backward(8);
    training.run_backward(0.5);
    training.amp.step(training.sgd);
    EXPECT_EQ(get_weight(training.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, OptimizerZeroGradDiscardsBatch) {
  for (const OptLevel& level : kLevels) {
    for (const bool set_to_none : {false, true}) {
      for (const bool uses_amp_zero_grad : {false, true}) {
        for (const bool throws : {false, true}) {
          OneModelTraining training(level);
          training.run_backward(0.25);
          if (throws) training.run_throwing_backward(8);
          uses_amp_zero_grad ? training.amp.zero_grad(training.sgd, set_to_none)
                             : training.sgd.zero_grad(set_to_none);
          if (uses_amp_zero_grad) {
            EXPECT_NO_THROW((void)training.amp.state_dict()) << "there is nothing to step";
          }
          training.run_backward(0.5);
          training.amp.step(training.sgd);
          EXPECT_EQ(get_weight(training.model), 0.5F)
              << level.name() << set_to_none << uses_amp_zero_grad << throws;
        }
      }
    }
  }
}

/// An optimizer whose gradients were removed between the last unscale and the step.
template <class Optimizer, class Options>
void expect_step_without_gradients(const Options& options) {
  for (const double factor : {0.25, kNoLimit}) {
    Vector model;
    Optimizer optimizer(model->parameters(), options);
    Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O0()), kQuiet);
    amp.backward(amp.forward(model, filled(factor)), optimizer);
    optimizer.zero_grad();
    EXPECT_TRUE(amp.step(optimizer).applied()) << "there is nothing to skip";
    EXPECT_EQ(get_weight(model), 1.0F);
    EXPECT_EQ(amp.scaler().get_scale(), factor == 0.25 ? kScale : kScale / 2);
  }
}

TEST(AmpRecovery, StepsWithoutGradients) {
  expect_step_without_gradients<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1.0));
  expect_step_without_gradients<torch::optim::SGD>(torch::optim::SGDOptions(1.0));
}

TEST(AmpRecovery, ThrowsForCallsDuringBackward) {
  OneModelTraining training(OptLevel::O2());
  Amp& amp = training.amp;
  const auto within = [&](auto&& call) {
    return [&amp, &training, call] {
      amp.scale_loss(amp.forward(training.model, filled(0.25)), training.sgd,
                     [&](const torch::Tensor& loss) {
                       call();
                       loss.backward();
                     });
    };
  };
  const auto throws_error = ThrowsMessage<c10::Error>(HasSubstr("called during amp.backward"));
  EXPECT_THAT(within([&] { training.run_backward(0.5); }), throws_error);
  EXPECT_THAT(within([&] { amp.step(training.sgd); }), throws_error);
  EXPECT_THAT(within([&] { amp.zero_grad(training.sgd); }), throws_error);
  training.run_backward(0.5);
  EXPECT_TRUE(amp.step(training.sgd).applied());
  EXPECT_EQ(get_weight(training.model), 0.5F);
}

TEST(AmpRecovery, ContinuesAfterSkipCallbackThrew) {
  OneModelTraining training(OptLevel::O1());
  training.amp.scaler().on_skip(
      [](const mezzo::SkippedStep&) { throw std::runtime_error("stop"); });
  EXPECT_THROW(training.run_backward(kInfinity), std::runtime_error);
  EXPECT_FALSE(training.amp.step(training.sgd).applied());
  training.sgd.zero_grad();
  training.run_backward(0.25);
  EXPECT_TRUE(training.amp.step(training.sgd).applied());
  EXPECT_EQ(training.amp.scaler().get_scale(), kScale / 2);
}

// A step that throws after the optimizer has stepped.
TEST(AmpRecovery, StepSucceedsAfterZeroingThrew) {
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
    EXPECT_EQ(get_weight(model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, ContinuesAfterGradientCannotBeAdded) {
  OneModelTraining training(OptLevel::O1());
  training.run_backward(0.25);
  const auto backward = [&](const torch::Tensor& loss) {
    loss.backward();
    training.model->weight.mutable_grad() = torch::ones({3});
  };
  EXPECT_THROW(training.amp.scale_loss(training.amp.forward(training.model, filled(8)),
                                       training.sgd, backward),
               c10::Error);
  training.run_backward(0.5);
  EXPECT_TRUE(training.amp.step(training.sgd).applied());
  EXPECT_EQ(get_weight(training.model), 0.25F);
}

TEST(AmpBackward, InfSkipsAllOptimizersOfLoss) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      TwoModelTraining training(level);
      const auto steps = [&] {
        return std::pair(training.amp.step(training.first_optimizer).applied(),
                         training.amp.step(training.second_optimizer).applied());
      };
      if (delays) training.run_joint_backward(0.25, 0.25, /*delays=*/true);
      training.run_joint_backward(kInfinity, 0.25);
      EXPECT_EQ(steps(), std::pair(false, false)) << level.name() << delays;
      EXPECT_EQ(get_weight(training.second), 1.0F);
      EXPECT_EQ(training.amp.scaler().get_scale(), kScale / 2) << "lowered once";
      training.first_optimizer.zero_grad();
      training.second_optimizer.zero_grad();
      training.run_joint_backward(0.25, 0.25);
      EXPECT_EQ(steps(), std::pair(true, true)) << level.name() << delays;
      EXPECT_EQ(get_weight(training.second), 0.75F);
    }
  }
}

TEST(AmpBackward, OptimizerStepsAfterScaleUpdate) {
  TwoModelTraining training;
  training.run_joint_backward(0.25, 0.25);
  training.amp.step(training.first_optimizer);
  training.first_optimizer.zero_grad();
  training.amp.backward(training.amp.forward(training.first, filled(0.25)),
                        training.first_optimizer);
  training.amp.step(training.first_optimizer);
  EXPECT_THAT([&] { (void)training.amp.state_dict(); },
              ThrowsMessage<c10::Error>(HasSubstr("has not stepped yet")));
  EXPECT_TRUE(training.amp.step(training.second_optimizer).applied());
  EXPECT_EQ(training.get_growth_tracker(), 2);
  training.second_optimizer.zero_grad();
  training.amp.backward(training.amp.forward(training.second, filled(0.5)),
                        training.second_optimizer);
  EXPECT_TRUE(training.amp.step(training.second_optimizer).applied());
  EXPECT_EQ(get_weight(training.second), 0.25F);
  EXPECT_EQ(training.get_growth_tracker(), 3);
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
