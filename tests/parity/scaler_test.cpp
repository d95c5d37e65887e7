// torch's tests of its GradScaler, with their models, numbers and expectations.

#include <mezzo/autocast/autocast.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../support/special_values.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradScaler;
using mezzo::LossScale;
using test_support::quiet_scaler;
using torch::Tensor;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<OptimizerPointer(std::vector<Tensor>)>;

constexpr int kBatches = 4;
constexpr int kSkippedBatch = 2;

template <class Optimizer, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

const MakeOptimizer kSgd = maker<torch::optim::SGD>(torch::optim::SGDOptions(1.0));
const MakeOptimizer kAdam = maker<torch::optim::Adam>(torch::optim::AdamOptions(1.0));
const MakeOptimizer kAdamW = maker<torch::optim::AdamW>(torch::optim::AdamWOptions(1.0));
const MakeOptimizer kFusedSgd = maker<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1.0));
const MakeOptimizer kFusedAdam = maker<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1.0));
const MakeOptimizer kFusedAdamW = maker<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1.0));

/// One of the two models that torch's tests train side by side: with a scaler, or without.
struct Side {
  torch::nn::Sequential model{torch::nn::Linear(8, 8), torch::nn::Linear(8, 8)};
  OptimizerPointer optimizer;
  GradScaler* scaler = nullptr;

  Tensor loss(const Tensor& input, const Tensor& target) {
    return torch::mse_loss(model->forward(input), target);
  }
  Tensor last_weight() const { return model->parameters()[2]; }
  void break_gradient() const { last_weight().mutable_grad().fill_(kInfinity); }
};

struct Batch {
  Tensor input = torch::randn({8, 8});
  Tensor target = torch::randn({8, 8});
};

/// Two sides with the same weights.
struct Pair {
  explicit Pair(const MakeOptimizer& make) {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 4; ++i) {
      scaling.model->parameters()[i].copy_(control.model->parameters()[i]);
    }
    control.optimizer = make(control.model->parameters());
    scaling.optimizer = make(scaling.model->parameters());
  }
  Side control, scaling;
};

void expect_same_training(const Side& control, const Side& scaling, double tolerance) {
  for (std::size_t i = 0; i < 4; ++i) {
    const auto expected = control.model->parameters()[i];
    const auto got = scaling.model->parameters()[i];
    EXPECT_TRUE(torch::allclose(got, expected, 1e-5, tolerance))
        << i << ": " << (got - expected).abs().max().item<float>();
    // mezzo's optimizers leave gradients as they were, scaled.
    const bool is_mezzos = dynamic_cast<mezzo::optim::FusedOptimizer*>(scaling.optimizer.get());
    if (!is_mezzos && expected.grad().defined() && got.grad().defined()) {
      EXPECT_TRUE(torch::allclose(got.grad(), expected.grad(), 1e-5, tolerance)) << i;
    }
  }
}

struct Iteration {
  const Batch& batch;
  int number;
  bool overflows;  ///< whether the scaler is to find an inf, so that the other side skips too
};

using Iterate = std::function<void(Side&, const Iteration&)>;

GradScaler torchs_scaler(bool enabled = true) {
  GradScaler scaler(
      LossScale{.init_scale = 128, .growth_factor = 2, .growth_interval = 1, .enabled = enabled});
  scaler.on_skip(nullptr);
  return scaler;
}

/// Four batches with and without a scaler, with the scaler enabled and disabled.
void expect_the_same(const Iterate& iterate, int unskipped, int skipped, double tolerance = 1e-7,
                     const MakeOptimizer& make = kSgd) {
  for (const bool enabled : {true, false}) {
    torch::manual_seed(7);
    Pair pair(make);
    GradScaler scaler = torchs_scaler(enabled);
    pair.scaling.scaler = &scaler;
    for (int i = 0; i < kBatches; ++i) {
      const Batch batch;
      const Iteration iteration{batch, i, enabled && i == kSkippedBatch};
      iterate(pair.control, iteration);
      iterate(pair.scaling, iteration);
    }
    const double scale = 128 * std::pow(2.0, unskipped) * std::pow(0.5, skipped);
    EXPECT_EQ(scaler.get_scale(), enabled ? scale : 1.0);
    expect_same_training(pair.control, pair.scaling, tolerance);
  }
}

