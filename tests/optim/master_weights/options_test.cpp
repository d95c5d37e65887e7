// MasterWeights and the optimizer that it wraps have one set of options, whoever writes them.

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mezzo/optim/lr_schedule.h>

#include "master_model.h"

#include <memory>
#include <sstream>
#include <utility>
#include <vector>

namespace {

using namespace master_weights_test;
using mezzo::MasterWeights;
using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::ReduceLROnPlateauScheduler;
using torch::optim::SGDOptions;
using torch::optim::StepLR;

torch::Tensor half_parameter() { return torch::zeros({2}, torch::kHalf).requires_grad_(); }

SGDOptions& sgd_options(Optimizer& optimizer, std::size_t group = 0) {
  return static_cast<SGDOptions&>(optimizer.param_groups().at(group).options());
}

class OneSetOfOptions : public testing::Test {
 protected:
  void step() {
    for (auto& group : masters_.param_groups()) {
      for (auto& parameter : group.params()) parameter.mutable_grad() = torch::ones_like(parameter);
    }
    masters_.step();
  }

  torch::Tensor parameter_ = half_parameter(), other_ = half_parameter();
  torch::optim::SGD inner_{{parameter_}, SGDOptions(1.0)};
  MasterWeights masters_{inner_};
  Optimizer& base_ = masters_;
};

TEST_F(OneSetOfOptions, IsWrittenAndReadAtEitherAtOnce) {
  base_.param_groups()[0].options().set_lr(0.5);
  EXPECT_EQ(inner_.param_groups()[0].options().get_lr(), 0.5);
  inner_.param_groups()[0].options().set_lr(inner_.param_groups()[0].options().get_lr() * 0.125);
  EXPECT_EQ(base_.param_groups()[0].options().get_lr(), 0.0625);
  EXPECT_EQ(masters_.param_groups()[0].options().get_lr(), 0.0625);
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -0.0625F);
}

TEST_F(OneSetOfOptions, HasEveryOptionOfTheClassAndTheDefaults) {
  SGDOptions& held = sgd_options(base_);
  held.momentum(0.5).weight_decay(0.25);
  EXPECT_EQ(sgd_options(inner_).momentum(), 0.5);
  EXPECT_EQ(sgd_options(inner_).weight_decay(), 0.25);
  step();
  sgd_options(inner_).lr(0.75);
  EXPECT_EQ(held.lr(), 0.75);
  static_cast<SGDOptions&>(inner_.defaults()).lr(3);
  base_.add_param_group(OptimizerParamGroup({other_}));
  EXPECT_EQ(sgd_options(base_, 1).lr(), 3);
}

TEST(MasterWeightsOptions, MakeTheRatesOfOneOptimizerWithASchedulerOnEach) {
  for (const bool plateau_is_outside : {true, false}) {
    torch::optim::SGD plain({half_parameter()}, SGDOptions(1.0));
    torch::optim::SGD inner({half_parameter()}, SGDOptions(1.0));
    MasterWeights masters(inner);
    Optimizer& base = masters;
    const auto plateau_of = [](Optimizer& optimizer) {
      return ReduceLROnPlateauScheduler(optimizer, ReduceLROnPlateauScheduler::min, 0.5F,
                                        /*patience=*/0, 1e-4, ReduceLROnPlateauScheduler::rel,
                                        /*cooldown=*/0, /*min_lr=*/{0.015F});
    };
    auto expected_plateau = plateau_of(plain);
    StepLR expected_steps(plain, 2, 0.5);
    auto plateau = plateau_of(plateau_is_outside ? base : inner);
    StepLR steps(plateau_is_outside ? static_cast<Optimizer&>(inner) : base, 2, 0.5);
    for (int i = 0; i < 8; ++i) {
      for (const auto& group : inner.param_groups()) {
        group.params()[0].mutable_grad() = torch::zeros({2}, torch::kHalf);
      }
      masters.step();
      expected_plateau.step(1.0F);
      expected_steps.step();
      plateau.step(1.0F);
      steps.step();
      const double expected = plain.param_groups()[0].options().get_lr();
      EXPECT_EQ(inner.param_groups()[0].options().get_lr(), expected) << i;
      EXPECT_EQ(base.param_groups()[0].options().get_lr(), expected) << i;
    }
  }
}

