// A gradient has one home, `.grad`: whatever libtorch's or mezzo's calls do to it between two steps
// counts for the next one, with masters or without, with a scaler that is enabled or not.

#include <mezzo/opt_levels/amp.h>
#include <mezzo/scaling/loss_scale_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/warning_recorder.h"
#include "../support/weight_storage_cases.h"

namespace {

using mezzo::GradScaler;
using mezzo::master_params;
using mezzo::OptimizerRef;
using mezzo::OptLevel;
using mezzo::optim::WeightStorage;
using test_support::OwnedOptimizer;
using test_support::weight_storage_cases;
using test_support::WeightStorageCase;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kScale = 512;  // 64 times this is finite in half
constexpr double kInfinity = std::numeric_limits<double>::infinity();

float value_of(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kFloat).flatten()[0].item<float>();
}

torch::Tensor weight(torch::ScalarType dtype = torch::kBFloat16, double value = 0) {
  return torch::full({1}, value, dtype).requires_grad_();
}

GradScaler make_silent_scaler(bool enabled = true) {
  GradScaler scaler({.init_scale = kScale, .enabled = enabled});
  scaler.on_skip(nullptr);
  return scaler;
}

/// Two weights, an optimizer and a scaler.
class Loop {
 public:
  Loop(const WeightStorageCase& storage_case, bool enabled)
      : is_split(storage_case.is_split),
        parameters{weight(storage_case.dtype), weight(storage_case.dtype)},
        owned(storage_case.make(parameters)),
        optimizer(owned.ref()),
        scaler(make_silent_scaler(enabled)) {}

  void backward(double first, double second) {
    const torch::Tensor loss = (parameters[0] * first + parameters[1] * second).sum();
    scaler.scale(loss.to(torch::kFloat)).backward();
  }
  bool step(const mezzo::StepOptions& options = {}) {
    const bool ran = scaler.step(optimizer, options).applied();
    scaler.update();
    return ran;
  }
  float value(std::size_t i) const { return value_of(parameters[i]); }

  bool is_split;
  std::vector<torch::Tensor> parameters;
  OwnedOptimizer owned;
  OptimizerRef optimizer;
  GradScaler scaler;
};

/// Calls `test` for every way to keep weights, with a scaler that is enabled and one that is not.
void for_each_loop(const std::function<void(Loop&)>& test,
                   const std::vector<WeightStorageCase>& all = weight_storage_cases()) {
  for (const WeightStorageCase& storage_case : all) {
    for (const bool enabled : {true, false}) {
      SCOPED_TRACE(testing::Message() << storage_case.name << ", the scaler is "
                                      << (enabled ? "enabled" : "disabled"));
      Loop loop(storage_case, enabled);
      test(loop);
    }
  }
}

// --- Gradients that are dropped ----------------------------------------------------------------

TEST(GradLifecycle, ParamDroppedAfterUnscaleIsNotUpdated) {
  for_each_loop([](Loop& loop) {
    loop.backward(1, 1);
    loop.scaler.unscale_(loop.optimizer);
    loop.parameters[1].mutable_grad() = torch::Tensor();
    EXPECT_TRUE(loop.step());
    EXPECT_EQ(loop.value(0), -1);
    EXPECT_EQ(loop.value(1), 0);
  });
}

TEST(GradLifecycle, StepPreservesGradsOrZeroesOnRequest) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    if (storage_case.name == std::string("torch's SGD"))
      continue;  // torch.amp unscales them in place
    for (const bool zero_grad : {false, true}) {
      for (const double max_norm : {0.5, kInfinity}) {
        for (const double first : {48.0, kInfinity}) {
          SCOPED_TRACE(testing::Message()
                       << storage_case.name << ", " << zero_grad << max_norm << first);
          Loop loop(storage_case, /*enabled=*/true);
          (void)loop.scaler.scale(torch::zeros({}));
          loop.scaler.update(48.0);  // no power of two: divided and multiplied again it would show
          std::vector<torch::Tensor> given, before;
          for (const double value : {first, 17.0}) {
            const torch::Tensor& parameter = loop.parameters[given.size()];
            parameter.mutable_grad() = torch::full_like(parameter.detach(), value);
            given.push_back(parameter.grad());
            before.push_back(parameter.grad().clone());
          }
          EXPECT_EQ(loop.step({.max_norm = max_norm, .zero_grad = zero_grad}), first == 48);
          EXPECT_EQ(loop.value(0) == 0, first != 48);
          for (std::size_t i = 0; i < given.size(); ++i) {
            EXPECT_TRUE(loop.parameters[i].grad().is_same(given[i]));
            EXPECT_TRUE(given[i].equal(zero_grad ? torch::zeros_like(before[i]) : before[i]));
          }
        }
      }
    }
  }
}