/// backward, `before_step` (clipping), step, update; on the side without a scaler the same without.
void train(Side& side, const Iteration& iteration, const Tensor& loss,
           const std::function<void(Side&)>& before_step = nullptr) {
  if (side.scaler == nullptr) {
    loss.backward();
    if (before_step) before_step(side);
    if (!iteration.overflows) side.optimizer->step();
    return;
  }
  side.scaler->scale(loss).backward();
  if (iteration.overflows) side.break_gradient();
  if (before_step) before_step(side);
  side.scaler->step(*side.optimizer);
  side.scaler->update();
}

TEST(TorchScaling, WithoutAutocastIsExactForEveryOptimizer) {
  for (const auto& make : {kSgd, kAdam, kAdamW, kFusedSgd, kFusedAdam, kFusedAdamW}) {
    expect_the_same(
        [](Side& side, const Iteration& iteration) {
          side.model->zero_grad();
          train(side, iteration, side.loss(iteration.batch.input, iteration.batch.target));
        },
        3, 1, 1e-6, make);
  }
}

/// In half, where torch's test allows 1e-3, and with the scaler saved and loaded after each batch.
TEST(TorchScaling, WithAutocastFollowsFloat) {
  for (const bool reload : {false, true}) {
    for (const auto& make : {kSgd, kFusedSgd}) {
      expect_the_same(
          [reload](Side& side, const Iteration& iteration) {
            side.model->zero_grad();
            Tensor loss;
            {
              const mezzo::AutocastGuard autocast({.device = torch::kCPU,
                                                   .dtype = torch::kHalf,
                                                   .enabled = side.scaler != nullptr});
              loss = side.loss(iteration.batch.input, iteration.batch.target);
            }
            train(side, iteration, loss);
            if (!reload || side.scaler == nullptr || !side.scaler->is_enabled()) return;
            std::stringstream file;
            torch::save(*side.scaler, file);
            *side.scaler = torchs_scaler();
            torch::load(*side.scaler, file);
          },
          3, 1, 1e-3, make);
    }
  }
}

// torch's bound on the norm: small enough to have an effect.
constexpr double kMaxNorm = 0.2;

void clip(Side& side, double max_norm) {
  torch::nn::utils::clip_grad_norm_(side.model->parameters(), max_norm);
}

using Clip = std::function<void(Side&)>;

Iterate clipping_with(const Clip& clip_scaled) {
  return [clip_scaled](Side& side, const Iteration& iteration) {
    side.model->zero_grad();
    const Clip clip_true = [](Side& control) { clip(control, kMaxNorm); };
    train(side, iteration, side.loss(iteration.batch.input, iteration.batch.target),
          side.scaler == nullptr ? clip_true : clip_scaled);
  };
}

TEST(TorchScaling, ClipsScaledGradientsByAScaledNorm) {
  expect_the_same(
      clipping_with([](Side& side) { clip(side, kMaxNorm * side.scaler->get_scale()); }), 3, 1,
      1e-5);
}

TEST(TorchScaling, ClipsAfterASeparateUnscale) {
  expect_the_same(clipping_with([](Side& side) {
                    side.scaler->unscale_(*side.optimizer);
                    clip(side, kMaxNorm);
                  }),
                  3, 1);
}

TEST(TorchScaling, ClipsInTheStep) {
  for (const auto& make : {kSgd, kFusedSgd}) {
    expect_the_same(
        [](Side& side, const Iteration& iteration) {
          side.model->zero_grad();
          const auto loss = side.loss(iteration.batch.input, iteration.batch.target);
          if (side.scaler == nullptr) {
            train(side, iteration, loss, [](Side& control) { clip(control, kMaxNorm); });
            side.model->zero_grad();
            return;
          }
          side.scaler->scale(loss).backward();
          if (iteration.overflows) side.break_gradient();
          side.scaler->step(*side.optimizer, {.max_norm = kMaxNorm});
          side.scaler->update();
        },
        3, 1, 1e-6, make);
  }
}

TEST(TorchScaling, TakesAGradientPenalty) {
  expect_the_same(
      [](Side& side, const Iteration& iteration) {
        side.model->zero_grad();
        const auto loss = side.loss(iteration.batch.input, iteration.batch.target);
        const auto outputs = side.scaler == nullptr ? loss : side.scaler->scale(loss);
        const double inv_scale = side.scaler == nullptr ? 1.0 : 1.0 / side.scaler->get_scale();
        const auto gradients = torch::autograd::grad({outputs}, side.model->parameters(), {},
                                                     /*retain_graph=*/true, /*create_graph=*/true);
        Tensor sum = torch::zeros({});
        for (const auto& gradient : gradients) sum = sum + (gradient * inv_scale).pow(2).sum();
        train(side, iteration, loss + sum.sqrt());
      },
      3, 1, 1e-6);
}