TEST_F(OneSetOfOptions, TakesAnAbsoluteRateAfterARelativeOneAsItIs) {
  sgd_options(inner_).lr(sgd_options(inner_).lr() * 0.125);
  sgd_options(base_).lr(0.5);
  step();
  EXPECT_EQ(sgd_options(inner_).lr(), 0.5);
  EXPECT_EQ(parameter_[0].item<float>(), -0.5F);
}

TEST_F(OneSetOfOptions, HoldsGroupsThatWereAddedToEitherWithTheOptionsThatTheyHave) {
  base_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(2.0)));
  SGDOptions& held = sgd_options(base_, 1);
  (void)masters_.param_groups();
  held.lr(4.0);
  EXPECT_EQ(sgd_options(inner_, 1).lr(), 4.0);
  EXPECT_EQ(&sgd_options(inner_, 1), &held);
  const auto third = half_parameter();
  inner_.add_param_group(OptimizerParamGroup({third}));
  step();
  ASSERT_EQ(base_.param_groups().size(), 3U);
  EXPECT_EQ(&sgd_options(inner_, 2), &sgd_options(base_, 2));
  EXPECT_EQ(other_[0].item<float>(), -4.0F);
  EXPECT_EQ(third[0].item<float>(), -1.0F);
}

TEST_F(OneSetOfOptions, HoldsGroupsThatWereAddedToBoth) {
  const auto third = half_parameter();
  base_.add_param_group(OptimizerParamGroup({other_}));
  inner_.add_param_group(OptimizerParamGroup({third}));
  step();
  for (Optimizer* one : {&base_, static_cast<Optimizer*>(&inner_)}) {
    ASSERT_EQ(one->param_groups().size(), 3U);
    EXPECT_TRUE(one->param_groups()[1].params()[0].is_same(third));
    EXPECT_TRUE(one->param_groups()[2].params()[0].is_same(other_));
  }
  inner_.add_param_group(OptimizerParamGroup({half_parameter()}));
  EXPECT_EQ(masters_.param_groups().size(), 4U);
}

TEST_F(OneSetOfOptions, IsReplacedAtEither) {
  base_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  step();
  EXPECT_EQ(sgd_options(inner_).lr(), 0.5);
  inner_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.25));
  step();
  EXPECT_EQ(sgd_options(base_).lr(), 0.25);
  EXPECT_EQ(parameter_[0].item<float>(), -0.75F);
}

TEST_F(OneSetOfOptions, LosesGroupsThatWereRemovedFromEither) {
  const Tensors more{half_parameter(), half_parameter(), half_parameter()};
  for (const auto& one : more) masters_.add_param_group(OptimizerParamGroup({one}));
  base_.param_groups().erase(base_.param_groups().begin() + 1);
  base_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(2.0)));
  (void)masters_.param_groups();
  inner_.param_groups().erase(inner_.param_groups().begin());
  (void)masters_.param_groups();
  for (Optimizer* one : {&base_, static_cast<Optimizer*>(&inner_)}) {
    ASSERT_EQ(one->param_groups().size(), 3U);
    EXPECT_TRUE(one->param_groups()[0].params()[0].is_same(more[1]));
    EXPECT_TRUE(one->param_groups()[1].params()[0].is_same(more[2]));
    EXPECT_TRUE(one->param_groups()[2].params()[0].is_same(other_));
    EXPECT_EQ(sgd_options(*one, 2).lr(), 2.0);
  }
  base_.param_groups().clear();
  (void)masters_.param_groups();
  EXPECT_TRUE(inner_.param_groups().empty());
}

TEST_F(OneSetOfOptions, TakesParametersThatAreAddedToItsFirstGroup) {
  base_.add_parameters({other_});
  step();
  EXPECT_EQ(inner_.param_groups()[0].params().size(), 2U);
  EXPECT_EQ(other_[0].item<float>(), -1.0F);
  base_.add_parameters({half_parameter()});
  inner_.add_parameters({half_parameter()});
  EXPECT_THAT([&] { (void)masters_.param_groups(); },
              ThrowsMessage<c10::Error>(HasSubstr("change them at one of the two")));
}

