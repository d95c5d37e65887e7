// MasterWeights around torch::optim and custom optimizers.
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <concepts>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/get_param_state.h"
#include "../support/message_of.h"
#include "../support/owned_optimizer.h"
#include "../support/save_to_string.h"
#include "../support/temp_dir.h"
#include "../support/tiny_optimizer.h"

namespace master_weights_test {
namespace {

using mezzo::GradScaler;
using mezzo::master_params;
using mezzo::MasterWeights;
using mezzo::OptimizerRef;
using mezzo::StepOptions;
using mezzo::optim::WeightStorage;
using test_support::bitwise_equal;
using test_support::BitwiseEqual;
using test_support::clone_all;
using test_support::get_param_state;
using test_support::load_from_string;
using test_support::make_silent_scaler;
using test_support::OwnedOptimizer;
using test_support::save_to_string;
using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

constexpr double kScale = 1024;

using Tensors = std::vector<torch::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;

/// Parameters of `dtype` and float32 in two groups, one transposed, one empty and one non-dense
/// (which mezzo's optimizers do not support); and a float32 copy.
struct Model {
  Tensors parameters;

  explicit Model(torch::ScalarType dtype, bool has_gaps = true) {
    torch::manual_seed(3);
    add(torch::randn({7, 5}).to(dtype));
    add(torch::randn({33}));
    add(torch::randn({6, 5}).to(dtype).t());
    const auto sliced = torch::randn({6, 8}).to(dtype).slice(1, 0, 8, 2);
    add(has_gaps ? sliced : sliced.contiguous());
    add(torch::randn({0}).to(dtype));
    add(torch::randn({}).to(dtype));
  }

  /// A float32 copy.
  Model to_float32() const {
    Model model = *this;
    for (auto& parameter : model.parameters) {
      parameter = parameter.detach().to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
      parameter.requires_grad_();
    }
    return model;
  }

  Groups groups() const {
    const auto middle = parameters.begin() + 3;
    return {torch::optim::OptimizerParamGroup(Tensors(parameters.begin(), middle)),
            torch::optim::OptimizerParamGroup(Tensors(middle, parameters.end()))};
  }

  /// Sets the scaled gradients of a step.
  void set_gradients(int step, double scale = kScale) const {
    torch::manual_seed(100 + step);
    for (const auto& parameter : parameters) {
      parameter.mutable_grad() =
          (torch::randn(parameter.sizes()) * scale).to(parameter.scalar_type());
    }
  }

  /// Sets the unscaled float32 gradients of `other`.
  void copy_unscaled_gradients(const Model& other, double scale = kScale) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = other.parameters[i].grad().to(torch::kFloat).mul(1 / scale);
    }
  }

  Tensors gradients() const {
    Tensors all;
    for (const auto& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }

 private:
  void add(const torch::Tensor& values) { parameters.push_back(values.requires_grad_()); }
};

template <class Optimizer, class Options>
MakeOptimizer make_optimizer_factory(const Options& options) {
  return [options](const Groups& groups) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(groups, options);
  };
}

/// Optimizers without masters.
std::vector<MakeOptimizer> torch_optimizers() {
  return {make_optimizer_factory<torch::optim::SGD>(torch::optim::SGDOptions(0.01)),
          make_optimizer_factory<torch::optim::SGD>(
              torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.1)),
          make_optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(1e-3).amsgrad(true)),
          make_optimizer_factory<torch::optim::AdamW>(
              torch::optim::AdamWOptions(1e-3).weight_decay(0.1)),
          make_optimizer_factory<torch::optim::RMSprop>(
              torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5)),
          make_optimizer_factory<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2)),
          make_optimizer_factory<mezzo::optim::LAMB>(
              mezzo::optim::LAMBOptions(1e-3).weight_decay(0.1))};
}

class MasterWeightsStep : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MasterWeightsStep,
                         testing::Values(torch::kHalf, torch::kBFloat16));

void expect_rounded(const Model& model, const Tensors& masters) {
  for (std::size_t i = 0; i < masters.size(); ++i) {
    EXPECT_EQ(masters[i].scalar_type(), torch::kFloat);
    const auto& parameter = model.parameters[i];
    EXPECT_THAT(parameter, BitwiseEqual(masters[i].to(parameter.scalar_type()))) << i;
  }
}