TEST(TorchScaling, AccumulatesTwoBatches) {
  expect_the_same(
      [](Side& side, const Iteration& iteration) {
        const auto loss = side.loss(iteration.batch.input, iteration.batch.target) / 2;
        (side.scaler == nullptr ? loss : side.scaler->scale(loss)).backward();
        if (iteration.number % 2 == 0) return;
        if (side.scaler == nullptr) {
          side.optimizer->step();
        } else {
          side.scaler->step(*side.optimizer);
          side.scaler->update();
        }
        side.model->zero_grad();
      },
      2, 0);
}

/// Two models and optimizers, each with gradients of both losses; one optimizer is unscaled apart,
/// the other finds the inf.
void iterate_two(Side& first, Side& second, const Iteration& iteration) {
  for (Side* side : {&first, &second}) side->model->zero_grad();
  const auto output0 = first.model->forward(iteration.batch.input);
  const auto output1 = second.model->forward(iteration.batch.input);
  const auto loss0 = torch::mse_loss(0.3 * output0 + 0.7 * output1, iteration.batch.target);
  const auto loss1 = torch::mse_loss(0.6 * output0 - 0.4 * output1, iteration.batch.target);
  GradScaler* const scaler = first.scaler;
  if (scaler == nullptr) {
    loss0.backward({}, /*retain_graph=*/true);
    loss1.backward();
    first.optimizer->step();
    if (!iteration.overflows) second.optimizer->step();
    return;
  }
  scaler->scale(loss0).backward({}, /*retain_graph=*/true);
  scaler->scale(loss1).backward();
  if (iteration.overflows) second.break_gradient();
  scaler->unscale_(*first.optimizer);
  EXPECT_TRUE(scaler->step(*first.optimizer).ran());
  EXPECT_EQ(scaler->step(*second.optimizer).ran(), !iteration.overflows);
  scaler->update();
}

TEST(TorchScaling, SharesTheScaleBetweenTwoModelsAndLosses) {
  for (const auto& make : {kSgd, kFusedSgd}) {
    for (const bool enabled : {true, false}) {
      torch::manual_seed(8);
      Pair first(make);
      Pair second(make);
      GradScaler scaler = torchs_scaler(enabled);
      first.scaling.scaler = &scaler;
      for (int i = 0; i < kBatches; ++i) {
        const Batch batch;
        const Iteration iteration{batch, i, enabled && i == kSkippedBatch};
        iterate_two(first.control, second.control, iteration);
        iterate_two(first.scaling, second.scaling, iteration);
      }
      EXPECT_EQ(scaler.get_scale(), enabled ? 128.0 * 8 / 2 : 1.0);
      expect_same_training(first.control, first.scaling, 1e-6);
      expect_same_training(second.control, second.scaling, 1e-6);
    }
  }
}

/// torch's fused against its plain Adam and AdamW; here mezzo's against libtorch's.
TEST(TorchScaling, FusedOptimizersTrainAsPlainOnes) {
  std::vector<std::pair<MakeOptimizer, MakeOptimizer>> peers;
  for (const bool amsgrad : {false, true}) {
    peers.emplace_back(maker<torch::optim::Adam>(torch::optim::AdamOptions(1.0).amsgrad(amsgrad)),
                       maker<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1.0).amsgrad(amsgrad)));
    peers.emplace_back(
        maker<torch::optim::AdamW>(torch::optim::AdamWOptions(1.0).amsgrad(amsgrad)),
        maker<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1.0).amsgrad(amsgrad)));
  }
  for (const auto& [plain, fused] : peers) {
    for (const bool separate_unscale : {false, true}) {
      torch::manual_seed(9);
      Pair pair(plain);
      pair.scaling.optimizer = fused(pair.scaling.model->parameters());
      GradScaler scaler({.init_scale = 128});
      for (int i = 0; i < kBatches; ++i) {
        const Batch batch;
        for (Side* side : {&pair.control, &pair.scaling}) {
          side->model->zero_grad();
          Tensor loss;
          {
            const mezzo::Autocast<torch::kCPU> autocast;
            loss = side->loss(batch.input, batch.target);
          }
          scaler.scale(loss).backward();
          if (separate_unscale && side == &pair.scaling) scaler.unscale_(*side->optimizer);
          EXPECT_TRUE(scaler.step(*side->optimizer).ran());
          scaler.update();
        }
      }
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(torch::allclose(pair.scaling.model->parameters()[i],
                                    pair.control.model->parameters()[i], 1e-4, 1e-4));
      }
    }
  }
}

