// Behaviour of all optimizers: checks of parameters and groups, references, closures and archives.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <concepts>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/message_of.h"

namespace {

using test_support::message_of;
using testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

template <class OptimizerType, class OptionsType>
struct Kind {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
};

template <class Kind>
class ParamGroups : public testing::Test {
 protected:
  static torch::Tensor parameter() { return torch::ones({2, 2}).requires_grad_(); }
  static OptimizerParamGroup group(const typename Kind::Options& options) {
    return {{parameter()}, std::make_unique<typename Kind::Options>(options)};
  }
};

using Kinds = testing::Types<Kind<mezzo::optim::Adam, mezzo::optim::AdamOptions>,
                             Kind<mezzo::optim::AdamW, mezzo::optim::AdamWOptions>,
                             Kind<mezzo::optim::LAMB, mezzo::optim::LAMBOptions>,
                             Kind<mezzo::optim::Lion, mezzo::optim::LionOptions>,
                             Kind<mezzo::optim::SGD, mezzo::optim::SGDOptions>,
                             Kind<mezzo::optim::Muon, mezzo::optim::MuonOptions>,
                             Kind<mezzo::optim::AdamW8bit, mezzo::optim::AdamWOptions>>;
TYPED_TEST_SUITE(ParamGroups, Kinds);

TYPED_TEST(ParamGroups, InvalidOptionThrowsBeforeAdding) {
  using Options = typename TypeParam::Options;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::pair<Options, std::string>> bad;
  for (const auto& [value, text] : {std::pair(-1.0, "-1"), std::pair(kNan, "nan")}) {
    const auto add = [&bad, text = std::string(text)](Options options, const std::string& name) {
      bad.emplace_back(std::move(options), name + " is " + text);
    };
    add(Options(value), "lr");
    add(Options(0.5).weight_decay(value), "weight_decay");
    if constexpr (requires(Options any) { any.eps(1.0); }) add(Options(0.5).eps(value), "eps");
    if constexpr (requires(Options any) { any.momentum(1.0); }) {
      add(Options(0.5).momentum(value), "momentum");
    }
  }
  if constexpr (requires(Options any) { any.betas(); }) {
    for (const double beta : {-0.5, 1.0, 2.0, kNan}) {
      const std::string text = (std::ostringstream() << beta).str();
      bad.emplace_back(Options(0.5).betas({beta, 0.25}), "betas are " + text + " and 0.25");
      bad.emplace_back(Options(0.5).betas({0.25, beta}), "betas are 0.25 and " + text);
    }
  }
  if constexpr (requires(Options any) { any.ns_steps(1); }) {
    bad.emplace_back(Options(0.5).ns_steps(-1),
                     "ns_steps is -1. Number of steps must be less "
                     "than 100 for computational efficiency");
    bad.emplace_back(Options(0.5).ns_steps(100),
                     "ns_steps is 100. Number of steps must be less "
                     "than 100 for computational efficiency");
    bad.emplace_back(Options(0.5).adjust_lr_fn("none"), "function none is not supported");
  }
  if constexpr (requires(Options any) { any.dampening(1); }) {
    bad.emplace_back(Options(0.5).dampening(kNan), "dampening is nan");
    bad.emplace_back(Options(0.5).nesterov(true), "momentum 0 and dampening 0");
    bad.emplace_back(Options(0.5).nesterov(true).momentum(0.5).dampening(0.5),
                     "momentum 0.5 and dampening 0.5");
  }
  if constexpr (std::same_as<typename TypeParam::Optimizer, mezzo::optim::AdamW8bit>) {
    bad.emplace_back(Options(0.5).amsgrad(true), "does not support amsgrad");
  }
  for (const auto& [options, message] : bad) {
    const std::string made =
        message_of([&] { typename TypeParam::Optimizer({this->group(options)}, Options(0.5)); });
    EXPECT_EQ(message_of([&] { optimizer.add_param_group(this->group(options)); }), made);
    EXPECT_THAT(made, HasSubstr(message + "; "));
    EXPECT_EQ(optimizer.param_groups().size(), 1U);
    auto& own = static_cast<Options&>(optimizer.param_groups()[0].options());
    const Options good = std::exchange(own, options);  // between two steps
    const torch::Tensor& weight = optimizer.param_groups()[0].params()[0];
    weight.mutable_grad() = torch::ones({2, 2});
    EXPECT_THAT(message_of([&] { optimizer.step(); }), HasSubstr(message + "; "));
    EXPECT_TRUE(weight.equal(torch::ones({2, 2})));
    if constexpr (requires { typename TypeParam::Optimizer::State; }) {
      std::stringstream file;  // unchecked, as torch's optimizers write it
      torch::serialize::OutputArchive archive;
      torch::optim::serialize<typename TypeParam::Optimizer::State, Options>(archive, optimizer);
      if (std::same_as<Options, mezzo::optim::LionOptions>) {
        archive.write("optimizer_class", c10::IValue("Lion"));
      }
      archive.save_to(file);
      own = good;
      EXPECT_THAT(message_of([&] { torch::load(optimizer, file); }), HasSubstr(message + "; "));
      EXPECT_TRUE(own == good) << "the options are unchanged";
    }
    own = good;
  }
  optimizer.add_param_group(this->group(Options(0.25)));
  ASSERT_EQ(optimizer.param_groups().size(), 2U);
  const torch::Tensor added = optimizer.param_groups().back().params().front();
  added.mutable_grad() = torch::ones({2, 2});
  optimizer.step();
  EXPECT_FALSE(torch::equal(added, torch::ones({2, 2})))
      << "a group added after the exception is trained";
}

TYPED_TEST(ParamGroups, ThrowForOptionsOfOtherClass) {
  using Options = typename TypeParam::Options;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  EXPECT_THAT(message_of([&] {
                optimizer.add_param_group(OptimizerParamGroup(
                    {this->parameter()}, std::make_unique<torch::optim::RMSpropOptions>(0.5)));
              }),
              HasSubstr("the options of parameter group 1 are not "));
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
}

// As in torch: a model that does not register its layers has no parameters.
TYPED_TEST(ParamGroups, ThrowForEmptyParamList) {
  using OptimizerType = typename TypeParam::Optimizer;
  const typename TypeParam::Options options(0.5);
  for (const std::string& error :
       {message_of([&] { OptimizerType(std::vector<torch::Tensor>(), options); }),
        message_of([&] { OptimizerType(std::vector<OptimizerParamGroup>(), options); })}) {
    EXPECT_THAT(error, HasSubstr("optimizer got an empty parameter list"));
    EXPECT_THAT(error, HasSubstr("register_module"));
  }
  // As in torch, one group of several may be empty.
  EXPECT_EQ(message_of([&] {
              OptimizerType({OptimizerParamGroup(std::vector<torch::Tensor>()),
                             OptimizerParamGroup({this->parameter()})},
                            options);
            }),
            "no error");
}

// The deleted overload for pointers, next to OptimizerRef's constructors.
TYPED_TEST(ParamGroups, OptimizerRefRejectsPointer) {
  using OptimizerType = typename TypeParam::Optimizer;
  static_assert(std::is_convertible_v<OptimizerType&, mezzo::OptimizerRef>);
  static_assert(!std::is_convertible_v<OptimizerType*, mezzo::OptimizerRef>);
  static_assert(!std::is_convertible_v<std::unique_ptr<OptimizerType>, mezzo::OptimizerRef>);
  static_assert(!std::is_constructible_v<mezzo::OptimizerRef, std::shared_ptr<OptimizerType>&>);
  OptimizerType optimizer({this->parameter()}, typename TypeParam::Options(0.5));
  EXPECT_EQ(&mezzo::OptimizerRef(optimizer).optimizer(), &optimizer);
}

TYPED_TEST(ParamGroups, ThrowForDuplicateOrOverlappingParams) {
  using OptimizerType = typename TypeParam::Optimizer;
  const typename TypeParam::Options options(0.5);
  const torch::Tensor x = this->parameter(), same_memory = x.detach().requires_grad_();
  EXPECT_THAT(message_of([&] { OptimizerType({x, x}, options); }), HasSubstr("appears twice"));
  EXPECT_THAT(message_of([&] {
                OptimizerType({x, same_memory}, options);
              }),
              HasSubstr("parameter 0 of group 0 (float32 [2, 2] on cpu) and parameter 1 of group 0 "
                        "(float32 [2, 2] on cpu) share memory"));
  OptimizerType optimizer({x}, options);
  x.mutable_grad() = torch::ones({2, 2});
  EXPECT_THAT(message_of([&] {
                optimizer.add_param_group(OptimizerParamGroup({x}));
                optimizer.step();
              }),
              HasSubstr("appears twice"));
  EXPECT_TRUE(x.equal(torch::ones({2, 2})));
}

// torch::optim::Optimizer::add_param_group is not virtual.
TYPED_TEST(ParamGroups, StepChecksGroupsAddedThroughBase) {
  using Options = typename TypeParam::Options;
  const torch::Tensor first = this->parameter();
  for (const bool is_duplicate : {true, false}) {
    typename TypeParam::Optimizer optimizer(std::vector<torch::Tensor>{first}, Options(0.1));
    const torch::Tensor second =
        is_duplicate ? first : torch::ones({2}).requires_grad_();  // Muon supports matrices only
    if (!is_duplicate && !std::is_same_v<Options, mezzo::optim::MuonOptions>) continue;
    static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(
        OptimizerParamGroup(std::vector<torch::Tensor>{second}));
    for (const auto& each : {first, second}) each.mutable_grad() = torch::ones_like(each);
    EXPECT_THAT(message_of([&] { optimizer.step(); }),
                HasSubstr(is_duplicate ? "appears twice" : "Muon only supports 2D parameters"));
    EXPECT_TRUE(torch::equal(first, torch::ones({2, 2})));
  }
}

TYPED_TEST(ParamGroups, StepReturnsClosureLoss) {
  const torch::Tensor x = this->parameter();
  typename TypeParam::Optimizer optimizer({x}, typename TypeParam::Options(0.5));
  int calls = 0;
  const torch::NoGradGuard no_grad;
  const torch::Tensor loss = optimizer.step([&] {
    ++calls;
    torch::Tensor value = x.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<float>(), 4.0F);
  EXPECT_FALSE(x.equal(torch::ones({2, 2})));
}

/// Options that differ from the defaults.
template <class Kind>
typename Kind::Options unusual_options() {
  typename Kind::Options options(0.0625);
  options.weight_decay(0.25);
  if constexpr (requires { options.betas({0.75, 0.875}).eps(0.125); }) {
    options.betas({0.75, 0.875}).eps(0.125);
  } else if constexpr (requires { options.betas(); }) {
    options.betas({0.75, 0.875});
  }
  if constexpr (requires { options.momentum(0.75).nesterov(true); }) options.momentum(0.75);
  if constexpr (requires { options.dampening(0); }) options.nesterov(true);
  if constexpr (requires { options.ns_steps(3); }) {
    options.nesterov(false).ns_steps(3).adjust_lr_fn("match_rms_adamw");
  }
  if constexpr (requires { options.use_nvlamb(true); }) {
    options.bias_correction(false).use_nvlamb(true);
  }
  const bool has_amsgrad = !std::same_as<typename Kind::Optimizer, mezzo::optim::AdamW8bit>;
  if constexpr (requires { options.amsgrad(true); }) options.amsgrad(has_amsgrad);
  return options;
}

TYPED_TEST(ParamGroups, ResumeBitwiseFromArchive) {
  using OptimizerType = typename TypeParam::Optimizer;
  torch::manual_seed(1);
  const torch::Tensor x = torch::randn({64, 80}), y = torch::empty({64, 80});
  OptimizerType optimizer({x}, unusual_options<TypeParam>());
  const auto step = [](OptimizerType& one, const torch::Tensor& parameter, int number) {
    torch::manual_seed(static_cast<uint64_t>(number));
    parameter.mutable_grad() = torch::randn({64, 80});
    one.step();
  };
  for (int i = 0; i < 3; ++i) step(optimizer, x, i);
  std::stringstream file;
  torch::save(optimizer, file);
  y.copy_(x);
  OptimizerType resumed({y}, typename TypeParam::Options(1.0));
  torch::load(resumed, file);
  EXPECT_TRUE(static_cast<typename TypeParam::Options&>(resumed.param_groups()[0].options()) ==
              unusual_options<TypeParam>());
  for (int i = 3; i < 6; ++i) {
    step(optimizer, x, i);
    step(resumed, y, i);
  }
  EXPECT_THAT(y, test_support::BitwiseEqual(x));
}

// torch finds a state by its parameter's address, which a later tensor may reuse. Fused optimizers
// detect that; torch's do not.
TYPED_TEST(ParamGroups, ReplacedParamDropsState) {
  using Options = typename TypeParam::Options;
  if (!std::derived_from<typename TypeParam::Optimizer, mezzo::optim::MixedPrecisionOptimizer>)
    return;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  torch::Tensor& place = optimizer.param_groups()[0].params()[0];
  torch::Tensor first_step;
  for (int i = 0; i < 8; ++i) {
    place = torch::Tensor();
    place = this->parameter();
    place.mutable_grad() = torch::ones({2, 2});
    optimizer.step();
    if (i == 0) first_step = place.detach().clone();
    EXPECT_TRUE(place.equal(first_step)) << "of parameter " << i;
    EXPECT_LE(optimizer.state().size(), 2U);
    place.mutable_grad() =
        torch::full({2, 2}, 64.0);  // moments that the next parameter would inherit
    optimizer.step();
    EXPECT_LE(optimizer.state().size(), 1U) << "the state of a destroyed parameter is erased";
    std::stringstream file;  // loaded states expire too
    torch::save(optimizer, file);
    torch::load(optimizer, file);
  }
}

// A plan must not use a state that it then erases with the original parameter.
TYPED_TEST(ParamGroups, PreservesMovedState) {
  using Options = typename TypeParam::Options;
  if (!std::derived_from<typename TypeParam::Optimizer, mezzo::optim::MixedPrecisionOptimizer>)
    return;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  typename TypeParam::Optimizer twin({this->parameter()}, Options(0.5));
  const auto step = [&](float gradient) {
    for (auto* const one : {&optimizer, &twin}) {
      one->param_groups()[0].params()[0].mutable_grad() = torch::full({2, 2}, gradient);
      one->step();
    }
  };
  step(64);
  if (optimizer.state().empty()) return;
  torch::Tensor& place = optimizer.param_groups()[0].params()[0];
  const torch::Tensor replacement = place.detach().clone().requires_grad_();
  auto& states = optimizer.state();
  auto state = std::move(states.at(place.unsafeGetTensorImpl()));
  states.erase(place.unsafeGetTensorImpl());
  states[replacement.unsafeGetTensorImpl()] = std::move(state);
  place = replacement;
  optimizer.add_param_group(OptimizerParamGroup({this->parameter()}));  // triggers check_parameters
  step(1);
  step(1);
  EXPECT_TRUE(replacement.equal(twin.param_groups()[0].params()[0]));
}

}  // namespace