TEST_P(MasterWeightsStep, BitwiseIdenticalToFloat32Model) {
  for (const MakeOptimizer& make : torch_optimizers()) {
    const Model model(GetParam());
    const Model floats = model.to_float32();
    const auto inner = make(model.groups());
    const auto reference = make(floats.groups());
    MasterWeights optimizer(*inner);
    GradScaler scaler = make_silent_scaler();
    for (int step = 0; step < 8; ++step) {
      model.set_gradients(step);
      floats.copy_unscaled_gradients(model);
      EXPECT_TRUE(scaler.step(optimizer).applied());
      scaler.update();
      reference->step();
    }
    EXPECT_THAT(master_params(optimizer), BitwiseEqual(floats.parameters));
    expect_rounded(model, master_params(optimizer));
    EXPECT_EQ(optimizer.applied_steps(), 8);
  }
}

TEST_P(MasterWeightsStep, BumpsVersionCounters) {
  const Model model(GetParam());
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights optimizer(inner);
  model.set_gradients(0);
  std::vector<int64_t> versions;
  for (const auto& parameter : model.parameters) versions.push_back(parameter._version());
  optimizer.step();
  for (std::size_t i = 0; i < versions.size(); ++i) {
    if (model.parameters[i].scalar_type() != GetParam()) continue;  // updated by torch
    EXPECT_GT(model.parameters[i]._version(), versions[i]) << i;
  }
}

TEST(MasterWeights, DuplicateFloat32ParamKeepsGradient) {
  auto tied = torch::ones({2}).requires_grad_();
  auto half = torch::ones({2}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd(Tensors{tied, tied, half}, torch::optim::SGDOptions(1.0));
  MasterWeights optimizer(sgd);
  GradScaler scaler = make_silent_scaler();
  const auto gradient = torch::full({2}, 0.25 * kScale);
  tied.mutable_grad() = gradient;
  half.mutable_grad() = gradient.to(torch::kHalf);
  EXPECT_TRUE(scaler.step(optimizer).applied());
  EXPECT_TRUE(tied.grad().is_same(gradient));
  EXPECT_EQ(tied[0].item<float>(), 0.5F) << "libtorch's SGD steps twice";
  EXPECT_EQ(half[0].item<float>(), 0.75F);
}

TEST(MasterWeights, InnerOptimizerUsableBetweenSteps) {
  const Model model(torch::kBFloat16);
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1).momentum(0.9));
  MasterWeights optimizer(inner);
  for (int step = 0; step < 3; ++step) {
    model.set_gradients(step, 1.0);
    optimizer.step();
    std::size_t number = 0;
    for (const auto& group : inner.param_groups()) {
      for (const auto& parameter : group.params()) {
        EXPECT_TRUE(parameter.is_same(model.parameters[number])) << number;
        const auto state = inner.state().find(parameter.unsafeGetTensorImpl());
        ASSERT_NE(state, inner.state().end()) << number;
        const auto& sgd = static_cast<const torch::optim::SGDParamState&>(*state->second);
        EXPECT_EQ(sgd.momentum_buffer().scalar_type(), torch::kFloat);
        ++number;
      }
    }
    EXPECT_EQ(inner.state().size(), model.parameters.size());
  }
  const auto master = master_params(optimizer)[0].clone();
  model.set_gradients(3, 1.0);
  inner.step();  // alone, on the 16-bit parameter
  const auto after = model.parameters[0].detach().to(torch::kFloat);
  EXPECT_FALSE(bitwise_equal(master.to(torch::kBFloat16), model.parameters[0]));
  const auto followed = master_params(optimizer)[0];
  const auto is_kept = master.to(torch::kBFloat16).eq(model.parameters[0]);
  EXPECT_THAT(followed, BitwiseEqual(torch::where(is_kept, master, after)));
}

