// Gradients are stored only in `.grad`: every change of it between two steps, by libtorch or by
// mezzo, takes effect at the next step, with and without masters, with enabled and disabled
// scalers.

#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>
#include <mezzo/scaling/loss_scale_optimizer.h>

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

constexpr double kScale = 512;  // 64 * kScale is finite in float16
constexpr double kInfinity = std::numeric_limits<double>::infinity();

float first_element(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kFloat).flatten()[0].item<float>();
}

torch::Tensor make_weight(torch::ScalarType dtype = torch::kBFloat16, double value = 0) {
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
        parameters{make_weight(storage_case.dtype), make_weight(storage_case.dtype)},
        owned(storage_case.make(parameters)),
        optimizer(owned.ref()),
        scaler(make_silent_scaler(enabled)) {}

  void backward(double first, double second) {
    const torch::Tensor loss = (parameters[0] * first + parameters[1] * second).sum();
    scaler.scale(loss.to(torch::kFloat)).backward();
  }
  bool step(const mezzo::StepOptions& options = {}) {
    const bool applied = scaler.step(optimizer, options).applied();
    scaler.update();
    return applied;
  }
  float value(std::size_t i) const { return first_element(parameters[i]); }

  bool is_split;
  std::vector<torch::Tensor> parameters;
  OwnedOptimizer owned;
  OptimizerRef optimizer;
  GradScaler scaler;
};

/// Calls `test` for each weight storage, with an enabled and a disabled scaler.
void for_each_loop(const std::function<void(Loop&)>& test,
                   const std::vector<WeightStorageCase>& all = weight_storage_cases()) {
  for (const WeightStorageCase& storage_case : all) {
    for (const bool enabled : {true, false}) {
      SCOPED_TRACE(testing::Message()
                   << storage_case.name << ", scaler " << (enabled ? "enabled" : "disabled"));
      Loop loop(storage_case, enabled);
      test(loop);
    }
  }
}

// --- Steps -------------------------------------------------------------------------------------

TEST(GradLifecycle, DroppedParamIsNotUpdated) {
  for_each_loop([](Loop& loop) {
    loop.backward(1, 1);
    loop.scaler.unscale_(loop.optimizer);
    loop.parameters[1].mutable_grad() = torch::Tensor();
    EXPECT_TRUE(loop.step());
    EXPECT_EQ(loop.value(0), -1);
    EXPECT_EQ(loop.value(1), 0);
  });
}

TEST(GradLifecycle, StepZeroesGradsOnlyOnRequest) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    if (storage_case.name == std::string("torch::optim::SGD"))
      continue;  // torch.amp unscales them in place
    for (const bool zero_grad : {false, true}) {
      for (const double max_norm : {0.5, kInfinity}) {
        for (const double first : {48.0, kInfinity}) {
          SCOPED_TRACE(testing::Message()
                       << storage_case.name << ", " << zero_grad << max_norm << first);
          Loop loop(storage_case, /*enabled=*/true);
          (void)loop.scaler.scale(torch::zeros({}));
          loop.scaler.update(48.0);  // not a power of two, so that unscaling rounds
          std::vector<torch::Tensor> grads, before;
          for (const double value : {first, 17.0}) {
            const torch::Tensor& parameter = loop.parameters[grads.size()];
            parameter.mutable_grad() = torch::full_like(parameter.detach(), value);
            grads.push_back(parameter.grad());
            before.push_back(parameter.grad().clone());
          }
          EXPECT_EQ(loop.step({.max_norm = max_norm, .zero_grad = zero_grad}), first == 48);
          EXPECT_EQ(loop.value(0) == 0, first != 48);
          for (std::size_t i = 0; i < grads.size(); ++i) {
            EXPECT_TRUE(loop.parameters[i].grad().is_same(grads[i]));
            EXPECT_TRUE(grads[i].equal(zero_grad ? torch::zeros_like(before[i]) : before[i]));
          }
        }
      }
    }
  }
}