TEST(GradScalerStep, ZeroGradZeroesAppliedAndSkippedGrads) {
  for (const double first : {48.0, kInfinity}) {
    for_each_loop([first](Loop& loop) {
      loop.backward(first, 17);
      const bool applied = first == 48 || !loop.scaler.is_enabled();
      EXPECT_EQ(loop.step({.zero_grad = true}), applied);
      for (const torch::Tensor& parameter : loop.parameters) {
        EXPECT_TRUE(parameter.grad().equal(torch::zeros_like(parameter.grad())));
      }
    });
  }
}

TEST(GradScalerStep, MasterGradsAliasParamGradsUntilStep) {
  for (const double first : {48.0, kInfinity}) {
    for_each_loop([first](Loop& loop) {
      if (loop.is_split) return;
      const std::vector<torch::Tensor> masters = master_params(loop.optimizer);
      loop.backward(first, 17);
      loop.scaler.unscale_(loop.optimizer);
      std::vector<torch::Tensor> written;
      for (const std::size_t i : {0U, 1U}) {
        const torch::Tensor& parameter = loop.parameters[i];
        EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
        EXPECT_TRUE(masters[i].grad().is_same(parameter.grad()));
        written.insert(written.end(), {parameter, parameter.grad(), masters[i]});
      }
      std::vector<int64_t> versions;
      for (const torch::Tensor& one : written) versions.push_back(one._version());
      const bool applied = loop.step({.zero_grad = true});
      const bool is_fused = dynamic_cast<mezzo::optim::SGD*>(loop.owned.inner.get()) != nullptr;
      for (std::size_t i = 0; applied && is_fused && i < written.size(); ++i) {
        EXPECT_GT(written[i]._version(), versions[i]) << "autograd sees writes by it: " << i;
      }
      for (const std::size_t i : {0U, 1U}) {
        if (masters[i].is_same(loop.parameters[i])) continue;
        EXPECT_FALSE(masters[i].grad().defined()) << "a master keeps no memory of gradients";
      }
    });
  }
}

TEST(GradScalerStep, SharedGradIsClippedOnce) {
  std::vector<WeightStorageCase> all =
      weight_storage_cases();  // each in double too, where it has no 16 bits
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    if (storage_case.dtype == torch::kFloat)
      all.push_back({storage_case.name, torch::kDouble, false, storage_case.make});
  }
  const auto expect_once = [](Loop& loop) {
    (void)loop.scaler.scale(torch::zeros({}));
    const double scale = loop.scaler.get_scale();
    const torch::Tensor shared = torch::full_like(loop.parameters[0].detach(), 4 * scale);
    for (const torch::Tensor& parameter : loop.parameters) parameter.mutable_grad() = shared;
    EXPECT_TRUE(loop.step({.max_norm = 1}));
    for (const std::size_t i : {0U, 1U}) EXPECT_NEAR(loop.value(i), -std::sqrt(0.5), 0.01);
  };
  for_each_loop(expect_once, all);
}

TEST(GradScalerStep, NanNormClipsToNan) {
  for_each_loop([](Loop& loop) {
    loop.backward(std::nan(""), 1);
    const bool applied = loop.step({.max_norm = 1});
    EXPECT_EQ(applied, !loop.scaler.is_enabled()) << "as clip_grad_norm_ and step";
    for (const std::size_t i : {0U, 1U}) EXPECT_EQ(std::isnan(loop.value(i)), applied);
  });
}

