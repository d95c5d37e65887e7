// Code for torch::optim optimizers with mezzo's of the same name: casts of options and states,
// schedulers, archives, param groups.
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/get_param_state.h"
#include "../support/warning_recorder.h"

namespace {

using mezzo::optim::WeightStorage;
using test_support::get_param_state;
using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

template <class MezzoOptimizer, class MezzoState, class TorchOptimizer, class TorchOptions,
          class StateOfTorch>
struct OptimizerTypes {
  using Ours = MezzoOptimizer;
  using OurState = MezzoState;
  using Theirs = TorchOptimizer;
  using Options = TorchOptions;
  using State = StateOfTorch;
};

/// Options with state: SGD needs momentum.
template <class Options>
Options make_options(double lr) {
  Options options(lr);
  if constexpr (std::is_base_of_v<torch::optim::SGDOptions, Options>) {
    options.momentum(0.9);
  } else {
    options.amsgrad(true);
  }
  return options;
}

template <class State>
std::vector<torch::Tensor*> get_tensors(State& state) {
  if constexpr (std::is_base_of_v<torch::optim::SGDParamState, State>) {
    return {&state.momentum_buffer()};
  } else {
    return {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  }
}

torch::Tensor make_parameter(int seed) {
  torch::manual_seed(static_cast<uint64_t>(seed));
  return torch::randn({13, 3}, torch::kDouble).requires_grad_();
}

void step_with_same_gradient(torch::optim::Optimizer& ours, torch::optim::Optimizer& theirs) {
  for (std::size_t group = 0; group < ours.param_groups().size(); ++group) {
    const auto& left = ours.param_groups()[group].params();
    const auto& right = theirs.param_groups()[group].params();
    for (std::size_t i = 0; i < left.size(); ++i) {
      left[i].mutable_grad() = torch::randn_like(left[i]);
      right[i].mutable_grad() = left[i].grad().clone();
    }
  }
  ours.step();
  theirs.step();
}

template <class Kind>
class TorchCompatibility : public testing::Test {
 protected:
  static auto& get_options(torch::optim::Optimizer& optimizer, std::size_t group = 0) {
    return static_cast<typename Kind::Options&>(optimizer.param_groups()[group].options());
  }

  void step(int steps = 1) {
    for (int i = 0; i < steps; ++i) step_with_same_gradient(ours_, theirs_);
  }

  double difference() const {
    return (our_parameter_ - their_parameter_).abs().max().template item<double>();
  }

  torch::Tensor our_parameter_ = make_parameter(1);
  torch::Tensor their_parameter_ = make_parameter(1);
  typename Kind::Ours ours_{{our_parameter_}, make_options<typename Kind::Options>(1e-2)};
  typename Kind::Theirs theirs_{{their_parameter_}, make_options<typename Kind::Options>(1e-2)};
};

using AllOptimizers = testing::Types<
    OptimizerTypes<mezzo::optim::Adam, mezzo::optim::AdamParamState, torch::optim::Adam,
                   torch::optim::AdamOptions, torch::optim::AdamParamState>,
    OptimizerTypes<mezzo::optim::AdamW, mezzo::optim::AdamWParamState, torch::optim::AdamW,
                   torch::optim::AdamWOptions, torch::optim::AdamWParamState>,
    OptimizerTypes<mezzo::optim::SGD, mezzo::optim::SGDParamState, torch::optim::SGD,
                   torch::optim::SGDOptions, torch::optim::SGDParamState>>;
TYPED_TEST_SUITE(TorchCompatibility, AllOptimizers);

TYPED_TEST(TorchCompatibility, LrSetByStaticCastApplies) {
  for (int i = 0; i < 4; ++i) {
    for (torch::optim::Optimizer* optimizer :
         {static_cast<torch::optim::Optimizer*>(&this->ours_),
          static_cast<torch::optim::Optimizer*>(&this->theirs_)}) {
      for (auto& group : optimizer->param_groups()) {
        auto& options = static_cast<typename TypeParam::Options&>(group.options());
        options.lr(options.lr() * 0.5);
      }
    }
    this->step();
  }
  auto& options =
      dynamic_cast<typename TypeParam::Options&>(this->ours_.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 1e-2 / 16);
  EXPECT_EQ(options.get_lr(), 1e-2 / 16);
  EXPECT_LT(this->difference(), 1e-12);
}

TYPED_TEST(TorchCompatibility, DefaultsApplyToLaterGroups) {
  static_cast<typename TypeParam::Options&>(this->ours_.defaults()).lr(0.5);
  this->ours_.add_param_group(OptimizerParamGroup(std::vector<torch::Tensor>{make_parameter(2)}));
  EXPECT_EQ(this->get_options(this->ours_, 1).lr(), 0.5);
  EXPECT_EQ(this->get_options(this->ours_, 0).lr(), 1e-2);
}

TYPED_TEST(TorchCompatibility, TorchSchedulersSetLr) {
  using Plateau = torch::optim::ReduceLROnPlateauScheduler;
  torch::optim::StepLR our_steps(this->ours_, /*step_size=*/2, /*gamma=*/0.1);
  torch::optim::StepLR their_steps(this->theirs_, 2, 0.1);
  Plateau our_plateau(this->ours_, Plateau::min, /*factor=*/0.5, /*patience=*/1);
  Plateau their_plateau(this->theirs_, Plateau::min, 0.5, 1);
  for (int i = 0; i < 6; ++i) {
    this->step();
    our_steps.step();
    their_steps.step();
    our_plateau.step(1.0F);
    their_plateau.step(1.0F);
  }
  EXPECT_LT(this->get_options(this->ours_).lr(), 1e-4);
  EXPECT_EQ(this->get_options(this->ours_).lr(), this->get_options(this->theirs_).lr());
  EXPECT_LT(this->difference(), 1e-12);
}

TYPED_TEST(TorchCompatibility, GroupsInheritOptionsLikeTorch) {
  using Options = typename TypeParam::Options;
  const auto add = [](torch::optim::Optimizer& optimizer, int seed, auto options) {
    optimizer.add_param_group(
        OptimizerParamGroup({make_parameter(seed)}, std::make_unique<decltype(options)>(options)));
  };
  for (const int seed : {2, 3}) {
    add(this->theirs_, seed, Options(seed * 1e-2));
    add(this->ours_, seed, Options(seed * 1e-2));
  }
  EXPECT_TRUE(this->get_options(this->ours_, 1) == this->get_options(this->theirs_, 1));
  auto& plain = this->get_options(this->ours_, 1);
  this->step(2);
  plain.lr(7e-2);  // a reference to the optimizer's options
  this->get_options(this->theirs_, 1).lr(7e-2);
  this->step(2);
  for (std::size_t group = 0; group < 3; ++group) {
    EXPECT_TRUE(torch::allclose(this->ours_.param_groups()[group].params()[0],
                                this->theirs_.param_groups()[group].params()[0], 0, 1e-12))
        << group;
  }
  std::stringstream our_file, their_file;
  torch::save(this->ours_, our_file);
  torch::save(this->theirs_, their_file);
  torch::load(this->ours_, their_file);
  torch::load(this->theirs_, our_file);
  EXPECT_EQ(&this->get_options(this->ours_, 1), &plain);
  this->step(1);
  EXPECT_TRUE(torch::allclose(this->ours_.param_groups()[1].params()[0],
                              this->theirs_.param_groups()[1].params()[0], 0, 1e-12));
}

TYPED_TEST(TorchCompatibility, LoadPreservesOptionReferences) {
  using Options = typename TypeParam::Options;
  const auto parameter = make_parameter(1);
  constexpr mezzo::optim::WeightStorageOptions kWeights{
      .weight_storage = WeightStorage::fp32_master, .seed = 0xFFFFFFFFFFFFFFF1U};
  std::stringstream file;
  torch::save(typename TypeParam::Ours({parameter}, Options(0.5), kWeights), file);
  typename TypeParam::Ours optimizer({parameter}, Options(1.0));
  const torch::optim::OptimizerOptions& options = optimizer.param_groups()[0].options();
  torch::load(optimizer, file);
  EXPECT_EQ(options.get_lr(), 0.5);
  EXPECT_TRUE(optimizer.weight_storage_options() == kWeights);
  EXPECT_EQ(optimizer.applied_steps(), 0);
  EXPECT_TRUE(optimizer.state().empty());
}

TYPED_TEST(TorchCompatibility, ThrowsForInvalidOptionBeforeWriting) {
  this->step();
  const auto before = this->our_parameter_.detach().clone();
  this->get_options(this->ours_).lr(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT([&] { this->ours_.step(); }, ThrowsMessage<c10::Error>(HasSubstr("lr is")));
  EXPECT_TRUE(torch::equal(this->our_parameter_, before));
  std::stringstream file;
  EXPECT_THAT([&] { torch::save(this->ours_, file); },
              ThrowsMessage<c10::Error>(HasSubstr("lr is")));
  EXPECT_TRUE(file.str().empty());
}

TYPED_TEST(TorchCompatibility, StateReadableThroughTorchClass) {
  this->step(3);
  auto& ours = get_param_state<typename TypeParam::State>(this->ours_, this->our_parameter_);
  auto& theirs = get_param_state<typename TypeParam::State>(this->theirs_, this->their_parameter_);
  EXPECT_NE(dynamic_cast<typename TypeParam::State*>(
                this->ours_.state().at(this->our_parameter_.unsafeGetTensorImpl()).get()),
            nullptr);
  const auto our_tensors = get_tensors(ours);
  const auto their_tensors = get_tensors(theirs);
  for (std::size_t i = 0; i < our_tensors.size(); ++i) {
    ASSERT_TRUE(our_tensors[i]->defined());
    EXPECT_TRUE(torch::allclose(*our_tensors[i], *their_tensors[i], 1e-12, 0));
  }
  if constexpr (requires { ours.step(); }) {
    EXPECT_EQ(ours.step(), 3);
  }
}

TYPED_TEST(TorchCompatibility, StateWritableThroughTorchClass) {
  const auto change_both = [&](auto&& change) {
    change(get_param_state<typename TypeParam::State>(this->ours_, this->our_parameter_));
    change(get_param_state<typename TypeParam::State>(this->theirs_, this->their_parameter_));
    this->step();
    EXPECT_LT(this->difference(), 1e-12);
  };
  this->step(3);
  change_both([](auto& state) { get_tensors(state)[0]->zero_(); });
  change_both([](auto& state) {
    *get_tensors(state)[0] = torch::full({13, 3}, 0.5, torch::kDouble);
  });
  if constexpr (requires(typename TypeParam::State state) { state.step(); }) {
    change_both([](auto& state) { state.step(0); });
    EXPECT_EQ(
        get_param_state<typename TypeParam::OurState>(this->ours_, this->our_parameter_).step(), 1);
  }
}

TYPED_TEST(TorchCompatibility, StateClonesAreComplete) {
  typename TypeParam::OurState state;
  state.step(3).master(torch::ones({2}));
  for (torch::Tensor* tensor : get_tensors(state)) *tensor = torch::ones({2});
  const typename TypeParam::State& as_theirs = state;
  const auto clone = static_cast<const torch::optim::OptimizerParamState&>(as_theirs).clone();
  const auto& copy = dynamic_cast<const typename TypeParam::OurState&>(*clone);
  EXPECT_EQ(copy.step(), 3);
  EXPECT_TRUE(copy.master().defined());
}

TYPED_TEST(TorchCompatibility, StateCopiesCountIndependently) {
  typename TypeParam::OurState state;
  state.step_count().move_to(torch::full({}, 3.0F));
  const auto clone = state.clone();
  auto& cloned = dynamic_cast<typename TypeParam::OurState&>(*clone);
  typename TypeParam::OurState assigned;
  assigned = state;
  cloned.step_count().set_in_place(7);
  assigned.step_count().set_in_place(9);
  EXPECT_EQ(state.step(), 3);
  EXPECT_EQ(cloned.step(), 7);
  EXPECT_EQ(assigned.step(), 9);
}

TEST(MezzoOptions, EqualityComparesAllOptions) {
  using mezzo::optim::LAMBOptions;
  using mezzo::optim::LionOptions;
  EXPECT_TRUE(LAMBOptions(0.5) == LAMBOptions(0.5));
  EXPECT_FALSE(LAMBOptions(0.5) == LAMBOptions(0.5).use_nvlamb(true));
  EXPECT_TRUE(LionOptions(0.5) == LionOptions(0.5));
  EXPECT_FALSE(LionOptions(0.5) == LionOptions(0.25));
}

TEST(MezzoOptions, GroupOptionsApply) {
  const auto options = mezzo::optim::LionOptions(0.5).weight_decay(0.1);
  const auto group = [&options](int seed) {
    return OptimizerParamGroup({make_parameter(seed)},
                               std::make_unique<mezzo::optim::LionOptions>(options));
  };
  mezzo::optim::Lion optimizer(std::vector{group(1)}, mezzo::optim::LionOptions(1e-3));
  optimizer.add_param_group(group(2));
  for (const auto& of_optimizer : optimizer.param_groups()) {
    EXPECT_TRUE(dynamic_cast<const mezzo::optim::LionOptions&>(of_optimizer.options()) == options);
  }
}

TEST(MezzoOptions, ThrowForOptionsOfOtherClass) {
  mezzo::optim::AdamW optimizer({make_parameter(1)});
  const OptimizerParamGroup other_group({make_parameter(2)},
                                        std::make_unique<torch::optim::AdamOptions>(1e-3));
  const auto names_it = ThrowsMessage<c10::Error>(HasSubstr("not mezzo::optim::AdamWOptions"));
  EXPECT_THAT([&] { optimizer.add_param_group(other_group); }, names_it);
#if TORCH_VERSION_MINOR < 12  // newer versions construct options of the optimizer's class
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(other_group);
  EXPECT_THAT([&] { optimizer.step(); }, names_it);
#endif
}

// torch's `step()` is -1 while a device counts, so that a value set through it is recognized.
TEST(FusedParamState, StepSetterWritesDeviceCount) {
  mezzo::optim::AdamWParamState state;
  torch::optim::AdamWParamState& as_theirs = state;
  const auto on_device = torch::full({}, 5.0F);
  state.step(3);
  EXPECT_EQ(state.step(), 3) << "on the host";
  state.step_count().move_to(on_device);
  EXPECT_EQ(state.step(), 5);
  EXPECT_EQ(std::as_const(as_theirs).step(), -1);
  state.step(2);
  EXPECT_EQ(on_device.item<float>(), 2.0F) << "captured graphs count in this tensor";
  as_theirs.step(0);
  EXPECT_EQ(state.step(), 0);
  EXPECT_TRUE(state.step_count().on_device().is_same(on_device)) << "captured graphs write there";
  EXPECT_EQ(on_device.item<float>(), 0.0F);
  EXPECT_THAT([&] { state.step(-1); }, ThrowsMessage<c10::Error>(HasSubstr("has step -1")));
  as_theirs.step(-3);
  EXPECT_THAT([&] { (void)state.step_count().on_device(); },
              ThrowsMessage<c10::Error>(HasSubstr("has step -3")));
}

TEST(FusedParamState, ThrowsForNegativeStep) {
  const auto parameter = make_parameter(1);
  mezzo::optim::AdamW optimizer({parameter});
  parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  const auto before = parameter.detach().clone();
  get_param_state<torch::optim::AdamWParamState>(optimizer, parameter).step(-3);
  EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(HasSubstr("has step -3")));
  EXPECT_TRUE(torch::equal(parameter, before));
}

// --- Equal results, and archives in both directions.

/// Two sets of parameters of several shapes with equal values and gradients.
struct Twins {
  explicit Twins(torch::ScalarType dtype) {
    torch::manual_seed(1);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{17, 9}, {1}, {0}, {30000}, {3, 1, 5}}) {
      const auto values = torch::randn(shape, torch::kDouble).to(dtype);
      ours.push_back(values.clone().requires_grad_());
      theirs.push_back(values.clone().requires_grad_());
    }
  }

