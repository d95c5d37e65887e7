// What an optimizer keeps of 16-bit weights, beside what others do to the weights between steps.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <vector>

#include "../support/state_of.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::AdamWParamState;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::SGDParamState;
using mezzo::optim::WeightStorage;
using test_support::state_of;

torch::Tensor whole(const torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  return mezzo::detail::joined(parameter,
                               state_of<AdamWParamState>(optimizer, parameter).lower_half());
}

void set_gradient(const torch::Tensor& parameter, double value) {
  parameter.mutable_grad() = torch::full_like(parameter.detach(), value);
}

/// A parameter of bfloat16 that was trained a little, so that there is something in its lower half.
class SplitParameter : public testing::Test {
 protected:
  SplitParameter() {
    set_gradient(parameter_, 0.5);
    optimizer_.step();
    EXPECT_TRUE(state_of<AdamWParamState>(optimizer_, parameter_).lower_half().any().item<bool>());
  }

  AdamWOptions& options() {
    return static_cast<AdamWOptions&>(optimizer_.param_groups()[0].options());
  }

  /// Settles what is kept, and changes nothing.
  void step_without_moving() {
    options().lr(0);
    set_gradient(parameter_, 0);
    optimizer_.step();
  }

  torch::Tensor parameter_ = torch::rand({100}).to(torch::kBFloat16).requires_grad_();
  AdamW optimizer_{
      {parameter_}, AdamWOptions(1e-4), {.weight_storage = WeightStorage::split_master}};
};

TEST_F(SplitParameter, CanBeSavedAfterItsDtypeChanged) {
  for (const auto dtype : {torch::kHalf, torch::kFloat}) {
    parameter_.set_data(parameter_.detach().to(dtype));
    std::stringstream file;
    torch::save(optimizer_, file);
    AdamW loaded({parameter_}, AdamWOptions(1e-4));
    torch::load(loaded, file);
    EXPECT_TRUE(torch::equal(state_of<AdamWParamState>(loaded, parameter_).master(),
                             parameter_.detach().to(torch::kFloat)));
  }
}

TEST_F(SplitParameter, KeepsItsLowerHalfWhenALazyCopyOfItIsMade) {
  const auto before = whole(optimizer_, parameter_);
  const auto copy = at::_lazy_clone(parameter_.detach());
  step_without_moving();
  EXPECT_TRUE(torch::equal(whole(optimizer_, parameter_), before));
}

TEST_F(SplitParameter, KeepsItsLowerHalfThroughAStepThatThrows) {
  const auto before = whole(optimizer_, parameter_);
  const auto version = parameter_._version();
  const auto other = torch::ones({3}).requires_grad_();
  optimizer_.add_param_group(torch::optim::OptimizerParamGroup(std::vector{other}));
  set_gradient(other, 1);
  auto state = std::make_unique<AdamWParamState>();
  state->exp_avg(torch::zeros({4})).exp_avg_sq(torch::zeros({4}));
  optimizer_.state()[other.unsafeGetTensorImpl()] = std::move(state);
  EXPECT_THROW(step_without_moving(), c10::Error);
  EXPECT_EQ(parameter_._version(), version);
  optimizer_.state().erase(other.unsafeGetTensorImpl());
  step_without_moving();
  EXPECT_TRUE(torch::equal(whole(optimizer_, parameter_), before));
}

TEST_F(SplitParameter, TakesMemoryOfAnotherSize) {
  SGD optimizer({parameter_}, SGDOptions(0), {.weight_storage = WeightStorage::split_master});
  optimizer.step();
  parameter_.mutable_grad() = torch::Tensor();
  parameter_.set_data(torch::ones({100000}, torch::kBFloat16));
  set_gradient(parameter_, 0);
  optimizer.step();
  EXPECT_EQ(state_of<SGDParamState>(optimizer, parameter_).lower_half().numel(), 100000);
  EXPECT_TRUE(torch::equal(parameter_, torch::ones({100000}, torch::kBFloat16)));
}

TEST(KeptWeights, OfADtypeThatSomebodySetAreConverted) {
  const auto parameter = torch::ones({1000}, torch::kBFloat16).requires_grad_();
  AdamW optimizer({parameter}, AdamWOptions(0), {.weight_storage = WeightStorage::master});
  set_gradient(parameter, 0);
  optimizer.step();
  auto& state = state_of<AdamWParamState>(optimizer, parameter);
  state.master(state.master().to(torch::kHalf));
  optimizer.step();
  EXPECT_TRUE(torch::equal(state.master(), torch::ones({1000})));
  EXPECT_TRUE(torch::equal(parameter, torch::ones({1000}, torch::kBFloat16)));
}

TEST(KeptWeights, GoThroughAFileOfAnOptimizerThatNeverStepped) {
  const auto parameter = torch::ones({5}, torch::kBFloat16).requires_grad_();
  constexpr uint64_t kSeed = 0xFFFFFFFFFFFFFFF1U;
  AdamW saved({parameter}, AdamWOptions(0.5),
              {.weight_storage = WeightStorage::stochastic, .seed = kSeed});
  std::stringstream file;
  torch::save(saved, file);
  AdamW loaded({parameter}, AdamWOptions(1));
  torch::load(loaded, file);
  EXPECT_EQ(loaded.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_EQ(loaded.weight_options().weight_storage, WeightStorage::stochastic);
  EXPECT_EQ(loaded.weight_options().seed, kSeed);
  EXPECT_EQ(loaded.applied_steps(), 0);
  EXPECT_TRUE(loaded.state().empty());
}

}  // namespace