TEST(GradScalerStep, InfFoundByUnscaleSkipsRepairedGrad) {
  for_each_loop([](Loop& loop) {
    if (!loop.scaler.is_enabled()) return;
    loop.backward(kInfinity, 1);
    loop.scaler.unscale_(loop.optimizer);
    for (const torch::Tensor& parameter : loop.parameters) parameter.mutable_grad().fill_(1);
    EXPECT_FALSE(loop.step());
    EXPECT_EQ(loop.value(0), 0);
    EXPECT_EQ(loop.scaler.get_scale(), kScale / 2);
  });
}

// Each clears the note that the one before made.
TEST(GradScalerStep, RetriesThrownStepWithRepairedGrads) {
  struct Throwing : mezzo::optim::SGD {
    using SGD::SGD;
    void apply(mezzo::StepPlan plan, const mezzo::GradStats& stats,
               const mezzo::StepOptions& options) override {
      if (throws) throw std::runtime_error("a collective failed");
      SGD::apply(std::move(plan), stats, options);
    }
    torch::Tensor master_param(const torch::Tensor& parameter) override {
      if (throws) throw std::runtime_error("no memory");
      return SGD::master_param(parameter);
    }
    bool throws = true;
  };
  for (const double bad : {1.0, kInfinity}) {
    for (const bool unscales : {false, true}) {
      const torch::Tensor parameter = weight();
      Throwing optimizer({parameter}, 1.0, {.weight_storage = WeightStorage::fp32_master});
      GradScaler scaler = make_silent_scaler();
      const auto step = [&] {
        if (unscales) scaler.unscale_(optimizer);
        return scaler.step(optimizer).applied();
      };
      scaler.scale((parameter * bad).sum().to(torch::kFloat)).backward();
      EXPECT_THROW(step(), std::runtime_error);
      optimizer.throws = false;
      parameter.mutable_grad() = torch::full({1}, 2 * kScale);
      EXPECT_TRUE(step());
      scaler.update();
      EXPECT_EQ(value_of(parameter), -2);
      EXPECT_EQ(scaler.get_scale(), kScale);
    }
  }
}

// --- unscale_ twice before a step --------------------------------------------------------------

TEST(GradLifecycle, DisabledScalerAllowsRepeatedUnscale) {
  for (const bool gives_a_batch_up : {false, true}) {
    const torch::Tensor parameter = weight();
    mezzo::optim::AdamW adamw({parameter}, mezzo::optim::AdamWOptions(0.1).weight_decay(0),
                              {.weight_storage = WeightStorage::fp32_master});
    GradScaler scaler = make_silent_scaler(false);
    for (int i = 0; i < 10; ++i) {
      adamw.zero_grad();
      scaler.scale(parameter.sum()).backward();
      scaler.unscale_(adamw);
      if (gives_a_batch_up) {
        adamw.zero_grad();
        scaler.scale(parameter.sum()).backward();
      }
      scaler.unscale_(adamw);
      EXPECT_TRUE(scaler.step(adamw).applied());
      scaler.update();
    }
    EXPECT_NEAR(value_of(parameter), -0.99, 0.02);
    EXPECT_EQ(adamw.applied_steps(), 10);
  }
}

TEST(GradLifecycle, DisabledScalerUnscaleTwiceStillUpdatesMasters) {
  const torch::Tensor parameter = weight(torch::kBFloat16, 256);
  torch::optim::SGD sgd({parameter}, 1.0);
  mezzo::MasterWeights masters(sgd);
  GradScaler scaler = make_silent_scaler(false);
  for (int i = 0; i < 4; ++i) {
    sgd.zero_grad();
    scaler.scale((parameter * 20).sum()).backward();
    scaler.unscale_(masters);
    scaler.unscale_(masters);
    EXPECT_TRUE(scaler.step(masters, {.max_norm = 0.25}).applied());
  }
  EXPECT_NEAR(value_of(master_params(masters)[0]), 255, 1e-3) << "bfloat16 would stay at 256";
  EXPECT_EQ(value_of(parameter), 255);
}