TEST(GradScalerStep, ZeroGradAppliesToSkippedStep) {
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
      for (const torch::Tensor& tensor : written) versions.push_back(tensor._version());
      const bool applied = loop.step({.zero_grad = true});
      const bool is_fused = dynamic_cast<mezzo::optim::SGD*>(loop.owned.inner.get()) != nullptr;
      for (std::size_t i = 0; applied && is_fused && i < written.size(); ++i) {
        EXPECT_GT(written[i]._version(), versions[i]) << "no version bump of tensor " << i;
      }
      for (const std::size_t i : {0U, 1U}) {
        if (masters[i].is_same(loop.parameters[i])) continue;
        EXPECT_FALSE(masters[i].grad().defined()) << "a master has a gradient after the step";
      }
    });
  }
}

TEST(GradScalerStep, SharedGradIsClippedOnce) {
  std::vector<WeightStorageCase> all = weight_storage_cases();  // float32 cases in double too
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    if (storage_case.dtype == torch::kFloat)
      all.push_back({storage_case.name, torch::kDouble, false, storage_case.make});
  }
  const auto expect_clipped_once = [](Loop& loop) {
    (void)loop.scaler.scale(torch::zeros({}));
    const double scale = loop.scaler.get_scale();
    const torch::Tensor shared = torch::full_like(loop.parameters[0].detach(), 4 * scale);
    for (const torch::Tensor& parameter : loop.parameters) parameter.mutable_grad() = shared;
    EXPECT_TRUE(loop.step({.max_norm = 1}));
    for (const std::size_t i : {0U, 1U}) EXPECT_NEAR(loop.value(i), -std::sqrt(0.5), 0.01);
  };
  for_each_loop(expect_clipped_once, all);
}

TEST(GradScalerStep, NanNormClipsToNan) {
  for_each_loop([](Loop& loop) {
    loop.backward(std::nan(""), 1);
    const bool applied = loop.step({.max_norm = 1});
    EXPECT_EQ(applied, !loop.scaler.is_enabled()) << "like clip_grad_norm_ and step";
    for (const std::size_t i : {0U, 1U}) EXPECT_EQ(std::isnan(loop.value(i)), applied);
  });
}

TEST(GradScalerStep, UnscaleInfSkipsDespiteRepairedGrad) {
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
      const torch::Tensor parameter = make_weight();
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
      EXPECT_EQ(first_element(parameter), -2);
      EXPECT_EQ(scaler.get_scale(), kScale);
    }
  }
}

// --- unscale_ twice before a step --------------------------------------------------------------

TEST(GradLifecycle, DisabledScalerAllowsRepeatedUnscale) {
  for (const bool discards_batch : {false, true}) {
    const torch::Tensor parameter = make_weight();
    mezzo::optim::AdamW adamw({parameter}, mezzo::optim::AdamWOptions(0.1).weight_decay(0),
                              {.weight_storage = WeightStorage::fp32_master});
    GradScaler scaler = make_silent_scaler(false);
    for (int i = 0; i < 10; ++i) {
      adamw.zero_grad();
      scaler.scale(parameter.sum()).backward();
      scaler.unscale_(adamw);
      if (discards_batch) {
        adamw.zero_grad();
        scaler.scale(parameter.sum()).backward();
      }
      scaler.unscale_(adamw);
      EXPECT_TRUE(scaler.step(adamw).applied());
      scaler.update();
    }
    EXPECT_NEAR(first_element(parameter), -0.99, 0.02);
    EXPECT_EQ(adamw.applied_steps(), 10);
  }
}

TEST(GradLifecycle, DisabledRepeatedUnscaleUpdatesMasters) {
  const torch::Tensor parameter = make_weight(torch::kBFloat16, 256);
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
  EXPECT_NEAR(first_element(master_params(masters)[0]), 255, 1e-3) << "bfloat16 would round to 256";
  EXPECT_EQ(first_element(parameter), 255);
}

// --- libtorch's clipping -----------------------------------------------------------------------