TEST(MasterWeights, ResizedParamGetsNewMaster) {
  const auto parameter = torch::ones({2}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD sgd({parameter}, 0.5);
  mezzo::MasterWeights masters(sgd);
  for (const int64_t size : {2, 3}) {
    parameter.mutable_grad() = torch::Tensor();
    parameter.set_data(torch::ones({size}, torch::kBFloat16));
    parameter.mutable_grad() = torch::ones({size}, torch::kBFloat16);
    masters.step();
    EXPECT_TRUE(parameter.equal(torch::full({size}, 0.5, torch::kBFloat16)));
  }
}

// torch finds a state by its parameter's address, which a later tensor may reuse.
TEST(MasterWeights, ReplacedParamDropsState) {
  const auto weight = [] { return torch::ones({2}, torch::kBFloat16).requires_grad_(); };
  torch::optim::SGD sgd({weight()}, torch::optim::SGDOptions(0.5).momentum(0.9));
  mezzo::MasterWeights masters(sgd);
  for (int i = 0; i < 4; ++i) {
    auto& parameter = sgd.param_groups()[0].params()[0];
    parameter = weight();
    parameter.mutable_grad() = torch::ones({2}, torch::kBFloat16);
    masters.step();
    EXPECT_TRUE(parameter.equal(torch::full({2}, 0.5, torch::kBFloat16)));
    EXPECT_LE(sgd.state().size(), 2)
        << "its own, and until the next step that of the previous parameter";
  }
}

TEST(MasterWeights, FollowsLrSchedule) {
  const auto x = torch::zeros({1}, torch::kHalf).requires_grad_();
  torch::optim::SGD inner({x}, torch::optim::SGDOptions(8.0));
  MasterWeights optimizer(inner);
  GradScaler scaler = make_silent_scaler();
  mezzo::LinearSchedule schedule(optimizer, {.total_steps = 4});
  const std::vector<std::pair<float, double>> expected_weights_and_rates = {
      {8.0F, 6.0}, {8.0F, 6.0}, {14.0F, 4.0}};  // the second step is skipped
  for (const auto& [expected, next_rate] : expected_weights_and_rates) {
    x.mutable_grad() =
        torch::full_like(x, expected == 8.0F && x.item<float>() != 0 ? kInfinity : -kScale);
    const auto result = scaler.step(optimizer);
    scaler.update(kScale);
    schedule.step(result);
    EXPECT_EQ(x.item<float>(), expected);
    EXPECT_EQ(inner.param_groups()[0].options().get_lr(), next_rate);
  }
  EXPECT_EQ(schedule.lrs(), std::vector<double>{4.0});
  optimizer.set_lr_factors({});
  torch::optim::StepLR theirs(inner, /*step_size=*/1, /*gamma=*/0.5);
  theirs.step();  // halves the lr at its second step
  theirs.step();
  x.mutable_grad() = torch::full_like(x, -1);
  optimizer.step();
  EXPECT_EQ(x.item<float>(), 18.0F);
}

TEST(MasterWeights, CallsClosureOnceWithGradMode) {
  const auto x = torch::full({1}, 2.0F).to(torch::kHalf).requires_grad_();
  torch::optim::SGD inner({x}, torch::optim::SGDOptions(0.25));
  MasterWeights optimizer(inner);
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    auto squared = (x * x).sum();
    squared.backward();
    return squared;
  });
  EXPECT_EQ(loss.item<float>(), 4.0F);
  EXPECT_EQ(x.item<float>(), 1.0F);
}

/// A custom optimizer without lr. Subtracts the sum of gradients; throws at parameter `throw_at`.
struct SummingOptimizerOptions : torch::optim::OptimizerCloneableOptions<SummingOptimizerOptions> {
};
struct SummingOptimizerState : torch::optim::OptimizerCloneableParamState<SummingOptimizerState> {
  torch::Tensor sum;
};
class SummingOptimizer : public torch::optim::Optimizer {
 public:
  explicit SummingOptimizer(Tensors parameters)
      : Optimizer(std::move(parameters), std::make_unique<SummingOptimizerOptions>()) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(closure);
    int param_index = 0;
    for (auto& group : param_groups_) {
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined() || !parameter.requires_grad()) continue;
        if (param_index++ == throw_at) throw std::runtime_error("stop");
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) {
          state = std::make_unique<SummingOptimizerState>();
          static_cast<SummingOptimizerState&>(*state).sum = torch::zeros_like(parameter);
        }
        parameter -= static_cast<SummingOptimizerState&>(*state).sum.add_(parameter.grad());
      }
    }
    return {};
  }
  int throw_at = -1;
};