// --- libtorch's clipping -----------------------------------------------------------------------

TEST(GradLifecycle, TorchClipGradNormClipsAppliedGrads) {
  for_each_loop([](Loop& loop) {
    for (int i = 0; i < 20; ++i) {
      loop.optimizer.optimizer().zero_grad();
      loop.backward(20, 0);
      loop.scaler.unscale_(loop.optimizer);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(loop.parameters, 0.5), 20, 1e-4);
      EXPECT_TRUE(loop.step());
    }
    EXPECT_NEAR(loop.value(0), -10, 1e-3);
  });
}

TEST(GradLifecycle, GradNormReportsNormAfterTorchClipping) {
  for (const bool by_value : {false, true}) {
    for_each_loop([by_value](Loop& loop) {
      loop.backward(20, 0);
      loop.scaler.unscale_(loop.optimizer);
      if (by_value) {
        torch::nn::utils::clip_grad_value_(loop.parameters, 2);
      } else {
        torch::nn::utils::clip_grad_norm_(loop.parameters, 2);
      }
      const auto result = loop.scaler.step(loop.optimizer, {.max_norm = 1});
      EXPECT_TRUE(result.applied());
      EXPECT_NEAR(result.grad_norm().value(), 2, 2e-3);
      EXPECT_NEAR(loop.value(0), -1, 2e-3);
    });
  }
}

TEST(GradLifecycle, InfWrittenAfterUnscaleSkipsStep) {
  for (const bool by_clipping : {false, true}) {
    for (const WeightStorageCase& storage_case : weight_storage_cases()) {
      SCOPED_TRACE(testing::Message() << storage_case.name << ", by clipping: " << by_clipping);
      Loop loop(storage_case, /*enabled=*/true);
      loop.backward(20, 0);
      loop.scaler.unscale_(loop.optimizer);
      if (by_clipping) {
        torch::nn::utils::clip_grad_norm_(loop.parameters, std::nan(""));
      } else {
        loop.parameters[0].grad().data().fill_(kInfinity);
      }
      EXPECT_FALSE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
      EXPECT_EQ(loop.scaler.get_scale(), kScale / 2);
    }
  }
}

TEST(GradLifecycle, UnscaleOverflowAndOverwrittenInfSkipStep) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    for (const bool unscales_before : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << storage_case.name << ", unscales before: " << unscales_before);
      Loop loop(storage_case, /*enabled=*/true);
      loop.scaler = GradScaler({.init_scale = 1e-35, .min_scale = 0});
      loop.scaler.on_skip(nullptr);
      (void)loop.scaler.scale(torch::zeros({}));
      for (const auto& one : loop.parameters) one.mutable_grad() = torch::full_like(one, 3e4);
      if (unscales_before) loop.scaler.unscale_(loop.optimizer);
      EXPECT_FALSE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
      loop.scaler = make_silent_scaler();
      loop.backward(kInfinity, 1);
      loop.scaler.unscale_(loop.optimizer);
      for (const auto& one : loop.parameters) one.mutable_grad() = torch::ones_like(one);
      EXPECT_FALSE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
    }
  }
}

// --- What comes after unscale_ -----------------------------------------------------------------

TEST(GradLifecycle, DisabledScalerAccumulatesAfterUnscaleAndClipping) {
  for (const bool by_clipping : {false, true}) {
    for (const WeightStorageCase& storage_case : weight_storage_cases()) {
      SCOPED_TRACE(testing::Message() << storage_case.name << ", by clipping: " << by_clipping);
      Loop loop(storage_case, /*enabled=*/false);
      loop.backward(1, 0);
      loop.scaler.unscale_(loop.optimizer);
      if (by_clipping) torch::nn::utils::clip_grad_norm_(loop.parameters, 64);
      loop.backward(2, 0);
      EXPECT_TRUE(loop.step());
      EXPECT_EQ(loop.value(0), -3);
    }
  }
}