void break_between_unscale_and_step(const MakeOptimizer& make) {
  torch::manual_seed(10);
  Pair pair(make);
  Side& side = pair.scaling;
  GradScaler scaler({.init_scale = 128});
  scaler.on_skip(nullptr);
  for (int i = 0; i < kBatches; ++i) {
    const Batch batch;
    side.model->zero_grad();
    scaler.scale(side.loss(batch.input, batch.target)).backward();
    scaler.unscale_(*side.optimizer);
    const auto parameters = side.model->parameters();
    for (std::size_t j = 0; j < parameters.size(); ++j) {
      parameters[j].mutable_grad().fill_(j % 2 == 1 ? kInfinity : kNan);
    }
    EXPECT_FALSE(scaler.step(*side.optimizer).ran());
    scaler.update();
  }
  for (const auto& parameter : side.model->parameters()) {
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
  }
}

/// torch pins down that such a step is taken; mezzo looks once more.
TEST(TorchScaling, GradientsBrokenAfterUnscaleBreakNoParameter) {
  for (const auto& make : {kAdam, kAdamW, kFusedAdam, kFusedAdamW}) {
    break_between_unscale_and_step(make);
  }
}

TEST(TorchScaling, TheScaleDoesNotOverflow) {
  torch::manual_seed(11);
  torch::nn::Linear model(5, 1);
  torch::optim::Adam optimizer(model->parameters());
  GradScaler scaler({.init_scale = 1e38, .growth_factor = 16, .growth_interval = 1});
  scaler.on_skip(nullptr);
  const auto target = 1e-30 * torch::randn({1, 1});
  scaler.scale((model->forward(torch::randn({1, 5})) - target).pow(2).mean()).backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(std::isfinite(scaler.get_scale()));
}

/// The numbers of torch's test in a CUDA graph (tests/cuda has the graph), without one.
TEST(TorchScaling, HasTheScalesOfTheGraphedLoop) {
  const auto weight = torch::ones({100}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 4, .growth_interval = 2});
  scaler.on_skip(nullptr);
  const std::vector<float> inputs{5, 20000, 5, 40000}, scales{4, 2, 2, 1}, trackers{1, 0, 1, 0},
      gradients{5 * 4, kInfinity, 5 * 2, kInfinity};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    weight.mutable_grad() = Tensor();
    const auto input = torch::full({100}, inputs[i], torch::kHalf);
    scaler.scale((weight.to(torch::kHalf) * input).sum(torch::kFloat)).backward();
    EXPECT_TRUE(weight.grad().eq(gradients[i]).all().item<bool>());
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), scales[i]);
    EXPECT_EQ(scaler.state_dict().at("_growth_tracker"), trackers[i]);
  }
}

/// A scaler whose scale is 4, and what it says of gradients.
class TorchUnscale : public testing::TestWithParam<torch::ScalarType> {
 protected:
  static Tensor gradient(float bad = 4.0F) {
    auto values = torch::full({20, 20}, 4.0, GetParam());
    values[2][2] = bad;
    return values;
  }
  static Tensor part(const Tensor& tensor) { return tensor.slice(1, 0, 5); }

  static void expect_found(const std::vector<Tensor>& gradients, bool expected) {
    std::vector<Tensor> parameters;
    for (const auto& gradient : gradients) {
      parameters.push_back(torch::zeros(gradient.sizes(), gradient.scalar_type()));
      parameters.back().mutable_grad() = gradient;
    }
    auto optimizer = test_support::sgd(parameters);
    auto scaler = quiet_scaler({.init_scale = 4, .allow_fp16_gradients = true});
    scaler.unscale_(optimizer);
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(expected || parameter.grad().eq(1).all().item<bool>());
    }
    EXPECT_EQ(scaler.step(optimizer).found_inf(), expected);
  }
};

TEST_P(TorchUnscale, TakesEveryCombinationOfLayouts) {
  const auto good = [] { return gradient(); };
  expect_found({good(), good()}, false);
  expect_found({good(), good().t()}, false);
  expect_found({good(), part(good())}, false);
  expect_found({part(good()), part(good())}, false);
  for (const float bad : {kInfinity, kNan}) {
    expect_found({good(), gradient(bad)}, true);
    expect_found({good(), part(gradient(bad))}, true);
    expect_found({gradient(bad), part(good())}, true);
    expect_found({part(gradient(bad)), part(good())}, true);
  }
}

