// GradScaler::unscale_ where an optimizer keeps masters: true gradients in float, to be clipped at
// master_params(optimizer), and gone when the iteration is over.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <string>

#include "../../support/owned_optimizer.h"
#include "master_model.h"

namespace {

using namespace master_weights_test;
using mezzo::AnyOptimizer;
using mezzo::GradScaler;
using mezzo::master_params;
using mezzo::StepOptions;
using mezzo::optim::WeightStorage;
using test_support::OwnedOptimizer;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr mezzo::optim::WeightOptions kMasters{.weight_storage = WeightStorage::master};

using MakeKeeper = std::function<OwnedOptimizer(const Groups&)>;

template <class Optimizer, class Options>
MakeKeeper ours(Options options) {
  return [options](const Groups& groups) {
    return OwnedOptimizer(std::make_unique<Optimizer>(groups, options, kMasters),
                          /*with_masters=*/false);
  };
}

MakeKeeper adapter(const MakeOptimizer& make) {
  return [make](const Groups& groups) { return OwnedOptimizer(make(groups), true); };
}

std::vector<MakeKeeper> keepers() {
  using namespace mezzo::optim;
  std::vector<MakeKeeper> all{
      ours<AdamW>(AdamWOptions(1e-3).weight_decay(0.1)),
      ours<Adam>(AdamOptions(1e-3).amsgrad(true)), ours<SGD>(mezzo::optim::SGDOptions(1e-2)),
      ours<SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)), ours<Lion>(LionOptions(1e-3))};
  for (const MakeOptimizer& make : libtorch_optimizers()) all.push_back(adapter(make));
  return all;
}

/// Seven steps, one of which overflows. Unless `unscales`, they leave gradients as they are.
template <class Step>
Model trained(torch::ScalarType dtype, const MakeKeeper& make, bool unscales, const Step& step) {
  const Model model(dtype, /*has_gaps=*/false);
  const OwnedOptimizer keeper = make(model.groups());
  AnyOptimizer optimizer = keeper.any();
  GradScaler scaler = quiet_scaler();
  for (int number = 0; number < 7; ++number) {
    model.set_gradients(number, scaler.get_scale());
    if (number == 3) model.parameters[2].mutable_grad()[2][1] = kInfinity;
    const auto before = copies_of(model.gradients());
    step(scaler, optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (unscales) continue;
      EXPECT_THAT(model.gradients()[i], SameBits(before[i])) << i;
    }
    scaler.update();
  }
  Model all = model;
  for (const auto& master : master_params(optimizer)) {
    EXPECT_EQ(master.scalar_type(), torch::kFloat);
    all.parameters.push_back(master);
  }
  return all;
}

class UnscaledOfDtype : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(UnscaledMasters, UnscaledOfDtype,
                         testing::Values(torch::kHalf, torch::kBFloat16));

TEST_P(UnscaledOfDtype, StepToTheBitsOfTheStepInOnePass) {
  int number = 0;
  for (const MakeKeeper& make : keepers()) {
    const Model one_pass = trained(GetParam(), make, /*unscales=*/false,
                                   [](auto& scaler, auto& optimizer) { scaler.step(optimizer); });
    const Model unscaled = trained(GetParam(), make, true, [](auto& scaler, auto& optimizer) {
      scaler.unscale_(optimizer);
      scaler.step(optimizer);
    });
    EXPECT_THAT(one_pass.parameters, SameBits(unscaled.parameters)) << "optimizer " << number;
    const Model fresh(GetParam(), /*has_gaps=*/false);
    EXPECT_FALSE(same_bits(fresh.parameters[0], unscaled.parameters[0])) << number;
    ++number;
  }
}

/// One parameter of half, one of float, with masters of mezzo's SGD or of the adapter's.
class Unscaled : public testing::TestWithParam<bool> {
 protected:
  static OwnedOptimizer owned(const Tensors& parameters) {
    if (!GetParam()) {
      const torch::optim::SGDOptions options(1.0);
      return {std::make_unique<torch::optim::SGD>(parameters, options), /*with_masters=*/true};
    }
    return {std::make_unique<mezzo::optim::SGD>(parameters, 1.0, kMasters), /*with_masters=*/false};
  }