TEST(GradLifecycle, BatchDiscardedAfterUnscaleIsNotTrained) {
  for (const bool set_to_none : {true, false}) {
    for (const WeightStorageCase& storage_case : weight_storage_cases()) {
      SCOPED_TRACE(testing::Message() << storage_case.name << ", set to none: " << set_to_none);
      Loop loop(storage_case, /*enabled=*/false);
      loop.backward(64, 0);
      loop.scaler.unscale_(loop.optimizer);
      loop.optimizer.optimizer().zero_grad(set_to_none);
      loop.backward(1, 0);
      EXPECT_TRUE(loop.step());
      EXPECT_EQ(loop.value(0), -1);
    }
  }
}

TEST(GradLifecycle, StepAfterUnscaleAndZeroGradIsNoOp) {
  for (const bool set_to_none : {true, false}) {
    for_each_loop([set_to_none](Loop& loop) {
      loop.backward(3, 64);
      loop.scaler.unscale_(loop.optimizer);
      loop.optimizer.optimizer().zero_grad(set_to_none);
      EXPECT_TRUE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
      EXPECT_EQ(loop.value(1), 0);
    });
  }
}

TEST(GradLifecycle, LossScaleOptimizerStepAfterZeroGradIsNoOp) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    SCOPED_TRACE(storage_case.name);
    const torch::Tensor parameter = weight(storage_case.dtype);
    const OwnedOptimizer owned = storage_case.make({parameter});
    mezzo::LossScaleOptimizer optimizer(owned.ref(), {.init_scale = kScale});
    optimizer.scale_loss((parameter * 64).sum().to(torch::kFloat)).backward();
    optimizer.unscale_();
    optimizer.zero_grad();
    (void)optimizer.step();
    EXPECT_EQ(value_of(parameter), 0);
  }
}

// --- Several losses ----------------------------------------------------------------------------

/// A model of two weights; each input is the two gradients.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    first = register_parameter("first", torch::zeros({1}));
    second = register_parameter("second", torch::zeros({1}));
  }
  torch::Tensor forward(const torch::Tensor& factors) {
    torch::Tensor loss = (first * factors[0]).sum();
    if (factors[1].item<double>() != 0) loss = loss + (second * factors[1]).sum();
    return loss;
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Pair);

/// A model, an SGD of rate 1, and an Amp with two losses.
class Leveled {
 public:
  Leveled(const char* level, bool of_mezzo)
      : optimizer(of_mezzo ? std::unique_ptr<torch::optim::Optimizer>(
                                 std::make_unique<mezzo::optim::SGD>(model->parameters(), 1.0))
                           : std::make_unique<torch::optim::SGD>(model->parameters(), 1.0)),
        amp(mezzo::initialize(
            model, *optimizer,
            OptLevel::parse(level,
                            {.loss_scale = mezzo::GradScalerOptions::dynamic({.init_scale = 64})}),
            {.num_losses = 2, .verbosity = 0})) {}

  torch::Tensor loss(double first, double second) {
    return amp.forward(model, torch::tensor({first, second}, torch::kFloat));
  }
  void pass(double first, double second, const mezzo::ScaleLossOptions& options = {}) {
    amp.backward(loss(first, second), *optimizer, options);
  }
  void expect(float first, float second) {
    EXPECT_EQ(value_of(model->first), first);
    EXPECT_EQ(value_of(model->second), second);
  }

  Pair model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  mezzo::Amp amp;
};

void for_each_level(const std::function<void(Leveled&)>& test) {
  for (const char* level : {"O0", "O1", "O2", "O2_bf16", "O3", "O3_bf16"}) {
    for (const bool of_mezzo : {true, false}) {
      SCOPED_TRACE(testing::Message() << level << (of_mezzo ? " mezzo" : " torch"));
      Leveled one(level, of_mezzo);
      test(one);
    }
  }
}

TEST(GradLifecycle, DiscardedDelayedLossesDoNotReappear) {
  for_each_level([](Leveled& one) {
    one.pass(8, 8, {.loss_id = 0, .delay_unscale = true});
    one.pass(8, 8, {.loss_id = 1, .delay_unscale = true});
    one.optimizer->zero_grad();
    one.pass(3, 3);
    EXPECT_TRUE(one.amp.step(*one.optimizer).applied());
    one.expect(-3, -3);
  });
}