TEST_P(TorchUnscale, FindsAnInfInAnyOfMixedDtypesAndLayouts) {
  const auto storm = [] {
    return std::vector<Tensor>{gradient(), part(gradient()), gradient().to(torch::kHalf),
                               gradient().to(torch::kHalf)};
  };
  expect_found(storm(), false);
  for (std::size_t broken = 0; broken < 4; ++broken) {
    auto gradients = storm();
    gradients[broken][2][2] = kInfinity;
    expect_found(gradients, true);
  }
}

TEST_P(TorchUnscale, CoalescesSparseGradients) {
  const auto sparse = [](std::vector<float> values, std::vector<int64_t> rows,
                         std::vector<int64_t> columns, torch::ScalarType dtype) {
    return torch::sparse_coo_tensor(torch::stack({torch::tensor(rows), torch::tensor(columns)}),
                                    torch::tensor(values).to(dtype), {2, 3});
  };
  const auto found = [&](const Tensor& gradient) {
    const auto weight = torch::zeros({2, 3}, gradient.scalar_type());
    weight.mutable_grad() = gradient;
    auto optimizer = test_support::sgd({weight});
    auto scaler = quiet_scaler({.init_scale = 4, .allow_fp16_gradients = true});
    scaler.unscale_(optimizer);
    if (gradient.to(torch::kFloat).to_dense().isfinite().all().item<bool>()) {
      EXPECT_TRUE(torch::equal(weight.grad().to_dense() * 4, gradient.to_dense()));
    }
    return scaler.step(optimizer).found_inf();
  };
  EXPECT_FALSE(found(sparse({16, 32, 64}, {0, 1, 1}, {2, 0, 2}, GetParam())));
  EXPECT_TRUE(found(sparse({16, 32, kInfinity}, {0, 1, 1}, {2, 0, 2}, GetParam())));
  EXPECT_TRUE(found(sparse({16, 32, kNan}, {0, 1, 1}, {2, 0, 2}, GetParam())));
  // Two finite halves of one place whose sum is none.
  EXPECT_TRUE(found(sparse({64000, 32, 64000}, {0, 1, 0}, {2, 0, 2}, torch::kHalf)));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, TorchUnscale,
                         testing::Values(torch::kFloat, torch::kHalf, torch::kBFloat16,
                                         torch::kDouble),
                         [](const auto& dtype) { return std::string(toString(dtype.param)); });

TEST(TorchScale, ScalesNestedOutputs) {
  GradScaler scaler({.init_scale = 2});
  const auto four = [] { return torch::full({1}, 4.0F); };
  const auto outputs =
      scaler.scale(std::make_tuple(four(), std::make_pair(four(), four()),
                                   std::make_tuple(four(), std::vector<Tensor>{four(), four()})));
  EXPECT_EQ(std::get<0>(outputs).item<float>(), 8);
  EXPECT_EQ(std::get<1>(outputs).second.item<float>(), 8);
  EXPECT_EQ(std::get<0>(std::get<2>(outputs)).item<float>(), 8);
  EXPECT_EQ(std::get<1>(std::get<2>(outputs))[1].item<float>(), 8);
}

TEST(TorchStateDict, ReplacesEverySettingBeforeAndAfterTheFirstScale) {
  for (const bool lazy : {true, false}) {
    const GradScaler source(
        LossScale{.init_scale = 3, .growth_factor = 4, .backoff_factor = .5, .growth_interval = 2});
    GradScaler target(
        LossScale{.init_scale = 6, .growth_factor = 7, .backoff_factor = .8, .growth_interval = 1});
    auto other = target.state_dict();
    other["_growth_tracker"] = 7;
    target.load_state_dict(other);
    if (!lazy) (void)target.scale(torch::full({1}, 4.0F));
    target.load_state_dict(source.state_dict());
    EXPECT_EQ(target.get_scale(), 3.0);
    EXPECT_EQ(target.get_growth_factor(), 4.0);
    EXPECT_EQ(target.get_backoff_factor(), .5);
    EXPECT_EQ(target.get_growth_interval(), 2);
    EXPECT_EQ(target.state_dict().at("_growth_tracker"), 0);
  }
}

}  // namespace
