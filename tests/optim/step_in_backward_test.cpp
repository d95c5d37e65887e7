#include <torch/torch.h>
//
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/optim/step_in_backward.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/message_of.h"
#include "../support/owned_optimizer.h"

namespace step_in_backward_test {
namespace {

using mezzo::StepInBackward;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using mezzo::optim::WeightStorageOptions;
using test_support::message_of;
using test_support::OwnedOptimizer;
using testing::HasSubstr;

/// A tied embedding, used twice in a graph, a layer that every second forward omits, a parameter
/// that none uses, and one large enough for 8-bit moments.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(5);
    words = register_module("words", torch::nn::Embedding(50, 96));
    first = register_module("first", torch::nn::Linear(96, 96));
    sometimes = register_module("sometimes", torch::nn::Linear(96, 96));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({96})));
    never = register_parameter("never", torch::randn({3}));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& tokens, bool uses_all = true) {
    at::Tensor x = torch::tanh(first(words(tokens)));
    if (uses_all) x = x + sometimes(x);
    return norm(x).matmul(words->weight.t());
  }
  at::Tensor loss(int64_t step) {
    torch::manual_seed(static_cast<uint64_t>(step));
    const at::Tensor tokens = torch::randint(50, {4, 6});
    return torch::cross_entropy_loss(forward(tokens, step % 2 == 0).to(at::kFloat).flatten(0, 1),
                                     tokens.flatten().roll(1));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear first{nullptr}, sometimes{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor never;
};
TORCH_MODULE(Net);

void expect_same_weights(Net net, Net other) {
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
  }
}

/// Compares each parameter's state, and the counted steps.
void expect_same_state(mezzo::OptimizerRef optimizer, mezzo::OptimizerRef expected) {
  const auto describe = [](mezzo::OptimizerRef ref) {
    std::vector<std::string> states;
    const auto& groups = ref.optimizer().param_groups();
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        const auto found = ref.optimizer().state().find(parameter.unsafeGetTensorImpl());
        torch::serialize::OutputArchive archive;
        if (found != ref.optimizer().state().end()) found->second->serialize(archive);
        std::ostringstream bytes;
        archive.save_to(bytes);
        states.push_back(bytes.str());
      }
    }
    const auto* const counts = ref.mixed_precision();
    states.push_back(counts == nullptr ? "" : std::to_string(counts->applied_steps()));
    return states;
  };
  EXPECT_TRUE(describe(optimizer) == describe(expected));
}

void expect_no_gradients(Net net) {
  for (const auto& item : net->named_parameters())
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
}

struct Case {
  std::string name;
  at::ScalarType dtype;
  std::function<OwnedOptimizer(const std::vector<at::Tensor>&)> make;
};

template <class Optimizer, class... Options>
Case make_case(const std::string& name, at::ScalarType dtype, bool with_masters,
               Options... options) {
  return {name, dtype, [=](const std::vector<at::Tensor>& parameters) {
            return OwnedOptimizer(std::make_unique<Optimizer>(parameters, options...),
                                  with_masters);
          }};
}