TEST(GradLifecycle, ZeroGradDiscardsParamMissedByLastLoss) {
  for (const bool set_to_none : {true, false}) {
    for (const float next : {0.0F, 1.0F}) {
      for_each_level([&](Leveled& one) {
        one.pass(8, 8);
        one.pass(8, 0);
        one.optimizer->zero_grad(set_to_none);
        one.pass(1, next);
        EXPECT_TRUE(one.amp.step(*one.optimizer).applied());
        one.expect(-1, -next);
      });
    }
  }
}

TEST(GradLifecycle, StepAfterBackwardAndZeroGradIsNoOp) {
  for (const bool set_to_none : {true, false}) {
    for_each_level([set_to_none](Leveled& one) {
      one.pass(3, 3);
      one.optimizer->zero_grad(set_to_none);
      EXPECT_TRUE(one.amp.step(*one.optimizer).applied());
      one.expect(0, 0);
    });
  }
}

TEST(GradLifecycle, UndefinedGradsStayUndefinedAfterThrowingBackward) {
  for_each_level([](Leveled& one) {
    one.pass(1, 0);
    EXPECT_FALSE(one.model->second.grad().defined());
    const auto throws = [](const torch::Tensor& loss) {
      loss.backward();
      throw std::runtime_error("out of memory");
    };
    EXPECT_THROW(one.amp.scale_loss(one.loss(2, 2), *one.optimizer, throws), std::runtime_error);
    EXPECT_FALSE(one.model->second.grad().defined());
    EXPECT_EQ(value_of(one.model->first.grad()), 1);
    EXPECT_TRUE(one.amp.step(*one.optimizer).applied());
    one.expect(-1, 0);
  });
}

// --- Parameters of two optimizers --------------------------------------------------------------

TEST(GradLifecycle, ParamInTwoOptimizersThrowsWithWorkingAdvice) {
  Pair model;
  const auto all = model->parameters();
  torch::optim::SGD first(all, 1.0), second(std::vector<torch::Tensor>{all[1]}, 1.0);
  const OptLevel level = OptLevel::O0({.loss_scale = 8.0});
  const mezzo::InitializeOptions options{.num_losses = 2, .verbosity = 0};
  auto amp = mezzo::initialize(model, {first, second}, level, options);
  const auto input = [](double one, double two) {
    return torch::tensor({one, two}, torch::kFloat);
  };
  EXPECT_THAT([&] { amp.backward(amp.forward(model, input(1, 1)), first); },
              ThrowsMessage<c10::Error>(HasSubstr("; pass it to one of them")));
  torch::optim::SGD one({all[0]}, 1.0), other({all[1]}, 1.0);
  auto apart = mezzo::initialize(model, {one, other}, level, options);
  apart.backward(apart.forward(model, input(1, 1)), {one, other}, {.loss_id = 0});
  apart.backward(apart.forward(model, input(2, 2)), {one, other}, {.loss_id = 1});
  apart.step(one);
  apart.step(other);
  EXPECT_EQ(value_of(all[0]), -3);
  EXPECT_EQ(value_of(all[1]), -3);
}

TEST(GradLifecycle, MasterWeightsAdagradSumStartsInFloat32) {
  const torch::Tensor low = weight(torch::kBFloat16, 1), whole = weight(torch::kFloat, 1);
  const auto options = torch::optim::AdagradOptions(0.5).initial_accumulator_value(0.1);
  torch::optim::Adagrad of_low({low}, options), of_whole({whole}, options);
  mezzo::MasterWeights masters(of_low);
  for (int i = 0; i < 3; ++i) {
    low.mutable_grad() = torch::full_like(low.detach(), 0.125);
    whole.mutable_grad() = torch::full_like(whole.detach(), 0.125);
    masters.step();
    of_whole.step();
  }
  EXPECT_TRUE(master_params(masters)[0].equal(whole));
}

}  // namespace