TEST(MasterWeights, StepsCustomOptimizer) {
  const auto x = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  SummingOptimizer inner({x});
  MasterWeights optimizer(inner);
  GradScaler scaler = make_silent_scaler();
  for (int step = 0; step < 3; ++step) {
    x.mutable_grad() = torch::full_like(x, kScale);
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(x[0].item<float>(), -6.0F);
  const auto& state = get_param_state<SummingOptimizerState>(inner, x);
  EXPECT_EQ(state.sum.scalar_type(), torch::kFloat);
}

TEST(MasterWeights, ThrowingInnerStepRestoresParams) {
  const Tensors all{torch::zeros({2}, torch::kHalf).requires_grad_(),
                    torch::zeros({2}).requires_grad_(),
                    torch::zeros({2}, torch::kHalf).requires_grad_()};
  SummingOptimizer inner(all);
  MasterWeights optimizer(inner);
  GradScaler scaler = make_silent_scaler();
  const auto set_gradients = [&] {
    for (const auto& x : all) x.mutable_grad() = torch::full_like(x, kScale);
  };
  set_gradients();
  const Tensors gradients{all[0].grad(), all[1].grad(), all[2].grad()};
  inner.throw_at = 2;
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(inner.param_groups()[0].params()[i].is_same(all[i])) << i;
    EXPECT_TRUE(all[i].grad().is_same(gradients[i])) << i;
    EXPECT_EQ(all[i].grad()[0].item<float>(), kScale) << i;
    EXPECT_EQ(inner.state().count(all[i].unsafeGetTensorImpl()), i < 2 ? 1U : 0U) << i;
    EXPECT_EQ(all[i][0].item<float>(), i < 2 ? -1.0F : 0.0F) << i;
  }
  EXPECT_EQ(inner.state().size(), 2U);
  EXPECT_EQ(optimizer.applied_steps(), 0);
  const Tensors masters = master_params(optimizer);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(masters[i].grad().is_same(all[i].grad())) << i;
  }
  inner.throw_at = -1;
  EXPECT_TRUE(scaler.step(optimizer).applied()) << "the failed step can be repeated";
  EXPECT_EQ(all[0][0].item<float>(), -3.0F);
  EXPECT_EQ(all[2][0].item<float>(), -1.0F);
}

TEST(MasterWeights, ThrowsForUnsupportedOptimizer) {
  const auto construction_error = [](Optimizer&& inner) {
    return test_support::message_of([&] { MasterWeights optimizer(inner); });
  };
  const auto x = torch::zeros({4}, torch::kHalf).requires_grad_();
  const auto part = x.detach().slice(0, 1, 3).requires_grad_();
  EXPECT_THAT(construction_error(torch::optim::LBFGS({x})),
              HasSubstr("MasterWeights does not support torch::optim::LBFGS"));
  EXPECT_THAT(construction_error(mezzo::optim::SGD({x}, 0.1)),
              HasSubstr("{.weight_storage = WeightStorage::fp32_master}"));
  EXPECT_THAT(construction_error(torch::optim::SGD({x, part}, 0.1)), HasSubstr("share memory"));
  EXPECT_THAT(construction_error(torch::optim::SGD({x, x}, 0.1)), HasSubstr("appears twice"));
}

TEST(MasterWeights, FollowsModelCast) {
  torch::nn::Linear model(3, 2);
  model->to(torch::kHalf);
  torch::optim::SGD inner(model->parameters(), torch::optim::SGDOptions(1.0));
  MasterWeights optimizer(inner);
  const auto step = [&] {
    for (const auto& one : model->parameters()) one.mutable_grad() = torch::ones_like(one);
    optimizer.step();
  };
  step();
  model->to(torch::kFloat);
  step();
  EXPECT_TRUE(master_params(optimizer)[0].is_same(model->weight));
  model->weight.detach().fill_(7.0);
  model->to(torch::kBFloat16);
  step();
  EXPECT_EQ(master_params(optimizer)[0][0][0].item<float>(), 6.0F);
  EXPECT_EQ(model->weight[1][2].item<float>(), 6.0F);
}

// --- Groups, options and lrs of the inner optimizer.

static_assert(!std::convertible_to<MasterWeights&, Optimizer&>);
static_assert(std::convertible_to<MasterWeights&, mezzo::OptimizerRef>);

torch::Tensor make_float16_parameter() { return torch::zeros({2}, torch::kHalf).requires_grad_(); }

class MasterWeightsInnerOptions : public testing::Test {
 protected:
  void step() {
    for (auto& group : inner_.param_groups()) {
      for (auto& parameter : group.params()) parameter.mutable_grad() = torch::ones_like(parameter);
    }
    masters_.step();
  }

  torch::Tensor parameter_ = make_float16_parameter(), other_ = make_float16_parameter();
  torch::optim::SGD inner_{{parameter_}, SGDOptions(1.0)};
  MasterWeights masters_{inner_};
};

TEST_F(MasterWeightsInnerOptions, ApplyAtNextStep) {
  EXPECT_EQ(&masters_.optimizer(), &inner_);
  EXPECT_EQ(&mezzo::OptimizerRef(masters_).optimizer(), &inner_);
  masters_.optimizer().param_groups()[0].options().set_lr(0.0625);
  EXPECT_EQ(inner_.param_groups()[0].options().get_lr(), 0.0625);
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -0.0625F);
  inner_.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.5));
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -0.5625F);
}

