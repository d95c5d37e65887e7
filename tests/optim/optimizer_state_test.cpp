// Optimizer states that steps do not produce: another layout, dtype or parameter, from an archive,
// or of a cast parameter. Each test compares two runs: states with equal values give bitwise
// identical steps.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/get_param_state.h"
#include "../support/message_of.h"
#include "../support/owned_optimizer.h"
#include "../support/save_to_string.h"
#include "../support/weight_storage_cases.h"

namespace optimizer_state_test {
namespace {

using mezzo::optim::WeightStorage;
using test_support::BitwiseEqual;
using test_support::message_of;
using test_support::OwnedOptimizer;
using testing::HasSubstr;
using torch::Tensor;
namespace mo = mezzo::optim;
namespace to = torch::optim;

/// An optimizer and the dtype of its parameters.
struct OptimizerCase {
  std::string name;
  torch::ScalarType dtype;
  std::function<OwnedOptimizer(const std::vector<Tensor>&)> make;
};

template <class Optimizer, class Options>
OptimizerCase fused(const std::string& name, Options options, torch::ScalarType dtype,
                    WeightStorage storage = WeightStorage::plain) {
  return {name, dtype, [=](const std::vector<Tensor>& parameters) {
            const mo::WeightStorageOptions weights{.weight_storage = storage};
            return OwnedOptimizer(std::make_unique<Optimizer>(parameters, options, weights), false);
          }};
}
template <class Optimizer, class Options>
OptimizerCase torch_like(const std::string& name, Options options, bool with_masters) {
  return {name + (with_masters ? " with MasterWeights" : ""),
          with_masters ? torch::kBFloat16 : torch::kFloat,
          [=](const std::vector<Tensor>& parameters) {
            return OwnedOptimizer(std::make_unique<Optimizer>(parameters, options), with_masters);
          }};
}

std::vector<OptimizerCase> optimizer_cases() {
  using enum WeightStorage;
  const auto adamw = mo::AdamWOptions(0.05).amsgrad(true);
  const auto adam = mo::AdamOptions(0.05).amsgrad(true);
  const auto sgd = mo::SGDOptions(0.5).momentum(0.75);
  const auto rmsprop = to::RMSpropOptions(0.05).centered(true).momentum(0.75);
  return {
      fused<mo::AdamW>("AdamW", adamw, torch::kFloat),
      fused<mo::AdamW>("AdamW, plain bfloat16", adamw, torch::kBFloat16),
      fused<mo::AdamW>("AdamW, stochastic", adamw, torch::kBFloat16, stochastic_rounding),
      fused<mo::AdamW>("AdamW, master", adamw, torch::kBFloat16, fp32_master),
      fused<mo::AdamW>("AdamW, split master", adamw, torch::kBFloat16, split_master),
      fused<mo::Adam>("Adam", adam, torch::kFloat),
      fused<mo::Adam>("Adam, master of float16", adam, torch::kHalf, fp32_master),
      fused<mo::SGD>("SGD", sgd, torch::kFloat),
      fused<mo::SGD>("SGD, master", sgd, torch::kBFloat16, fp32_master),
      fused<mo::SGD>("SGD, split master", sgd, torch::kBFloat16, split_master),
      fused<mo::Lion>("Lion", mo::LionOptions(0.05), torch::kFloat),
      fused<mo::Lion>("Lion, split master", mo::LionOptions(0.05), torch::kBFloat16, split_master),
      torch_like<mo::LAMB>("LAMB", mo::LAMBOptions(0.05), false),
      torch_like<mo::LAMB>("LAMB", mo::LAMBOptions(0.05), true),
      torch_like<mo::Muon>("Muon", mo::MuonOptions(0.05), false),
      torch_like<mo::Muon>("Muon", mo::MuonOptions(0.05), true),
      torch_like<to::SGD>("torch SGD", to::SGDOptions(0.5).momentum(0.75), true),
      torch_like<to::Adam>("torch Adam", to::AdamOptions(0.05).amsgrad(true), true),
      torch_like<to::AdamW>("torch AdamW", to::AdamWOptions(0.05).amsgrad(true), true),
      torch_like<to::RMSprop>("torch RMSprop", rmsprop, true),
      torch_like<to::Adagrad>("torch Adagrad", to::AdagradOptions(0.05), true)};
}

/// Returns the tensors of any optimizer's state.
std::vector<Tensor*> get_tensors(to::OptimizerParamState& state) {
  std::vector<Tensor*> all;
  if (auto* const kept = dynamic_cast<mezzo::detail::FusedParamStateBase*>(&state)) {
    all = {&kept->master, &kept->low_bits};
  }
  if (auto* const adam = dynamic_cast<to::AdamParamState*>(&state)) {
    all.insert(all.end(), {&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()});
  } else if (auto* const adamw = dynamic_cast<to::AdamWParamState*>(&state)) {
    all.insert(all.end(), {&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()});
  } else if (auto* const sgd = dynamic_cast<to::SGDParamState*>(&state)) {
    all.push_back(&sgd->momentum_buffer());
  } else if (auto* const lion = dynamic_cast<mo::LionParamState*>(&state)) {
    all.push_back(&lion->exp_avg());
  } else if (auto* const rmsprop = dynamic_cast<to::RMSpropParamState*>(&state)) {
    all.insert(all.end(),
               {&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (auto* const adagrad = dynamic_cast<to::AdagradParamState*>(&state)) {
    all.push_back(&adagrad->sum());
  }
  std::erase_if(all, [](const Tensor* one) { return !one->defined(); });
  return all;
}

/// A column-major matrix and its optimizer.
struct MatrixRun {
  explicit MatrixRun(const OptimizerCase& of) : owned(of.make({make_weight(of.dtype)})) {}
  static Tensor make_weight(torch::ScalarType dtype) {
    torch::manual_seed(1);
    return torch::randn({6, 4}).t().to(dtype).requires_grad_();
  }
  const Tensor& weight() const { return owned.inner->param_groups()[0].params()[0]; }
  void steps(int first, int last) const {
    for (int i = first; i < last; ++i) {
      torch::manual_seed(10 + i);
      const Tensor gradient = torch::randn({6, 4}).t().to(torch::kBFloat16);
      weight().mutable_grad() = gradient.to(weight().grad_dtype().value_or(weight().scalar_type()));
      (void)owned.ref().step();
    }
  }
  to::OptimizerParamState& state() const {
    return *owned.inner->state().at(weight().unsafeGetTensorImpl());
  }

  OwnedOptimizer owned;
};

/// Returns two forms of equal values for the states of two runs.
using Form = std::function<std::pair<Tensor, Tensor>(const Tensor&)>;

void expect_same_steps(const std::string& form_name, const Form& form, bool only_fused = false) {
  for (const OptimizerCase& one : optimizer_cases()) {
    SCOPED_TRACE(one.name + ", " + form_name);
    const MatrixRun first(one), second(one);
    first.steps(0, 2);
    second.steps(0, 2);
    const bool is_fused =
        dynamic_cast<mezzo::detail::FusedParamStateBase*>(&first.state()) != nullptr;
    if (only_fused && !is_fused) continue;
    const auto of_first = get_tensors(first.state()), of_second = get_tensors(second.state());
    ASSERT_FALSE(of_first.empty());
    for (std::size_t i = 0; i < of_first.size(); ++i) {
      auto [left, right] = form(*of_first[i]);
      *of_first[i] = left;
      *of_second[i] = right.is_alias_of(left) ? right.clone() : right;
    }
    first.steps(2, 5);
    second.steps(2, 5);
    EXPECT_THAT(second.weight(), BitwiseEqual(first.weight()));
  }
}

TEST(OptimizerState, OtherStridesTrainIdentically) {
  expect_same_steps("row by row",
                    [](const Tensor& one) { return std::pair(one, one.contiguous()); });
  expect_same_steps("with gaps", [](const Tensor& one) {
    return std::pair(one, torch::stack({one, one}, 2).select(2, 0));
  });
  const auto negative = [](const Tensor& one) {
    return std::pair(one, one.scalar_type() == torch::kShort ? one : torch::_neg_view(one.neg()));
  };
  expect_same_steps("negative by a bit", negative, /*only_fused=*/true);
}

TEST(OptimizerState, OtherDtypeTrainsIdentically) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    expect_same_steps(c10::toString(dtype), [dtype](const Tensor& one) {
      if (one.scalar_type() == torch::kShort) return std::pair(one, one);
      return std::pair(one.to(dtype).to(one.scalar_type()), one.to(dtype));
    });
  }
}

TEST(OptimizerState, PreservedForGradientsOfOtherDtype) {
  for (const OptimizerCase& one : optimizer_cases()) {
    if (one.dtype == torch::kFloat) continue;
    SCOPED_TRACE(one.name);
    const MatrixRun run(one), twin(one);
    twin.weight().mutable_grad() = Tensor();
    mezzo::accumulate_in_float({twin.weight()});
    run.steps(0, 2);
    twin.steps(0, 2);
    EXPECT_THAT(twin.weight(), BitwiseEqual(run.weight())) << "float32 gradients of equal value";
    run.weight().mutable_grad() = Tensor();
    mezzo::accumulate_in_float({run.weight()});  // in the middle of a run
    run.steps(2, 4);
    twin.steps(2, 4);
    EXPECT_THAT(twin.weight(), BitwiseEqual(run.weight()));
  }
}

// --- Copied states, destroyed and cast parameters ----------------------------------------------

/// A fused optimizer with moments.
template <class OptimizerType>
class FusedOptimizerState : public testing::Test {
 protected:
  static typename OptimizerType::Options options() {
    typename OptimizerType::Options options(0.5);
    if constexpr (requires { options.momentum(0.75); }) options.momentum(0.75);
    return options;
  }
};
using FusedOptimizers = testing::Types<mo::Adam, mo::AdamW, mo::SGD, mo::Lion>;
TYPED_TEST_SUITE(FusedOptimizerState, FusedOptimizers);

TYPED_TEST(FusedOptimizerState, CopyOutlivesParam) {
  using State = typename TypeParam::State;
  const auto weight = [] { return torch::ones({3}).requires_grad_(); };
  for (const std::string way : {"clone", "copy construction", "assignment"}) {
    SCOPED_TRACE(way);
    auto source = std::make_unique<TypeParam>(std::vector{weight()}, this->options());
    const Tensor& first = source->param_groups()[0].params()[0];
    first.mutable_grad() = torch::ones({3});
    source->step();
    const Tensor second = weight();
    TypeParam optimizer({second}, this->options());
    auto& of_first = test_support::get_param_state<State>(*source, first);
    auto& copy = optimizer.state()[second.unsafeGetTensorImpl()];
    copy = way == "clone"               ? of_first.clone()
           : way == "copy construction" ? std::make_unique<State>(of_first)
                                        : std::make_unique<State>();
    if (way == "assignment") static_cast<State&>(*copy) = of_first;
    source.reset();  // and the first parameter with it
    optimizer.add_param_group(to::OptimizerParamGroup({weight()}));
    second.mutable_grad() = torch::zeros({3});
    optimizer.step();
    EXPECT_FALSE(second.equal(torch::ones({3}))) << "momentum updates it despite the zero gradient";
    EXPECT_EQ(test_support::get_param_state<State>(optimizer, second).step(), 2);
  }
}

TYPED_TEST(FusedOptimizerState, CopyCountsIndependently) {
  using State = typename TypeParam::State;
  State state;
  state.step_count().move_to(torch::full({}, 3.0F));  // as if a device counted
  State copy(state), assigned;
  assigned = state;
  for (State* const one : {&copy, &assigned}) {  // clone() makes the first
    one->step(7);
    EXPECT_EQ(state.step(), 3);
  }
}

TYPED_TEST(FusedOptimizerState, CastParamDropsMaster) {
  for (const auto storage : {WeightStorage::fp32_master, WeightStorage::split_master}) {
    {
      const Tensor weight = torch::ones({3}, torch::kBFloat16).requires_grad_();
      TypeParam optimizer({weight}, this->options(), {.weight_storage = storage});
      const auto step = [&](double gradient) {
        weight.mutable_grad() = torch::full_like(weight.detach(), gradient);
        optimizer.step();
      };
      step(0.01);
      weight.mutable_grad() = Tensor();
      weight.set_data(weight.detach().to(torch::kFloat));
      step(0.01);
      auto& state = test_support::get_param_state<typename TypeParam::State>(optimizer, weight);
      EXPECT_FALSE(state.master().defined()) << "a float32 weight has none";
      EXPECT_FALSE(state.low_bits().defined()) << "a float32 weight has none";
    }
  }
}

TYPED_TEST(FusedOptimizerState, ThrowsForStateOfOtherClass) {
  const Tensor weight = torch::ones({3}).requires_grad_();
  TypeParam optimizer({weight}, this->options());
  optimizer.state()[weight.unsafeGetTensorImpl()] = std::make_unique<to::RMSpropParamState>();
  weight.mutable_grad() = torch::ones({3});
  EXPECT_THAT(message_of([&] { optimizer.step(); }),
              HasSubstr("the state of parameter 0 of group 0 (float32 [3] on cpu) is not a mezzo"));
  EXPECT_TRUE(weight.equal(torch::ones({3})));
}

TYPED_TEST(FusedOptimizerState, ThrowsForStateOfOtherShape) {
  using State = typename TypeParam::State;
  const Tensor weight = torch::ones({3}, torch::kBFloat16).requires_grad_();
  weight.mutable_grad() = torch::ones({3}, torch::kBFloat16);
  const Tensor first = torch::ones({3}).requires_grad_();
  TypeParam optimizer({first, weight}, this->options(),
                      {.weight_storage = WeightStorage::fp32_master});
  optimizer.step();
  first.mutable_grad() = torch::ones({3});
  const Tensor before = weight.detach().clone();
  auto& state = test_support::get_param_state<State>(optimizer, weight);
  std::vector<Tensor*> tensors{&state.master()};
  for (std::size_t k = 0; k < State::kMoments.size(); ++k) {
    Tensor& moment = state.moment(static_cast<int>(k));
    if (moment.defined()) tensors.push_back(&moment);
  }
  for (Tensor* const tensor : tensors) {
    const Tensor good = std::exchange(*tensor, torch::zeros({4}));
    EXPECT_THAT(message_of([&] { optimizer.step(); }), HasSubstr("of the shape [4]"));
    EXPECT_THAT(weight, BitwiseEqual(before));
    TypeParam loader({first, weight}, this->options());
    EXPECT_THAT(message_of([&] {
                  test_support::load_from_string(loader, test_support::save_to_string(optimizer));
                }),
                HasSubstr("of the shape [4]"));
    EXPECT_TRUE(loader.state().empty());
    EXPECT_EQ(optimizer.state().size(), 1U) << "no state is created for the first parameter";
    *tensor = good;
  }
  EXPECT_EQ(message_of([&] { optimizer.step(); }), "no error");
}

TEST(AdamWState, TorchArchiveSetsHighestParamStep) {
  for (const std::size_t stepped : {0U, 1U}) {
    const std::vector<Tensor> weights{torch::ones({3}), torch::ones({3})};
    to::AdamW theirs(weights);
    for (int i = 0; i < 3; ++i) {
      for (const Tensor& weight : weights) weight.mutable_grad() = torch::ones({3});
      if (i > 0) weights[1 - stepped].mutable_grad() = Tensor();
      theirs.step();
    }
    mo::AdamW ours(weights);
    test_support::load_from_string(ours, test_support::save_to_string(theirs));
    EXPECT_EQ(ours.applied_steps(), 3);
  }
}

TEST(SgdState, ThrowsForLateDampening) {
  const Tensor weight = torch::ones({3}, torch::kBFloat16).requires_grad_();
  weight.mutable_grad() = torch::ones({3}, torch::kBFloat16);
  // With masters a state remembers steps without momentum.
  mo::SGD optimizer({weight}, mo::SGDOptions(0.5), {.weight_storage = WeightStorage::fp32_master});
  optimizer.step();
  auto& options = static_cast<mo::SGDOptions&>(optimizer.param_groups()[0].options());
  options.momentum(0.5).dampening(0.25);
  const Tensor before = weight.detach().clone();
  EXPECT_THAT(message_of([&] { optimizer.step(); }),
              HasSubstr("momentum with dampening was enabled after parameter 0 of group 0"));
  EXPECT_THAT(weight, BitwiseEqual(before));
  options.dampening(0);
  EXPECT_EQ(message_of([&] { optimizer.step(); }), "no error");
}

// --- Weights written after a load --------------------------------------------------------------

TEST(LoadedMasters, ExternalWriteAfterLoadReplacesMaster) {
  for (const test_support::WeightStorageCase& storage_case : test_support::weight_storage_cases()) {
    SCOPED_TRACE(storage_case.name);
    const auto step = [](const OwnedOptimizer& optimizer, const Tensor& weight, double gradient) {
      weight.mutable_grad() = torch::full_like(weight.detach(), gradient);
      (void)optimizer.ref().step();
    };
    const Tensor weight = torch::linspace(1, 2, 65).to(storage_case.dtype).requires_grad_();
    const OwnedOptimizer saver = storage_case.make({weight});
    step(saver, weight, 0x1.8p-10);  // sets low bits
    mezzo::OptimizerRef saved = saver.ref();
    const std::string file = test_support::save_to_string(saved);
    const Tensor fresh = torch::linspace(4, 3, 65).to(storage_case.dtype).requires_grad_();
    const OwnedOptimizer loader = storage_case.make({weight}), twin = storage_case.make({fresh});
    mezzo::OptimizerRef loaded = loader.ref();
    test_support::load_from_string(loaded, file);
    {
      const torch::NoGradGuard no_grad;
      Tensor(weight).copy_(fresh);
    }
    for (int i = 0; i < 64; ++i) {  // stale low bits would change the rounding
      step(loader, weight, 0x1p-11);
      step(twin, fresh, 0x1p-11);
      ASSERT_THAT(weight, BitwiseEqual(fresh)) << "after step " << i;
    }
  }
}

}  // namespace
}  // namespace optimizer_state_test