  void step(torch::optim::Optimizer& left, torch::optim::Optimizer& right, int steps) const {
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < ours.size(); ++i) {
        ours[i].mutable_grad() = torch::randn(ours[i].sizes(), ours[i].scalar_type());
        theirs[i].mutable_grad() = ours[i].grad().clone();
      }
      left.step();
      right.step();
    }
  }

  double difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      largest = std::max(largest, (ours[i] - theirs[i]).abs().max().item<double>());
    }
    return largest;
  }

  std::vector<torch::Tensor> ours, theirs;
};

template <class Ours, class Theirs, class Options>
void expect_parity(const Options& options) {
  const test_support::WarningRecorder
      warnings;  // an archive of torch::optim::SGD has no step count
  for (const auto& [dtype, tolerance] :
       {std::pair(torch::kFloat, 2e-5), std::pair(torch::kDouble, 1e-13)}) {
    SCOPED_TRACE(dtype);
    const Twins twins(dtype);
    Ours ours(twins.ours, options);
    Theirs theirs(twins.theirs, options);
    twins.step(ours, theirs, 50);
    EXPECT_LT(twins.difference(), tolerance);
    std::stringstream our_file, their_file;
    torch::save(ours, our_file);
    torch::save(theirs, their_file);
    Ours loaded_from_torch(twins.ours, Options(7.0));
    Theirs loaded_from_mezzo(twins.theirs, Options(7.0));
    torch::load(loaded_from_torch, their_file);
    torch::load(loaded_from_mezzo, our_file);
    twins.step(loaded_from_torch, loaded_from_mezzo, 3);
    EXPECT_LT(twins.difference(), tolerance);
  }
}

