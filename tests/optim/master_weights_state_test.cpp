// Masters and inner state of a MasterWeights.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/muon.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"

namespace {

using mezzo::MasterWeights;
using test_support::message_of;
using testing::HasSubstr;

torch::Tensor bfloat16_weight(double value, at::IntArrayRef sizes = {4}) {
  return torch::full(sizes, value, torch::kBFloat16).requires_grad_();
}

void step(MasterWeights& masters, const torch::Tensor& weight, double gradient) {
  weight.mutable_grad() = torch::full_like(weight, gradient);
  masters.step();
}

TEST(MasterWeightsState, MasterParamThrowsInEmaGuard) {
  const auto weight = bfloat16_weight(1);
  torch::optim::SGD sgd({weight}, 1e-3);
  MasterWeights masters(sgd);
  const mezzo::Ema ema({weight});
  step(masters, weight, 1);
  const auto before = mezzo::master_params(masters)[0].clone();
  {
    const mezzo::EmaGuard averages(ema);
    EXPECT_THAT(message_of([&] { (void)mezzo::master_params(masters); }),
                HasSubstr("holds an average while an EmaGuard is alive"));
    weight.mutable_grad() = torch::ones_like(weight);
    EXPECT_THAT(message_of([&] { masters.step(); }), HasSubstr("holds an average"));
  }
  EXPECT_TRUE(mezzo::master_params(masters)[0].equal(before));
}

TEST(MasterWeightsState, ParamRemovedFromGroupKeepsMaster) {
  const auto weight = bfloat16_weight(1), other = bfloat16_weight(1);
  torch::optim::SGD sgd({weight, other}, torch::optim::SGDOptions(1e-3).momentum(0.9));
  MasterWeights masters(sgd);
  step(masters, weight, 1);
  const auto before = mezzo::master_params(masters)[0].detach().clone();
  auto& params = sgd.param_groups()[0].params();
  params.erase(params.begin());
  step(masters, other, 1);
  params.push_back(weight);
  weight.mutable_grad() = torch::Tensor();
  EXPECT_TRUE(mezzo::master_params(masters)[1].equal(before));
  EXPECT_EQ(before[0].item<float>(), 0.999F);
}

TEST(MasterWeightsState, AdagradSumStartsAtDefault) {
  for (const bool is_written : {false, true}) {
    const auto weight = bfloat16_weight(1);
    auto options = std::make_unique<torch::optim::AdagradOptions>(0.1);
    options->initial_accumulator_value(0.3);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{weight}, std::move(options));
    torch::optim::Adagrad inner(groups, torch::optim::AdagradOptions(0.1));
    auto& state = static_cast<torch::optim::AdagradParamState&>(
        *inner.state().at(weight.unsafeGetTensorImpl()));
    if (is_written) state.sum().fill_(3);
    MasterWeights masters(inner);
    step(masters, weight, 1);
    const double sum = is_written ? 4 : 1;
    EXPECT_NEAR(mezzo::master_params(masters)[0][0].item<double>(), 1 - 0.1 / std::sqrt(sum), 1e-6);
  }
}

TEST(MasterWeightsState, ThrowsForViewOverlappingBase) {
  const auto base = torch::zeros({4, 4}, torch::kBFloat16);
  const auto first = base.slice(1, 0, 4, 2).requires_grad_();
  const auto second = base.slice(1, 1, 4, 2).requires_grad_();
  auto whole = base.view({16}).requires_grad_();
  torch::optim::SGD both({whole, first}, 0.1), apart({first, second}, 0.1);
  EXPECT_THAT(message_of([&] { const MasterWeights masters(both); }), HasSubstr("share memory"));
  EXPECT_EQ(message_of([&] { const MasterWeights masters(apart); }), "no error");
}

TEST(MasterWeightsState, CoalescesSparseGradientsBeforeClipping) {
  for (const double max_norm : {0.1, 0.2, 0.3, 0.7, 0.9}) {
    const auto weight = bfloat16_weight(1, {3, 1});
    torch::optim::Adagrad inner({weight}, torch::optim::AdagradOptions(1.0));
    MasterWeights masters(inner);
    // The sum is 0. The sum of rounded products with a coefficient may not be, and Adagrad would
    // amplify it to a full lr.
    const auto indices = torch::tensor({0, 0, 0, 1}, torch::kLong).view({1, 4});
    const auto values = torch::tensor({1.0, 10.0, -11.0, 5.0}).to(torch::kBFloat16).view({4, 1});
    weight.mutable_grad() = torch::sparse_coo_tensor(indices, values, {3, 1});
    auto plan = masters.plan();
    const auto stats = masters.grad_stats(plan, torch::ones({1}));
    masters.apply(std::move(plan), stats, {.max_norm = max_norm});
    EXPECT_EQ(weight[0][0].item<float>(), 1) << max_norm;
    EXPECT_LT(weight[1][0].item<float>(), 0.5);
  }
}

template <class Optimizer>
void expect_new_casts(Optimizer& optimizer, const torch::Tensor& weight) {
  const auto x = torch::ones({1, 4});
  const mezzo::AutocastGuard<torch::kCPU> region;
  const auto before = torch::linear(x, weight);
  const torch::NoGradGuard no_grad;
  weight.mutable_grad() = torch::ones_like(weight);
  optimizer.step();
  const auto after = torch::linear(x, weight);
  EXPECT_TRUE(after.equal(torch::linear(x, weight.detach().clone())));
  EXPECT_FALSE(after.equal(before));
}

TEST(OptimizerRefStep, ClearsAutocastCache) {
  const auto make = [] { return torch::ones({4, 4}).requires_grad_(); };
  const auto a = make(), b = make(), c = make();
  mezzo::optim::LAMB lamb({a}, 0.5);
  mezzo::optim::Muon muon({b}, 0.5);
  mezzo::optim::AdamW8bit bits8({c}, torch::optim::AdamWOptions(0.5));
  expect_new_casts(lamb, a);
  expect_new_casts(muon, b);
  expect_new_casts(bits8, c);
}

}  // namespace