TEST(GradLifecycle, TorchClippingAffectsAppliedGrads) {
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

TEST(GradLifecycle, GradNormIncludesTorchClipping) {
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

TEST(GradLifecycle, OverflowOrOverwrittenInfSkipsStep) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    for (const bool unscales_before : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << storage_case.name << ", unscales before: " << unscales_before);
      Loop loop(storage_case, /*enabled=*/true);
      loop.scaler = GradScaler({.init_scale = 1e-35, .min_scale = 0});
      loop.scaler.on_skip(nullptr);
      (void)loop.scaler.scale(torch::zeros({}));
      for (const auto& p : loop.parameters) p.mutable_grad() = torch::full_like(p, 3e4);
      if (unscales_before) loop.scaler.unscale_(loop.optimizer);
      EXPECT_FALSE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
      loop.scaler = make_silent_scaler();
      loop.backward(kInfinity, 1);
      loop.scaler.unscale_(loop.optimizer);
      for (const auto& p : loop.parameters) p.mutable_grad() = torch::ones_like(p);
      EXPECT_FALSE(loop.step());
      EXPECT_EQ(loop.value(0), 0);
    }
  }
}

// --- Backward passes and zero_grad after unscale_ ----------------------------------------------

TEST(GradLifecycle, DisabledScalerAccumulatesAfterClipping) {
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

TEST(GradLifecycle, DisabledScalerZeroGradDiscardsBatch) {
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

TEST(GradLifecycle, ZeroGradAfterUnscaleDiscardsBatch) {
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

TEST(GradLifecycle, LossScaleOptimizerZeroGradDiscardsBatch) {
  for (const WeightStorageCase& storage_case : weight_storage_cases()) {
    SCOPED_TRACE(storage_case.name);
    const torch::Tensor parameter = make_weight(storage_case.dtype);
    const OwnedOptimizer owned = storage_case.make({parameter});
    mezzo::LossScaleOptimizer optimizer(owned.ref(), {.init_scale = kScale});
    optimizer.scale_loss((parameter * 64).sum().to(torch::kFloat)).backward();
    optimizer.unscale_();
    optimizer.zero_grad();
    (void)optimizer.step();
    EXPECT_EQ(first_element(parameter), 0);
  }
}

// --- Multiple losses ---------------------------------------------------------------------------

/// A model of two weights. The input is the gradient of each.
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

/// A model, SGD with lr = 1, and an Amp with two losses.
class AmpLoop {
 public:
  AmpLoop(const char* level, bool is_mezzo)
      : optimizer(is_mezzo ? std::unique_ptr<torch::optim::Optimizer>(
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
  void backward(double first, double second, const mezzo::ScaleLossOptions& options = {}) {
    amp.backward(loss(first, second), *optimizer, options);
  }
  void expect(float first, float second) {
    EXPECT_EQ(first_element(model->first), first);
    EXPECT_EQ(first_element(model->second), second);
  }

  Pair model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  mezzo::Amp amp;
};

void for_each_level(const std::function<void(AmpLoop&)>& test) {
  for (const char* level : {"O0", "O1", "O2", "O2_bf16", "O3", "O3_bf16"}) {
    for (const bool is_mezzo : {true, false}) {
      SCOPED_TRACE(testing::Message() << level << (is_mezzo ? " mezzo" : " torch"));
      AmpLoop loop(level, is_mezzo);
      test(loop);
    }
  }
}

TEST(GradLifecycle, DiscardedDelayedLossesDoNotReappear) {
  for_each_level([](AmpLoop& loop) {
    loop.backward(8, 8, {.loss_id = 0, .delay_unscale = true});
    loop.backward(8, 8, {.loss_id = 1, .delay_unscale = true});
    loop.optimizer->zero_grad();
    loop.backward(3, 3);
    EXPECT_TRUE(loop.amp.step(*loop.optimizer).applied());
    loop.expect(-3, -3);
  });
}

TEST(GradLifecycle, ZeroGradDiscardsStashedGradients) {
  for (const bool set_to_none : {true, false}) {
    for (const float next : {0.0F, 1.0F}) {
      for_each_level([&](AmpLoop& loop) {
        loop.backward(8, 8);
        loop.backward(8, 0);
        loop.optimizer->zero_grad(set_to_none);
        loop.backward(1, next);
        EXPECT_TRUE(loop.amp.step(*loop.optimizer).applied());
        loop.expect(-1, -next);
      });
    }
  }
}

TEST(GradLifecycle, ZeroGradAfterBackwardDiscardsBatch) {
  for (const bool set_to_none : {true, false}) {
    for_each_level([set_to_none](AmpLoop& loop) {
      loop.backward(3, 3);
      loop.optimizer->zero_grad(set_to_none);
      EXPECT_TRUE(loop.amp.step(*loop.optimizer).applied());
      loop.expect(0, 0);
    });
  }
}

TEST(GradLifecycle, ThrowingBackwardKeepsGradsUndefined) {
  for_each_level([](AmpLoop& loop) {
    loop.backward(1, 0);
    EXPECT_FALSE(loop.model->second.grad().defined());
    const auto throws = [](const torch::Tensor& loss) {
      loss.backward();
      throw std::runtime_error("out of memory");
    };
    EXPECT_THROW(loop.amp.scale_loss(loop.loss(2, 2), *loop.optimizer, throws), std::runtime_error);
    EXPECT_FALSE(loop.model->second.grad().defined());
    EXPECT_EQ(first_element(loop.model->first.grad()), 1);
    EXPECT_TRUE(loop.amp.step(*loop.optimizer).applied());
    loop.expect(-1, 0);
  });
}

// --- Other optimizers --------------------------------------------------------------------------

TEST(GradLifecycle, SharedParamErrorAdviceWorks) {
  Pair model;
  const auto all = model->parameters();
  torch::optim::SGD first(all, 1.0), second(std::vector<torch::Tensor>{all[1]}, 1.0);
  const OptLevel level = OptLevel::O0({.loss_scale = 8.0});
  const mezzo::InitializeOptions options{.num_losses = 2, .verbosity = 0};
  auto amp = mezzo::initialize(model, {first, second}, level, options);
  const auto input = [](double first_grad, double second_grad) {
    return torch::tensor({first_grad, second_grad}, torch::kFloat);
  };
  EXPECT_THAT([&] { amp.backward(amp.forward(model, input(1, 1)), first); },
              ThrowsMessage<c10::Error>(HasSubstr("; pass it to one of them")));
  torch::optim::SGD sgd0({all[0]}, 1.0), sgd1({all[1]}, 1.0);
  auto separate = mezzo::initialize(model, {sgd0, sgd1}, level, options);
  separate.backward(separate.forward(model, input(1, 1)), {sgd0, sgd1}, {.loss_id = 0});
  separate.backward(separate.forward(model, input(2, 2)), {sgd0, sgd1}, {.loss_id = 1});
  separate.step(sgd0);
  separate.step(sgd1);
  EXPECT_EQ(first_element(all[0]), -3);
  EXPECT_EQ(first_element(all[1]), -3);
}

TEST(GradLifecycle, AdagradSumStartsInFloat32) {
  const torch::Tensor bf16 = make_weight(torch::kBFloat16, 1), fp32 = make_weight(torch::kFloat, 1);
  const auto options = torch::optim::AdagradOptions(0.5).initial_accumulator_value(0.1);
  torch::optim::Adagrad bf16_adagrad({bf16}, options), fp32_adagrad({fp32}, options);
  mezzo::MasterWeights masters(bf16_adagrad);
  for (int i = 0; i < 3; ++i) {
    bf16.mutable_grad() = torch::full_like(bf16.detach(), 0.125);
    fp32.mutable_grad() = torch::full_like(fp32.detach(), 0.125);
    masters.step();
    fp32_adagrad.step();
  }
  EXPECT_TRUE(master_params(masters)[0].equal(fp32));
}

}  // namespace