TEST(TorchOptimizerParity, AdamW) {
  const auto options = AdamWOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-6);
  for (const bool amsgrad : {false, true}) {
    expect_parity<mezzo::optim::AdamW, torch::optim::AdamW>(AdamWOptions(options).amsgrad(amsgrad));
  }
}

TEST(TorchOptimizerParity, Adam) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      expect_parity<mezzo::optim::Adam, torch::optim::Adam>(
          AdamOptions(1e-2).weight_decay(weight_decay).amsgrad(amsgrad));
    }
  }
}

TEST(TorchOptimizerParity, SGD) {
  for (const SGDOptions& options :
       {SGDOptions(1e-2), SGDOptions(1e-2).weight_decay(0.1), SGDOptions(1e-2).momentum(0.9),
        SGDOptions(1e-2).momentum(0.9).dampening(0.5),
        SGDOptions(1e-2).momentum(0.9).weight_decay(0.1),
        SGDOptions(1e-2).momentum(0.9).nesterov(true),
        SGDOptions(1e-2).momentum(0.8).weight_decay(0.1).nesterov(true)}) {
    expect_parity<mezzo::optim::SGD, torch::optim::SGD>(options);
  }
}

TEST(SGD, KeepsNoStateWithoutMomentum) {
  const auto x = torch::ones({3});
  x.mutable_grad() = torch::ones({3});
  mezzo::optim::SGD optimizer({x}, SGDOptions(0.5));
  optimizer.step();
  EXPECT_TRUE(torch::equal(x, torch::full({3}, 0.5)));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(SGD, LateMomentumInitializesBufferLikeTorch) {
  const Twins twins(torch::kDouble);
  mezzo::optim::SGD ours(twins.ours, SGDOptions(1e-2));
  torch::optim::SGD theirs(twins.theirs, SGDOptions(1e-2));
  twins.step(ours, theirs, 3);
  for (const double momentum : {0.9, 0.0, 0.8}) {
    for (torch::optim::Optimizer* const one : {static_cast<torch::optim::Optimizer*>(&ours),
                                               static_cast<torch::optim::Optimizer*>(&theirs)}) {
      static_cast<SGDOptions&>(one->param_groups()[0].options()).momentum(momentum).dampening(0.5);
    }
    twins.step(ours, theirs, 3);
    EXPECT_LT(twins.difference(), 1e-14) << momentum;
  }
}

}  // namespace