std::vector<Case> cases() {
  using namespace mezzo::optim;
  const AdamWOptions adamw(1e-2);
  std::vector<Case> all;
  for (const auto& [name, dtype, storage] :
       std::vector<std::tuple<std::string, at::ScalarType, WeightStorage>>{
           {"float32", at::kFloat, WeightStorage::plain},
           {"float64", at::kDouble, WeightStorage::plain},
           {"bfloat16", at::kBFloat16, WeightStorage::plain},
           {"fp32_master", at::kHalf, WeightStorage::fp32_master},
           {"split_master", at::kBFloat16, WeightStorage::split_master},
           {"stochastic_rounding", at::kBFloat16, WeightStorage::stochastic_rounding}}) {
    const WeightStorageOptions weights{storage, 7};
    all.push_back(make_case<AdamW>("AdamW " + name, dtype, false, adamw, weights));
    all.push_back(make_case<SGD>("SGD " + name, dtype, false,
                                 SGDOptions(0.1).momentum(0.9).dampening(0.1), weights));
    all.push_back(make_case<Lion>("Lion " + name, dtype, false, LionOptions(1e-3), weights));
  }
  all.push_back(make_case<Adam>("Adam", at::kFloat, false, AdamOptions(1e-2).amsgrad(true)));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    all.push_back(make_case<AdamW8bit>("AdamW8bit", dtype, false, torch::optim::AdamWOptions(1e-2),
                                       AdamW8bitStateOptions{.seed = 3}));
  }
  all.push_back(make_case<LAMB>("LAMB", at::kFloat, false, LAMBOptions(1e-2)));
  all.push_back(make_case<torch::optim::AdamW>("torch::optim::AdamW", at::kFloat, false, adamw));
  all.push_back(make_case<torch::optim::SGD>("MasterWeights", at::kBFloat16, true,
                                             torch::optim::SGDOptions(0.1).momentum(0.9)));
  return all;
}

TEST(StepInBackward, IsBitwiseIdenticalToOrdinaryLoop) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Net net(c.dtype), expected(c.dtype);
    const OwnedOptimizer optimizer = c.make(net->parameters()),
                         ordinary = c.make(expected->parameters());
    mezzo::LinearSchedule schedule(optimizer.ref(), {.warmup_steps = 2, .total_steps = 8}),
        expected_schedule(ordinary.ref(), {.warmup_steps = 2, .total_steps = 8});
    StepInBackward in_backward(optimizer.ref());
    for (int64_t step = 0; step < 5; ++step) {
      net->loss(step).backward({}, /*retain_graph=*/step == 1);
      expect_no_gradients(net);
      const mezzo::StepResult result = in_backward.step();
      EXPECT_TRUE(result.applied() && !result.found_inf());
      schedule.step(result);
      expected->zero_grad();
      expected->loss(step).backward();
      double norm_sq = 0;
      for (const at::Tensor& p : expected->parameters()) {
        if (p.grad().defined())
          norm_sq += std::pow(p.grad().to(at::kDouble).norm().item<double>(), 2);
      }
      EXPECT_NEAR(*result.grad_norm(), std::sqrt(norm_sq), 1e-6 * std::sqrt(norm_sq));
      ordinary.ref().step();
      expected_schedule.step();
      EXPECT_EQ(schedule.lrs(), expected_schedule.lrs());
    }
    expect_same_weights(net, expected);
    expect_same_state(optimizer.ref(), ordinary.ref());
  }
}

// A hook in the graph sees what has happened before it.
TEST(StepInBackward, FreesGradientsDuringBackward) {
  Net net;
  AdamW optimizer(net->parameters(), 0.1);
  const StepInBackward in_backward(optimizer);
  const at::Tensor norm_before = net->norm->weight.clone(),
                   words_before = net->words->weight.clone();
  const at::Tensor embedded = net->words(torch::arange(5));
  bool was_called = false;
  embedded.register_hook([&](const at::Tensor& /*gradient*/) {
    was_called = true;
    expect_no_gradients(net);
    EXPECT_FALSE(at::equal(net->norm->weight, norm_before));
    EXPECT_TRUE(at::equal(net->words->weight, words_before));
  });
  net->norm(net->first(embedded)).sum().backward();
  EXPECT_TRUE(was_called);
}

TEST(StepInBackward, SkipsOnlyParametersWithNonFiniteGradients) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Net net(c.dtype), before(c.dtype);
    const OwnedOptimizer optimizer = c.make(net->parameters());
    StepInBackward in_backward(optimizer.ref());
    net->first->bias.register_hook([](const at::Tensor& gradient) { return gradient / 0.; });
    net->loss(1).backward();
    const mezzo::StepResult result = in_backward.step();
    EXPECT_TRUE(result.applied());
    EXPECT_TRUE(result.found_inf());
    EXPECT_FALSE(std::isfinite(*result.grad_norm()));
    EXPECT_TRUE(at::equal(net->first->bias, before->first->bias));
    EXPECT_FALSE(at::equal(net->first->weight, before->first->weight));
    expect_no_gradients(net);
    net->loss(2).backward();
    EXPECT_TRUE(in_backward.step().found_inf());
    net->loss(3);
  }
}