TEST_F(MasterWeightsInnerOptions, FollowRemovedGroups) {
  inner_.add_param_group(OptimizerParamGroup({other_}, std::make_unique<SGDOptions>(2.0)));
  step();
  inner_.param_groups().erase(inner_.param_groups().begin());
  step();
  EXPECT_EQ(parameter_[0].item<float>(), -1.0F);
  EXPECT_EQ(other_[0].item<float>(), -4.0F);
  inner_.param_groups().clear();
  EXPECT_TRUE(mezzo::master_params(masters_).empty());
}

TEST_F(MasterWeightsInnerOptions, FollowMoveAssignment) {
  inner_ = torch::optim::SGD({other_}, SGDOptions(2.0));
  step();
  EXPECT_EQ(other_[0].item<float>(), -2.0F);
}

/// Without options and defaults.
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

TEST(MasterWeights, AcceptsOptimizerWithoutOptions) {
  const auto first = make_float16_parameter(), second = make_float16_parameter(),
             third = make_float16_parameter();
  OptionlessOptimizer inner({first, second});
  MasterWeights masters(inner);
  inner.param_groups().erase(inner.param_groups().begin());
  inner.add_parameters({third});
  third.mutable_grad() = torch::ones_like(third);
  masters.step();
  EXPECT_EQ(third[0].item<float>(), -1.0F);
  EXPECT_EQ(first[0].item<float>(), 0.0F);
}

// --- unscale_ makes unscaled float32 gradients, to be clipped through master_params(optimizer).

constexpr mezzo::optim::WeightStorageOptions kMasters{.weight_storage = WeightStorage::fp32_master};

using OptimizerFactory = std::function<OwnedOptimizer(const Groups&)>;

template <class Optimizer, class Options>
OptimizerFactory make_fused_factory(Options options) {
  return [options](const Groups& groups) {
    return OwnedOptimizer(std::make_unique<Optimizer>(groups, options, kMasters),
                          /*with_masters=*/false);
  };
}

OptimizerFactory make_master_weights_factory(const MakeOptimizer& make) {
  return [make](const Groups& groups) { return OwnedOptimizer(make(groups), true); };
}

std::vector<OptimizerFactory> weight_storage_cases() {
  using namespace mezzo::optim;
  std::vector<OptimizerFactory> all{
      make_fused_factory<AdamW>(AdamWOptions(1e-3).weight_decay(0.1)),
      make_fused_factory<Adam>(AdamOptions(1e-3).amsgrad(true)),
      make_fused_factory<SGD>(mezzo::optim::SGDOptions(1e-2)),
      make_fused_factory<SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)),
      make_fused_factory<Lion>(LionOptions(1e-3))};
  for (const MakeOptimizer& make : torch_optimizers())
    all.push_back(make_master_weights_factory(make));
  return all;
}

