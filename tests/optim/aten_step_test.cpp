// The way of devices that mezzo has no kernel for, walked on the CPU: ATen's fused optimizers give
// what mezzo's kernels give, skips and counts included.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <vector>

namespace {

using mezzo::StepOptions;
using mezzo::Verdict;

std::vector<torch::Tensor> parameters() {
  torch::manual_seed(1);
  return {torch::randn({17, 9}), torch::randn({6, 4}).t(), torch::ones({6, 4}),
          torch::randn({5}, torch::kDouble), torch::randn({3})};
}

Verdict verdict_of(bool found_inf, double norm) {
  return {torch::full({}, 0.25F), torch::full({}, found_inf ? 1.0F : 0.0F),
          torch::full({}, norm * norm, torch::kDouble)};
}

/// Twelve steps of both ways, every third of which is skipped.
template <class Optimizer, class Options>
void expect_same_steps(const Options& options) {
  const auto ours = parameters();
  const auto aten = parameters();
  Optimizer left(ours, options);
  Optimizer right(aten, options);
  for (int i = 0; i < 12; ++i) {
    std::vector<torch::Tensor> given;
    for (std::size_t k = 0; k < ours.size(); ++k) {
      const bool is_left_out = k == 4 && i % 2 == 0;
      const auto gradient = torch::randn(ours[k].sizes(), ours[k].options());
      given.push_back(is_left_out ? torch::Tensor() : gradient);
      ours[k].mutable_grad() = is_left_out ? torch::Tensor() : gradient.clone();
      aten[k].mutable_grad() = is_left_out ? torch::Tensor() : gradient.clone();
    }
    const auto verdict = i % 5 == 4 ? Verdict() : verdict_of(i % 3 == 0, i);
    const StepOptions step_options{.max_norm = 2.0, .zero_grad = i == 7};
    left.apply(left.plan(), verdict, step_options);
    right.apply_with_aten(right.plan(), verdict, step_options);
    for (std::size_t k = 0; k < ours.size(); ++k) {
      if (!given[k].defined()) continue;
      const auto wanted = i == 7 ? torch::zeros_like(given[k]) : given[k];
      EXPECT_TRUE(ours[k].grad().equal(wanted)) << k;
      EXPECT_TRUE(aten[k].grad().equal(wanted)) << k;
    }
  }
  for (std::size_t k = 0; k < ours.size(); ++k) {
    EXPECT_TRUE(torch::allclose(ours[k], aten[k], 1e-5, 1e-5)) << k;
  }
  std::stringstream archive;  // the counts come home
  torch::save(right, archive);
  torch::load(left, archive);
  for (const auto& parameter : aten) {
    const auto found = right.state().find(parameter.unsafeGetTensorImpl());
    if (found == right.state().end()) continue;
    using State = typename Optimizer::State;
    const auto& counted = static_cast<const State&>(*found->second);
    const int64_t expected = parameter.is_same(aten[4]) ? 5 : 9;
    EXPECT_EQ(counted.step(), expected);
  }
}

TEST(AtenStep, GivesWhatMezzosKernelsGiveForAdamW) {
  using mezzo::optim::AdamWOptions;
  expect_same_steps<mezzo::optim::AdamW>(AdamWOptions(1e-2));
  expect_same_steps<mezzo::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true).weight_decay(0.1));
}

TEST(AtenStep, GivesWhatMezzosKernelsGiveForAdam) {
  using mezzo::optim::AdamOptions;
  expect_same_steps<mezzo::optim::Adam>(AdamOptions(1e-2));
  expect_same_steps<mezzo::optim::Adam>(AdamOptions(1e-2).amsgrad(true).weight_decay(0.1));
}

TEST(AtenStep, GivesWhatMezzosKernelsGiveForSgd) {
  using mezzo::optim::SGDOptions;
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).weight_decay(0.1));
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9));
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