  void set_gradients(float value, double scale = kScale) {
    for (const auto& parameter : {x_, y_}) {
      parameter.mutable_grad() = torch::full({2}, value * scale).to(parameter.scalar_type());
    }
  }
  torch::Tensor master() { return master_params(optimizer_)[0]; }
  float value() { return master()[0].item<float>(); }

  torch::Tensor x_ = torch::zeros({2}, torch::kHalf).requires_grad_();
  torch::Tensor y_ = torch::zeros({2}).requires_grad_();
  OwnedOptimizer owned_ = owned({x_, y_});
  AnyOptimizer optimizer_ = owned_.any();
  GradScaler scaler_ = quiet_scaler();
};
INSTANTIATE_TEST_SUITE_P(Masters, Unscaled, testing::Bool(), [](const auto& one) {
  return one.param ? "OfMezzosOptimizer" : "OfTheAdapter";
});

TEST_P(Unscaled, GradientsAreTheWeightsOwnInFloatAndShownAtTheMasters) {
  set_gradients(3);
  scaler_.unscale_(optimizer_);
  EXPECT_THAT(x_.grad(), SameBits(torch::full({2}, 3.0F)));
  EXPECT_TRUE(master().grad().is_same(x_.grad()));
  EXPECT_THAT(y_.grad(), SameBits(torch::full({2}, 3.0F)));
  EXPECT_TRUE(master_params(optimizer_)[1].is_same(y_));
  EXPECT_TRUE(scaler_.step(optimizer_).ran());
  EXPECT_EQ(value(), -3.0F);
  EXPECT_EQ(y_[0].item<float>(), -3.0F);
  EXPECT_THAT(x_.grad(), SameBits(torch::full({2}, 3.0F))) << "a step writes no gradient";
}

TEST_P(Unscaled, GradientsOfMastersThatTheCallerHoldsAreThoseOfThisIteration) {
  const Tensors masters = master_params(optimizer_);
  for (const float gradient : {3.0F, 5.0F}) {
    optimizer_.optimizer().zero_grad();
    set_gradients(gradient);
    scaler_.unscale_(optimizer_);
    EXPECT_EQ(masters[0].grad()[0].item<float>(), gradient);
    scaler_.step(optimizer_);
    EXPECT_FALSE(masters[0].grad().defined()) << "a master keeps no memory of gradients";
    scaler_.update();
  }
  EXPECT_EQ(value(), -8.0F);
}

TEST_P(Unscaled, GradientsSurviveThatUnderflowInHalf) {
  for (const bool unscales_before : {false, true}) {
    GradScaler scaler = quiet_scaler({.init_scale = 0x1p16});
    x_.mutable_grad() = torch::full({2}, 0x1p-20F).to(torch::kHalf);
    ASSERT_EQ((x_.grad() / 65536)[0].item<float>(), 0.0F);
    if (unscales_before) scaler.unscale_(optimizer_);
    scaler.step(optimizer_);
    EXPECT_EQ(value(), unscales_before ? -0x1p-35F : -0x1p-36F);
  }
}

TEST(UnscaledMasters, HalfWithoutAMasterIsStillRefused) {
  const auto x = torch::zeros({2}, torch::kHalf).requires_grad_();
  x.mutable_grad() = torch::ones_like(x);
  GradScaler scaler = quiet_scaler();
  mezzo::optim::SGD plain({x}, mezzo::optim::SGDOptions(1.0));
  for (const bool explicitly : {false, true}) {
    EXPECT_THAT([&] { explicitly ? scaler.unscale_(plain) : (void)scaler.step(plain); },
                ThrowsMessage<c10::Error>(HasSubstr("Attempting to unscale FP16 gradients.")));
  }
  mezzo::optim::SGD kept({x}, mezzo::optim::SGDOptions(1.0), kMasters);
  EXPECT_TRUE(scaler.step(kept).ran());
}