/// Runs seven steps, one of which overflows; with `unscales` after unscale_.
template <class Step>
Model train_model(torch::ScalarType dtype, const OptimizerFactory& make, bool unscales,
                  const Step& step) {
  const Model model(dtype, /*has_gaps=*/false);
  const OwnedOptimizer owned = make(model.groups());
  OptimizerRef optimizer = owned.ref();
  GradScaler scaler = make_silent_scaler();
  for (int step_index = 0; step_index < 7; ++step_index) {
    model.set_gradients(step_index, scaler.get_scale());
    if (step_index == 3) model.parameters[2].mutable_grad()[2][1] = kInfinity;
    const auto before = clone_all(model.gradients());
    step(scaler, optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (unscales) continue;
      EXPECT_THAT(model.gradients()[i], BitwiseEqual(before[i])) << i;
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

class MasterWeightsUnscaleDtype : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MasterWeightsUnscaleDtype,
                         testing::Values(torch::kHalf, torch::kBFloat16));

TEST_P(MasterWeightsUnscaleDtype, MatchesOnePassStepBitwise) {
  int optimizer_index = 0;
  for (const OptimizerFactory& make : weight_storage_cases()) {
    const Model one_pass =
        train_model(GetParam(), make, /*unscales=*/false,
                    [](auto& scaler, auto& optimizer) { scaler.step(optimizer); });
    const Model unscaled = train_model(GetParam(), make, true, [](auto& scaler, auto& optimizer) {
      scaler.unscale_(optimizer);
      scaler.step(optimizer);
    });
    EXPECT_THAT(one_pass.parameters, BitwiseEqual(unscaled.parameters))
        << "optimizer " << optimizer_index;
    const Model fresh(GetParam(), /*has_gaps=*/false);
    EXPECT_FALSE(bitwise_equal(fresh.parameters[0], unscaled.parameters[0])) << optimizer_index;
    ++optimizer_index;
  }
}

/// A float16 and a float32 parameter, with masters of mezzo's SGD or of MasterWeights.
class MasterWeightsUnscale : public testing::TestWithParam<bool> {
 protected:
  static OwnedOptimizer make_optimizer(const Tensors& parameters) {
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
  OwnedOptimizer owned_ = make_optimizer({x_, y_});
  OptimizerRef optimizer_ = owned_.ref();
  GradScaler scaler_ = make_silent_scaler();
};
INSTANTIATE_TEST_SUITE_P(Masters, MasterWeightsUnscale, testing::Bool(), [](const auto& one) {
  return one.param ? "FusedOptimizer" : "MasterWeights";
});

TEST_P(MasterWeightsUnscale, GradientsAreFloat32AndOnMasters) {
  set_gradients(3);
  scaler_.unscale_(optimizer_);
  EXPECT_THAT(x_.grad(), BitwiseEqual(torch::full({2}, 3.0F)));
  EXPECT_TRUE(master().grad().is_same(x_.grad()));
  EXPECT_THAT(y_.grad(), BitwiseEqual(torch::full({2}, 3.0F)));
  EXPECT_TRUE(master_params(optimizer_)[1].is_same(y_));
  EXPECT_TRUE(scaler_.step(optimizer_).applied());
  EXPECT_EQ(value(), -3.0F);
  EXPECT_EQ(y_[0].item<float>(), -3.0F);
  EXPECT_THAT(x_.grad(), BitwiseEqual(torch::full({2}, 3.0F)))
      << "a step does not change the gradient";
}

TEST_P(MasterWeightsUnscale, HeldMastersGetCurrentGradients) {
  const Tensors masters = master_params(optimizer_);
  for (const float gradient : {3.0F, 5.0F}) {
    optimizer_.optimizer().zero_grad();
    set_gradients(gradient);
    scaler_.unscale_(optimizer_);
    EXPECT_EQ(masters[0].grad()[0].item<float>(), gradient);
    scaler_.step(optimizer_);
    EXPECT_FALSE(masters[0].grad().defined()) << "the step releases the master's gradient";
    scaler_.update();
  }
  EXPECT_EQ(value(), -8.0F);
}

TEST_P(MasterWeightsUnscale, PreservesGradientsThatUnderflowFloat16) {
  for (const bool unscales_before : {false, true}) {
    GradScaler scaler = make_silent_scaler({.init_scale = 0x1p16});
    x_.mutable_grad() = torch::full({2}, 0x1p-20F).to(torch::kHalf);
    ASSERT_EQ((x_.grad() / 65536)[0].item<float>(), 0.0F);
    if (unscales_before) scaler.unscale_(optimizer_);
    scaler.step(optimizer_);
    EXPECT_EQ(value(), unscales_before ? -0x1p-35F : -0x1p-36F);
  }
}

TEST(GradScalerFloat16Gradients, UnscaleThrowsWithoutMaster) {
  const auto x = torch::zeros({2}, torch::kHalf).requires_grad_();
  x.mutable_grad() = torch::ones_like(x);
  GradScaler scaler = make_silent_scaler();
  mezzo::optim::SGD plain({x}, mezzo::optim::SGDOptions(1.0));
  for (const bool explicitly : {false, true}) {
    EXPECT_THAT([&] { explicitly ? (void)scaler.unscale_(plain) : (void)scaler.step(plain); },
                ThrowsMessage<c10::Error>(HasSubstr("Attempting to unscale FP16 gradients.")));
  }
  mezzo::optim::SGD kept({x}, mezzo::optim::SGDOptions(1.0), kMasters);
  EXPECT_TRUE(scaler.step(kept).applied());
}

TEST(MasterParams, ReturnParamsWithoutMasters) {
  const Model model(torch::kBFloat16, /*has_gaps=*/false);
  torch::optim::SGD theirs(model.groups(), torch::optim::SGDOptions(1.0));
  mezzo::optim::SGD plain(model.groups(), mezzo::optim::SGDOptions(1.0));
  mezzo::optim::SGD stochastic(model.groups(), mezzo::optim::SGDOptions(1.0),
                               {.weight_storage = WeightStorage::stochastic_rounding});
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

TEST(MasterParams, CreatedBeforeFirstStepAndStable) {
  for (const OptimizerFactory& make :
       {weight_storage_cases().front(), weight_storage_cases().back()}) {
    const Model model(torch::kHalf, /*has_gaps=*/false);
    const OwnedOptimizer owned = make(model.groups());
    OptimizerRef optimizer = owned.ref();
    const Tensors before = master_params(optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_THAT(before[i], BitwiseEqual(model.parameters[i].to(torch::kFloat))) << i;
    }
    GradScaler scaler = make_silent_scaler();
    for (int step = 0; step < 3; ++step) {
      model.set_gradients(step);
      scaler.step(optimizer);
      scaler.update();
    }
    const Tensors after = master_params(optimizer);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].is_same(before[i])) << i;
  }
}

// bfloat16 has float32's exponent range: unscaling by a power of two in place is exact.
TEST(MasterParams, ThrowForSplitMaster) {
  const auto x = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  mezzo::optim::SGD split({x}, mezzo::optim::SGDOptions(1.0),
                          {.weight_storage = WeightStorage::split_master});
  EXPECT_THAT([&] { master_params(split); },
              ThrowsMessage<c10::Error>(HasSubstr("has no master tensor; clip with "
                                                  "scaler.step(optimizer, {.max_norm")));
  GradScaler scaler = make_silent_scaler();
  x.mutable_grad() = torch::full_like(x, kScale);
  scaler.unscale_(split);
  EXPECT_EQ(x.grad()[0].item<float>(), 1.0F);
  EXPECT_TRUE(scaler.step(split).applied());
  EXPECT_EQ(x[0].item<float>(), -1.0F);
}

TEST(MasterParams, CreatedEarlySurviveSaveAndLoad) {
  const Model model(torch::kHalf, /*has_gaps=*/false);
  mezzo::optim::AdamW optimizer(model.groups(), 1e-3, kMasters);
  (void)master_params(optimizer);
  const std::string file = test_support::save_to_string(optimizer);
  mezzo::optim::AdamW other(model.groups(), 1e-3, kMasters);
  test_support::load_from_string(other, file);
  model.set_gradients(0, 1.0);
  other.step();
  const Tensors masters = master_params(other);
  EXPECT_THAT(model.parameters[0], BitwiseEqual(masters[0].to(torch::kHalf)));
}

at::Tensor make_weight() { return torch::ones({4}, torch::kBFloat16).set_requires_grad(true); }

struct OptionsWithoutLr : torch::optim::OptimizerOptions {
  double get_lr() const override { return 1; }
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<OptionsWithoutLr>(*this);
  }
};
struct OptimizerWithoutLr : torch::optim::Optimizer {
  explicit OptimizerWithoutLr(const Tensors& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<OptionsWithoutLr>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override { return {}; }
};

TEST(CustomOptimizers, ThrowUnderScheduleWithoutSetLr) {
  const at::Tensor weight = make_weight();
  weight.mutable_grad() = torch::ones_like(weight);
  OptimizerWithoutLr inner({weight});
  mezzo::MasterWeights masters(inner);
  EXPECT_ANY_THROW(masters.set_lr_factors({0.5}));
  EXPECT_TRUE(masters.lr_factors().empty());
  masters.step();
}

// --- Archives: a resumed run is bitwise identical to an uninterrupted one.

void train(const Model& model, MasterWeights& optimizer, int first, int last) {
  GradScaler scaler = make_silent_scaler();
  for (int step = first; step < last; ++step) {
    model.set_gradients(step);
    if (step < 6)
      model.parameters[3].mutable_grad() = torch::Tensor();  // its master is created later
    scaler.step(optimizer, {.max_norm = 2.0});
    scaler.update();
  }
}

class MasterWeightsArchiveDtype : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MasterWeightsArchiveDtype,
                         testing::Values(torch::kHalf, torch::kBFloat16));

TEST_P(MasterWeightsArchiveDtype, ResumesBitwise) {
  for (const MakeOptimizer& make : torch_optimizers()) {
    const Model whole(GetParam());
    const auto whole_inner = make(whole.groups());
    MasterWeights uninterrupted(*whole_inner);
    train(whole, uninterrupted, 0, 5);
    const std::string file = save_to_string(uninterrupted);
    const Tensors values = clone_all(whole.parameters);
    train(whole, uninterrupted, 5, 10);

    const Model resumed(GetParam());
    const auto inner = make(resumed.groups());
    MasterWeights optimizer(*inner);
    train(resumed, optimizer, 20, 22);  // discarded by load
    load_from_string(optimizer, file);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < values.size(); ++i) resumed.parameters[i].copy_(values[i]);
    }
    EXPECT_EQ(optimizer.applied_steps(), 5);
    train(resumed, optimizer, 5, 10);
    EXPECT_THAT(resumed.parameters, BitwiseEqual(whole.parameters));
    EXPECT_THAT(master_params(optimizer), BitwiseEqual(master_params(uninterrupted)));
    EXPECT_EQ(optimizer.applied_steps(), 10);
  }
}

