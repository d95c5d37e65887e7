// Groups, options and rates are the inner optimizer's alone: MasterWeights has none, and follows
// whatever is done to them.

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "master_model.h"

namespace {

using namespace master_weights_test;
using mezzo::MasterWeights;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Whoever has a reference to an optimizer has the one whose groups count.
static_assert(!std::convertible_to<MasterWeights&, Optimizer&>);
static_assert(std::convertible_to<MasterWeights&, mezzo::AnyOptimizer>);

torch::Tensor half_parameter() { return torch::zeros({2}, torch::kHalf).requires_grad_(); }

class OptionsOfTheInner : public testing::Test {
 protected:
  void step() {
    for (auto& group : inner_.param_groups()) {
      for (auto& parameter : group.params()) parameter.mutable_grad() = torch::ones_like(parameter);
    }
    masters_.step();
  }

  torch::Tensor parameter_ = half_parameter(), other_ = half_parameter();
  torch::optim::SGD inner_{{parameter_}, SGDOptions(1.0)};
  MasterWeights masters_{inner_};
};

TEST_F(OptionsOfTheInner, AreTakenByTheNextStepAndReachedThroughEither) {
  EXPECT_EQ(&masters_.optimizer(), &inner_);
  EXPECT_EQ(&mezzo::AnyOptimizer(masters_).optimizer(), &inner_);
  masters_.optimizer().param_groups()[0].options().set_lr(0.5);
  EXPECT_EQ(inner_.param_groups()[0].options().get_lr(), 0.5);
  inner_.param_groups()[0].options().set_lr(inner_.param_groups()[0].options().get_lr() * 0.125);
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -0.0625F);
  inner_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -0.5625F);
}

TEST_F(OptionsOfTheInner, HoldForGroupsThatAreAddedLater) {
  inner_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(4.0)));
  const auto third = half_parameter();
  inner_.add_param_group(OptimizerParamGroup({third}));
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -1.0F);
  EXPECT_EQ(other_[0].item<float>(), -4.0F);
  EXPECT_EQ(third[0].item<float>(), -1.0F);
  EXPECT_TRUE(mezzo::master_params(masters_)[1].scalar_type() == torch::kFloat);
}

TEST_F(OptionsOfTheInner, GoWithGroupsThatAreRemoved) {
  inner_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(2.0)));
  step();
  inner_.param_groups().erase(inner_.param_groups().begin());
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -1.0F);
  EXPECT_EQ(other_[0].item<float>(), -4.0F);
  inner_.param_groups().clear();
  EXPECT_TRUE(mezzo::master_params(masters_).empty());
}

TEST_F(OptionsOfTheInner, HoldForParametersThatAreAddedToItsFirstGroup) {
  inner_.add_parameters({other_});
  step();
  EXPECT_EQ(other_[0].item<float>(), -1.0F);
}

TEST_F(OptionsOfTheInner, AreReadAnewWhereItIsAssigned) {
  inner_ = torch::optim::SGD({other_}, SGDOptions(2.0));
  step();
  EXPECT_EQ(other_[0].item<float>(), -2.0F);
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
  inner.param_groups().erase(inner.param_groups().begin());
  inner.add_parameters({third});
  third.mutable_grad() = torch::ones_like(third);
  masters.step();
  EXPECT_EQ(third[0].item<float>(), -1.0F);
  EXPECT_EQ(first[0].item<float>(), 0.0F);
}

}  // namespace