TEST(StepInBackward, ThrowsForSecondBackwardBeforeStep) {
  Net net;
  AdamW optimizer(net->parameters(), 0.1);
  StepInBackward in_backward(optimizer);
  net->loss(0).backward();
  const at::Tensor weight = net->norm->weight.clone();
  EXPECT_THAT(message_of([&] { net->loss(1).backward(); }),
              AllOf(HasSubstr("StepInBackward: a second backward pass reached parameter "),
                    HasSubstr("call step() after each backward pass")));
  EXPECT_TRUE(at::equal(net->norm->weight, weight));
  net->zero_grad();
  (void)in_backward.step();
  net->loss(1).backward();
  EXPECT_FALSE(at::equal(net->norm->weight, weight));
}

TEST(StepInBackward, GradScalerThrowsForItsLossAndOptimizer) {
  Net net;
  const std::vector<at::Tensor> before = {net->first->weight.clone()};
  AdamW optimizer(net->parameters(), 0.1);
  mezzo::GradScaler scaler, disabled({.enabled = false});
  auto in_backward = std::make_unique<StepInBackward>(optimizer);
  EXPECT_THAT(message_of([&] { (void)scaler.scale(net->loss(0)); }),
              AllOf(HasSubstr("GradScaler::scale"), HasSubstr("float32 ["),
                    HasSubstr("without a loss scale")));
  (void)scaler.scale(torch::ones({}, at::requires_grad()) * 2);  // of another model
  (void)disabled.scale(net->loss(0));
  (void)mezzo::GradScaler({.mode = mezzo::LossScaleMode::none}).scale(net->loss(0));
  for (mezzo::GradScaler* each : {&scaler, &disabled}) {
    EXPECT_THAT(message_of([&] { (void)each->unscale_(optimizer); }),
                HasSubstr("GradScaler::unscale_: a StepInBackward"));
    EXPECT_THAT(message_of([&] { (void)each->step(optimizer, {.max_norm = 1.0}); }),
                HasSubstr("GradScaler::step: a StepInBackward"));
  }
  in_backward.reset();
  scaler.scale(net->loss(0)).backward();
  EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1.0}).applied());
}

TEST(StepInBackward, ThrowsForUnsupportedUse) {
  Net net;
  AdamW optimizer(net->parameters(), 0.1);
  torch::optim::SGD on_two_devices({net->never, torch::randn({2}, at::kMeta)}, 0.1);
  EXPECT_THAT(message_of([&] { StepInBackward in_backward(on_two_devices); }),
              HasSubstr("on several devices"));
  const StepInBackward in_backward(optimizer);
  EXPECT_THAT(message_of([&] { StepInBackward second(optimizer); }),
              HasSubstr("another StepInBackward"));
}

/// A hook that is not mezzo's, which calls the one that it replaced.
struct ForeignHook : torch::autograd::PostAccumulateGradHook {
  explicit ForeignHook(const at::Tensor& parameter)
      : previous(std::move(torch::autograd::impl::post_acc_grad_hooks(parameter))) {}
  void operator()(const at::Tensor& parameter) override {
    ++calls;
    if (previous != nullptr) (*previous)(parameter);
  }
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous;
  inline static int calls = 0;
};