TEST_F(OneSetOfOptions, RefusesAParameterThatWasAddedToBoth) {
  base_.add_param_group(OptimizerParamGroup({other_}));
  inner_.add_param_group(OptimizerParamGroup({other_}));
  EXPECT_THROW((void)masters_.param_groups(), c10::Error);
  base_.param_groups().pop_back();
  (void)masters_.param_groups();
  EXPECT_EQ(base_.param_groups().size(), 2U);
}

TEST_F(OneSetOfOptions, AddsAGroupWhoseOptionsLieWhereThoseOfARemovedGroupLay) {
  masters_.add_param_group(OptimizerParamGroup({other_}));
  const auto third = half_parameter();
  inner_.param_groups().erase(inner_.param_groups().begin());  // malloc uses the address again
  base_.add_param_group(OptimizerParamGroup({third}));
  step();
  for (Optimizer* one : {&base_, static_cast<Optimizer*>(&inner_)}) {
    ASSERT_EQ(one->param_groups().size(), 2U);
    EXPECT_TRUE(one->param_groups()[0].params()[0].is_same(other_));
    EXPECT_TRUE(one->param_groups()[1].params()[0].is_same(third));
  }
  EXPECT_EQ(third[0].item<float>(), -1.0F);
}

TEST_F(OneSetOfOptions, AddsAGroupWhoseOptionsLieWhereReplacedOnesLay) {
  base_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  base_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(0.25)));
  (void)masters_.param_groups();
  for (Optimizer* one : {&base_, static_cast<Optimizer*>(&inner_)}) {
    ASSERT_EQ(one->param_groups().size(), 2U);
    EXPECT_TRUE(one->param_groups()[0].params()[0].is_same(parameter_));
    EXPECT_EQ(sgd_options(*one, 0).lr(), 0.5);
    EXPECT_EQ(sgd_options(*one, 1).lr(), 0.25);
  }
}

TEST_F(OneSetOfOptions, RefusesParametersOfAGroupWhoseOptionsWereReplacedAtTheInner) {
  inner_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  base_.add_parameters({other_});
  EXPECT_THAT([&] { (void)masters_.param_groups(); },
              ThrowsMessage<c10::Error>(HasSubstr("change them at one of the two")));
  base_.parameters().pop_back();
  (void)masters_.param_groups();
  EXPECT_EQ(sgd_options(base_).lr(), 0.5);
}

TEST_F(OneSetOfOptions, FollowsAnInnerOptimizerThatIsAssigned) {
  inner_ = torch::optim::SGD({other_}, SGDOptions(2.0));
  step();
  EXPECT_EQ(other_[0].item<float>(), -2.0F);
  EXPECT_EQ(&base_.defaults(), &inner_.defaults());
  base_.add_param_group(OptimizerParamGroup({parameter_}));
  EXPECT_EQ(sgd_options(base_, 1).lr(), 2.0);
}

TEST_F(OneSetOfOptions, IsSavedAsItWasReplacedSinceTheLastStep) {
  base_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  std::stringstream file;
  torch::save(masters_, file);
  sgd_options(inner_).lr(7);
  torch::load(masters_, file);
  EXPECT_EQ(sgd_options(inner_).lr(), 0.5);

  base_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.25));
  EXPECT_EQ(std::as_const(masters_).param_groups()[0].options().get_lr(), 0.25);
}

TEST_F(OneSetOfOptions, IsReadFromAFileAndKeptWhereTheFileIsRefused) {
  SGDOptions& held = sgd_options(base_);
  std::stringstream file;
  torch::save(masters_, file);
  held.lr(7).momentum(0.5);
  torch::load(masters_, file);
  EXPECT_EQ(held.lr(), 1.0);
  EXPECT_EQ(&sgd_options(inner_), &held);

  torch::optim::Adam adam({half_parameter()}, torch::optim::AdamOptions(9.0));
  MasterWeights others(adam);
  others.param_groups()[0].params()[0].mutable_grad() = torch::ones({2}, torch::kHalf);
  others.step();
  std::stringstream other_file;
  torch::save(others, other_file);
  EXPECT_THROW(torch::load(masters_, other_file), c10::Error);
  EXPECT_EQ(sgd_options(base_).lr(), 1.0);
  EXPECT_EQ(&sgd_options(base_), &sgd_options(inner_));
}