TEST(MasterParams, AreTheParametersWhereThereAreNoMasters) {
  const Model model(torch::kBFloat16, /*has_gaps=*/false);
  torch::optim::SGD theirs(model.groups(), torch::optim::SGDOptions(1.0));
  mezzo::optim::SGD plain(model.groups(), mezzo::optim::SGDOptions(1.0));
  mezzo::optim::SGD stochastic(model.groups(), mezzo::optim::SGDOptions(1.0),
                               {.weight_storage = WeightStorage::stochastic});
  for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&theirs),
                                             static_cast<torch::optim::Optimizer*>(&plain),
                                             static_cast<torch::optim::Optimizer*>(&stochastic)}) {
    const Tensors params = master_params(*optimizer);
    ASSERT_EQ(params.size(), model.parameters.size());
    for (std::size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(params[i].is_same(model.parameters[i])) << i;
    }
  }
}

TEST(MasterParams, AreMadeBeforeTheFirstStepAndStayTheSameTensors) {
  for (const MakeKeeper& make : {keepers().front(), keepers().back()}) {
    const Model model(torch::kHalf, /*has_gaps=*/false);
    const OwnedOptimizer keeper = make(model.groups());
    AnyOptimizer optimizer = keeper.any();
    const Tensors before = master_params(optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_THAT(before[i], SameBits(model.parameters[i].to(torch::kFloat))) << i;
    }
    GradScaler scaler = quiet_scaler();
    for (int step = 0; step < 3; ++step) {
      model.set_gradients(step);
      scaler.step(optimizer);
      scaler.update();
    }
    const Tensors after = master_params(optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].is_same(before[i])) << i;
  }
}

// bfloat16 has float's exponents, so that unscaling by a power of two in place loses nothing.
TEST(MasterParams, OfSplitMastersThereAreNone) {
  const auto x = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  mezzo::optim::SGD split({x}, mezzo::optim::SGDOptions(1.0),
                          {.weight_storage = WeightStorage::split_master});
  EXPECT_THAT([&] { master_params(split); },
              ThrowsMessage<c10::Error>(HasSubstr("keeps no master as a tensor; clip with "
                                                  "scaler.step(optimizer, {.max_norm")));
  GradScaler scaler = quiet_scaler();
  x.mutable_grad() = torch::full_like(x, kScale);
  scaler.unscale_(split);
  EXPECT_EQ(x.grad()[0].item<float>(), 1.0F);
  EXPECT_TRUE(scaler.step(split).ran());
  EXPECT_EQ(x[0].item<float>(), -1.0F);
}

TEST(MasterParams, ThatWereMadeEarlyAreSavedAndLoaded) {
  const Model model(torch::kHalf, /*has_gaps=*/false);
  mezzo::optim::AdamW optimizer(model.groups(), 1e-3, kMasters);
  (void)master_params(optimizer);
  std::stringstream file;
  torch::save(optimizer, file);
  mezzo::optim::AdamW other(model.groups(), 1e-3, kMasters);
  torch::load(other, file);
  model.set_gradients(0, 1.0);
  other.step();
  const Tensors masters = master_params(other);
  EXPECT_THAT(model.parameters[0], SameBits(masters[0].to(torch::kHalf)));
}

at::Tensor one_weight() { return torch::ones({4}, torch::kBFloat16).set_requires_grad(true); }

struct NoRate : torch::optim::OptimizerOptions {
  double get_lr() const override { return 1; }
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<NoRate>(*this);
  }
};
struct WithoutRate : torch::optim::Optimizer {
  explicit WithoutRate(const Tensors& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)}, std::make_unique<NoRate>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override { return {}; }
};

TEST(OptimizersOfTheUsers, WhoseRateCannotBeSetThrowUnderASchedule) {
  const at::Tensor weight = one_weight();
  weight.mutable_grad() = torch::ones_like(weight);
  WithoutRate inner({weight});
  mezzo::MasterWeights masters(inner);
  EXPECT_ANY_THROW(masters.set_lr_factors({0.5}));
  EXPECT_TRUE(masters.lr_factors().empty());
  masters.step();
}

}  // namespace