TEST(StepInBackward, DestructorRestoresHooks) {
  Net net;
  torch::autograd::impl::set_post_acc_grad_hooks(net->norm->weight,
                                                 std::make_unique<ForeignHook>(net->norm->weight));
  AdamW optimizer(net->parameters(), 0.1);
  for (const bool is_wrapped : {false, true}) {
    {
      const StepInBackward in_backward(optimizer);
      net->loss(0).backward();
      expect_no_gradients(net);
      if (is_wrapped) {
        torch::autograd::impl::set_post_acc_grad_hooks(
            net->norm->bias, std::make_unique<ForeignHook>(net->norm->bias));
      }
    }
    EXPECT_EQ(ForeignHook::calls, is_wrapped ? 3 : 1);
    net->zero_grad();
    net->loss(0).backward();
    EXPECT_TRUE(net->norm->weight.grad().defined());
  }
  EXPECT_EQ(ForeignHook::calls, 5);
  EXPECT_FALSE(mezzo::detail::is_stepped_in_backward(net->norm->bias));
}

TEST(StepInBackward, ThrowsBelowForeignHook) {
  Net net;
  AdamW optimizer(net->parameters(), 0.1);
  const StepInBackward in_backward(optimizer);
  torch::autograd::impl::set_post_acc_grad_hooks(net->norm->bias,
                                                 std::make_unique<ForeignHook>(net->norm->bias));
  EXPECT_THAT(message_of([&] { net->loss(0).backward(); }), HasSubstr("set it before"));
}

TEST(StepInBackward, ContinuesAfterExceptionInBackward) {
  Net net;
  AdamW optimizer(net->parameters(), 0.1);
  StepInBackward in_backward(optimizer);
  const at::Tensor norm = net->norm->weight.clone(), first = net->first->weight.clone();
  const at::Tensor embedded = net->words(torch::arange(5));
  const at::Tensor hidden = net->first(embedded);
  hidden.register_hook(
      [](const at::Tensor& /*gradient*/) { throw std::runtime_error("in backward"); });
  EXPECT_THROW(net->norm(hidden).sum().backward(), std::runtime_error);
  EXPECT_FALSE(at::equal(net->norm->weight, norm));
  EXPECT_TRUE(at::equal(net->first->weight, first));
  (void)in_backward.step();
  std::thread([&] { net->loss(0).backward(); }).join();
  EXPECT_FALSE(at::equal(net->first->weight, first));
  EXPECT_EQ(optimizer.applied_steps(), 1);
}

// Gradients that no hook has seen: set by hand, and of a group that was added later.
TEST(StepInBackward, StepsOtherGradientsInStep) {
  for (const bool is_torch : {false, true}) {
    Net net, expected;
    const auto make = [&](Net model) -> std::unique_ptr<torch::optim::Optimizer> {
      if (is_torch) return std::make_unique<torch::optim::AdamW>(model->parameters(), 0.1);
      return std::make_unique<AdamW>(model->parameters(), 0.1);
    };
    const auto optimizer = make(net), ordinary = make(expected);
    StepInBackward in_backward(*optimizer);
    at::Tensor added = torch::ones({3}, at::requires_grad()),
               expected_added = added.detach().clone().requires_grad_();
    optimizer->add_param_group(torch::optim::OptimizerParamGroup({added}));
    ordinary->add_param_group(torch::optim::OptimizerParamGroup({expected_added}));
    for (int64_t step = 0; step < 3; ++step) {
      net->never.mutable_grad() = torch::ones({3});
      (net->loss(step) + added.square().sum()).backward();
      (void)in_backward.step();
      EXPECT_FALSE(added.grad().defined() || net->never.grad().defined());
      expected->never.mutable_grad() = torch::ones({3});
      (expected->loss(step) + expected_added.square().sum()).backward();
      ordinary->step();
      ordinary->zero_grad();
    }
    expect_same_weights(net, expected);
    EXPECT_TRUE(at::equal(added, expected_added));
    expect_same_state(*optimizer, *ordinary);
    added.mutable_grad() = at::full({3}, std::nan(""));
    EXPECT_TRUE(in_backward.step().found_inf());
    EXPECT_TRUE(at::equal(added, expected_added));
  }
}

}  // namespace
}  // namespace step_in_backward_test