TEST(MasterWeightsOptions, StayWithTheInnerOptimizerWhenItIsWrappedNoLonger) {
  torch::optim::SGD inner({half_parameter()}, SGDOptions(1.0));
  SGDOptions& held = sgd_options(inner);
  {
    MasterWeights masters(inner);
    sgd_options(masters).lr(0.5);
    static_cast<Optimizer&>(masters).add_param_group(OptimizerParamGroup({half_parameter()}));
  }
  EXPECT_EQ(&sgd_options(inner), &held);
  EXPECT_EQ(held.lr(), 0.5);
  {
    const MasterWeights again(inner);
    held.lr(0.25);
    EXPECT_EQ(again.param_groups()[0].options().get_lr(), 0.25);
  }
  const auto shared = half_parameter(), same_memory = shared.detach().requires_grad_();
  torch::optim::SGD twice({OptimizerParamGroup({shared}), OptimizerParamGroup({same_memory})},
                          SGDOptions(1.0));
  EXPECT_THROW(MasterWeights{twice}, c10::Error);
  EXPECT_EQ(sgd_options(twice, 1).lr(), 1.0);
}

TEST(MasterWeightsOptions, AreTheInnerOptimizersWhereTheyWereReplacedAndNoStepFollowed) {
  const auto kept = half_parameter();
  torch::optim::SGD inner({OptimizerParamGroup({half_parameter()}), OptimizerParamGroup({kept})},
                          SGDOptions(1.0));
  {
    MasterWeights masters(inner);
    Optimizer& base = masters;
    base.param_groups().erase(base.param_groups().begin());
    base.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  }
  ASSERT_EQ(inner.param_groups().size(), 1U);
  EXPECT_TRUE(inner.param_groups()[0].params()[0].is_same(kept));
  EXPECT_EQ(sgd_options(inner).lr(), 0.5);
  {
    MasterWeights masters(inner);
    static_cast<Optimizer&>(masters).param_groups().clear();
  }
  EXPECT_TRUE(inner.param_groups().empty());
}

// Settling throws at the end, and the inner optimizer has let go of what is gone all the same.
TEST(MasterWeightsOptions, MayBeReplacedInGroupsThatDisagreeToTheEnd) {
  torch::optim::SGD inner({half_parameter()}, SGDOptions(1.0));
  {
    MasterWeights masters(inner);
    Optimizer& base = masters;
    base.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
    base.add_parameters({half_parameter()});
    inner.add_parameters({half_parameter(), half_parameter()});
  }
  EXPECT_EQ(inner.param_groups()[0].params().size(), 3U);
  EXPECT_EQ(sgd_options(inner).lr(), 0.5);
}

TEST(MasterWeightsOptions, MayBeGoneBeforeTheMasterWeightsAre) {
  auto inner = std::make_unique<torch::optim::SGD>(Tensors{half_parameter()}, SGDOptions(1.0));
  auto masters = std::make_unique<MasterWeights>(*inner);
  static_cast<Optimizer&>(*masters).add_param_group(OptimizerParamGroup({half_parameter()}));
  inner.reset();
  masters.reset();
}

/// Has no options, neither of groups nor defaults.
class OptionlessOptimizer : public Optimizer {
 public:
  explicit OptionlessOptimizer(const Tensors& parameters)
      : Optimizer(std::vector<OptimizerParamGroup>(), /*defaults=*/nullptr) {
    for (const auto& parameter : parameters) param_groups_.emplace_back(Tensors{parameter});
  }
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (const auto& group : param_groups_) {
      for (auto parameter : group.params()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad());
      }
    }
    return {};
  }
};

TEST(MasterWeightsOptions, MayBeLacking) {
  const auto first = half_parameter(), second = half_parameter(), third = half_parameter();
  OptionlessOptimizer inner({first, second});
  MasterWeights masters(inner);
  Optimizer& base = masters;
  base.param_groups().erase(base.param_groups().begin());
  base.add_parameters({third});
  third.mutable_grad() = torch::ones_like(third);
  masters.step();
  ASSERT_EQ(inner.param_groups().size(), 1U);
  EXPECT_EQ(inner.param_groups()[0].params().size(), 2U);
  EXPECT_TRUE(inner.param_groups()[0].params()[0].is_same(second));
  EXPECT_EQ(third[0].item<float>(), -1.0F);
}

}  // namespace