TEST(MasterWeightsArchive, HoldsFloat32Masters) {
  const Model model(torch::kBFloat16);
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights optimizer(inner);
  train(model, optimizer, 0, 8);
  const Tensors masters = clone_all(master_params(optimizer));
  Model half(torch::kHalf);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters.size(); ++i) half.parameters[i].copy_(masters[i]);
  }
  torch::optim::SGD other(half.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights loaded(other);
  load_from_string(loaded, save_to_string(optimizer));
  EXPECT_THAT(master_params(loaded), BitwiseEqual(masters));
}

TEST(MasterWeightsArchive, InnerArchiveMatchesTorch) {
  const Model model(torch::kHalf);
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1).momentum(0.9));
  MasterWeights optimizer(inner);
  train(model, optimizer, 0, 7);
  torch::optim::SGD other(model.groups(), torch::optim::SGDOptions(0.5).momentum(0.9));
  load_from_string(other, save_to_string(inner));
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.1);
  const auto momentum = [&](const torch::optim::SGD& sgd) {
    const auto key = model.parameters[0].unsafeGetTensorImpl();
    return static_cast<torch::optim::SGDParamState&>(*sgd.state().at(key)).momentum_buffer();
  };
  EXPECT_THAT(momentum(other), BitwiseEqual(momentum(inner)));
}