TEST(AtenStep, UnscalesAGradientOfSeveralParametersOnceForEach) {
  const auto gradient = torch::full({3}, 8.0F);
  const auto x = torch::ones({3});
  const auto y = torch::ones({3});
  x.mutable_grad() = gradient;
  y.mutable_grad() = gradient;
  mezzo::optim::SGD optimizer({x, y}, mezzo::optim::SGDOptions(0.5).momentum(0.9));
  const auto number = [](double value) { return torch::full({}, value, torch::kFloat); };
  optimizer.apply_with_aten(optimizer.plan(), {number(0.125), number(0)});
  EXPECT_TRUE(torch::equal(x, torch::full({3}, 0.5F)));
  EXPECT_TRUE(torch::equal(y, x));
}

TEST(AtenStep, RefusesDampeningWhichItCannotDo) {
  const auto x = torch::ones({2});
  x.mutable_grad() = torch::ones({2});
  mezzo::optim::SGD sgd({x}, mezzo::optim::SGDOptions(1).momentum(0.9).dampening(0.1));
  EXPECT_THROW(sgd.apply_with_aten(sgd.plan()), c10::Error);
  EXPECT_TRUE(torch::equal(x, torch::ones({2})));
}

template <class Optimizer>
int64_t steps_of(Optimizer& optimizer, const torch::Tensor& parameter) {
  auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
  return static_cast<typename Optimizer::State&>(state).step();
}

TEST(AtenStep, CountsNoStepThatItRefuses) {
  const auto x = torch::ones({2});
  const auto y = torch::ones({2});
  x.mutable_grad() = torch::ones({2});
  y.mutable_grad() = torch::ones({2});
  using mezzo::optim::SGDOptions;
  mezzo::optim::SGD sgd(
      {torch::optim::OptimizerParamGroup({x}), torch::optim::OptimizerParamGroup({y})},
      SGDOptions(0.5).momentum(0.5));
  sgd.apply_with_aten(sgd.plan());
  static_cast<SGDOptions&>(sgd.param_groups()[1].options()).dampening(0.1);
  EXPECT_THROW(sgd.apply_with_aten(sgd.plan()), c10::Error);
  EXPECT_EQ(steps_of(sgd, x), 1);
  EXPECT_EQ(steps_of(sgd, y), 1);
  EXPECT_EQ(sgd.applied_steps(), 1);
  EXPECT_TRUE(torch::equal(x, torch::full({2}, 0.5F))) << "nor is another group stepped";

  mezzo::optim::Lion lion({x});
  EXPECT_THROW(lion.apply_with_aten(lion.plan()), c10::Error);
  EXPECT_TRUE(lion.state().empty());
}

/// Or a backward pass would go on with weights that are no longer those of its forward pass.
// A check that unscale_ made and one that the step made add up, and devices' do.
TEST(AtenStep, IsSkippedWhateverTheNumberOfChecksThatFoundAnInf) {
  const auto parameter = torch::ones({5});
  mezzo::optim::AdamW optimizer({parameter}, mezzo::optim::AdamWOptions(1e-2));
  parameter.mutable_grad() = torch::full({5}, std::numeric_limits<float>::infinity());
  optimizer.apply_with_aten(optimizer.plan(), {torch::ones({}), torch::full({}, 2.0F)});
  EXPECT_TRUE(torch::equal(parameter, torch::ones({5})));
}

TEST(AtenStep, BumpsTheVersionSoThatAutogradNotices) {
  const auto parameter = torch::ones({5}).requires_grad_();
  mezzo::optim::AdamW adam({parameter}, mezzo::optim::AdamWOptions(1e-2));
  mezzo::optim::SGD sgd({parameter}, mezzo::optim::SGDOptions(1e-2));
  const auto expect_bump = [&](auto& optimizer) {
    const auto loss = (parameter * parameter).sum();
    parameter.mutable_grad() = torch::ones({5});
    optimizer.apply_with_aten(optimizer.plan());
    EXPECT_THROW(loss.backward(), c10::Error);
  };
  expect_bump(adam);
  expect_bump(sgd);
}

}  // namespace