/// Returns the message that `call` throws, and checks that the optimizer is unchanged.
class MasterWeightsInvalidArchive : public testing::Test {
 protected:
  MasterWeightsInvalidArchive() { train(model_, optimizer_, 0, 7); }

  std::string load_error(const std::string& file) {
    const std::string before = save_to_string(optimizer_);
    const Tensors masters = clone_all(master_params(optimizer_));
    const std::string error = test_support::message_of([&] { load_from_string(optimizer_, file); });
    EXPECT_THAT(master_params(optimizer_), BitwiseEqual(masters));
    EXPECT_EQ(optimizer_.applied_steps(), 7);
    EXPECT_EQ(inner_.param_groups()[1].options().get_lr(), 0.1);
    EXPECT_EQ(inner_.state().size(), model_.parameters.size());
    EXPECT_EQ(save_to_string(optimizer_).size(), before.size());
    return error;
  }

  Model model_{torch::kHalf};
  torch::optim::SGD inner_{model_.groups(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  MasterWeights optimizer_{inner_};
};

TEST_F(MasterWeightsInvalidArchive, ThrowsForInnerOptimizerArchive) {
  EXPECT_THAT(load_error(save_to_string(inner_)), HasSubstr("the archive has no masters"));
}

TEST_F(MasterWeightsInvalidArchive, ThrowsForOtherOptimizerClass) {
  torch::optim::Adam adam(model_.groups(), torch::optim::AdamOptions(0.7));
  const MasterWeights other(adam);
  EXPECT_NE(load_error(save_to_string(other)), "no error");
}

TEST_F(MasterWeightsInvalidArchive, ThrowsForOtherGroups) {
  torch::optim::SGD sgd(model_.parameters, torch::optim::SGDOptions(0.7));
  const MasterWeights other(sgd);
  EXPECT_THAT(load_error(save_to_string(other)),
              HasSubstr("a different number of parameter groups"));
}

TEST_F(MasterWeightsInvalidArchive, ThrowsForCastModel) {
  const std::string file = save_to_string(optimizer_);
  model_.parameters[0].mutable_grad() = torch::Tensor();
  model_.parameters[0].set_data(model_.parameters[0].detach().to(torch::kFloat));
  EXPECT_THAT(load_error(file), HasSubstr("cast as it was when it was saved"));
}

TEST_F(MasterWeightsInvalidArchive, ThrowsForMastersOfOtherShape) {
  Model model(torch::kHalf);
  model.parameters[0] = torch::zeros({5, 7}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd(model.groups(), torch::optim::SGDOptions(0.7).momentum(0.9));
  MasterWeights other(sgd);
  train(model, other, 0, 2);
  EXPECT_THAT(load_error(save_to_string(other)),
              HasSubstr("the master float32 [5, 7] on cpu for parameter 0 of group 0"));
}

TEST(MasterWeightsArchive, Float32ModelLoadsFromCheckpoint) {
  const torch::nn::Linear model(2, 2);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  MasterWeights masters(sgd);
  mezzo::TrainingState state;
  state.add("optimizer", masters);
  const test_support::TempDir temp_dir;
  mezzo::save_checkpoint(temp_dir / "checkpoint", state);
  EXPECT_NO_THROW(mezzo::load_checkpoint(temp_dir / "checkpoint", state));
}

}  // namespace
}  // namespace master_weights_test
