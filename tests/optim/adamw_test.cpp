// mezzo::optim::AdamW beside torch::optim::AdamW: the same answers, options, state and files.

#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::AdamWParamState;
using testing::HasSubstr;
using testing::ThrowsMessage;
using TorchAdamW = torch::optim::AdamW;
using TorchAdamWOptions = torch::optim::AdamWOptions;

/// Parameters of several shapes, and a second set of equal values.
struct Twins {
  std::vector<torch::Tensor> ours;
  std::vector<torch::Tensor> theirs;

  explicit Twins(torch::ScalarType dtype = torch::kFloat) {
    torch::manual_seed(1);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{17, 9}, {1}, {0}, {30000}, {3, 1, 5}}) {
      const auto values = torch::randn(shape, torch::kDouble).to(dtype);
      ours.push_back(values.clone().requires_grad_());
      theirs.push_back(values.clone().requires_grad_());
    }
  }

  void set_gradients() const {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const auto gradient = torch::randn(ours[i].sizes(), torch::kDouble).to(ours[i].scalar_type());
      ours[i].mutable_grad() = gradient.clone();
      theirs[i].mutable_grad() = gradient.clone();
    }
  }

  double largest_difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      largest = std::max(largest, (ours[i] - theirs[i]).abs().max().item<double>());
    }
    return largest;
  }
};

template <class Left, class Right>
void step_both(Left& left, Right& right, const Twins& twins, int steps) {
  for (int i = 0; i < steps; ++i) {
    twins.set_gradients();
    left.step();
    right.step();
  }
}

const AdamWParamState& state_of(const AdamW& optimizer, const torch::Tensor& parameter) {
  return static_cast<const AdamWParamState&>(
      *optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

TEST(AdamW, GivesTorchsAnswersOverAHundredSteps) {
  for (const bool amsgrad : {false, true}) {
    const Twins twins;
    AdamW ours(twins.ours, AdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad));
    TorchAdamW theirs(twins.theirs, TorchAdamWOptions(1e-2).weight_decay(0.1).amsgrad(amsgrad));
    step_both(ours, theirs, twins, 100);
    EXPECT_LT(twins.largest_difference(), 2e-5) << amsgrad;
  }
}

TEST(AdamW, GivesTorchsAnswersInDoubleToTheLastBits) {
  for (const bool amsgrad : {false, true}) {
    const Twins twins(torch::kDouble);
    AdamW ours(twins.ours, AdamWOptions(1e-2).betas({0.8, 0.95}).eps(1e-6).amsgrad(amsgrad));
    TorchAdamW theirs(twins.theirs,
                      TorchAdamWOptions(1e-2).betas({0.8, 0.95}).eps(1e-6).amsgrad(amsgrad));
    step_both(ours, theirs, twins, 50);
    EXPECT_LT(twins.largest_difference(), 1e-13) << amsgrad;
  }
}

TEST(AdamW, HasTorchsDefaults) {
  const AdamWOptions ours;
  const TorchAdamWOptions theirs;
  EXPECT_EQ(ours.lr(), theirs.lr());
  EXPECT_EQ(ours.betas(), theirs.betas());
  EXPECT_EQ(ours.eps(), theirs.eps());
  EXPECT_EQ(ours.weight_decay(), theirs.weight_decay());
  EXPECT_EQ(ours.amsgrad(), theirs.amsgrad());
}

TEST(AdamW, GivesEachGroupItsOwnOptions) {
  const Twins twins;
  const std::vector<torch::Tensor> first{twins.ours[0]};
  const std::vector<torch::Tensor> rest(twins.ours.begin() + 1, twins.ours.end());
  std::vector<torch::optim::OptimizerParamGroup> groups{
      {first, std::make_unique<AdamWOptions>(AdamWOptions(3e-2).weight_decay(0))}, {rest}};
  AdamW ours(groups, AdamWOptions(1e-3).betas({0.5, 0.9}));
  const std::vector<torch::Tensor> their_first{twins.theirs[0]};
  const std::vector<torch::Tensor> their_rest(twins.theirs.begin() + 1, twins.theirs.end());
  std::vector<torch::optim::OptimizerParamGroup> their_groups{
      {their_first, std::make_unique<TorchAdamWOptions>(TorchAdamWOptions(3e-2).weight_decay(0))},
      {their_rest}};
  TorchAdamW theirs(their_groups, TorchAdamWOptions(1e-3).betas({0.5, 0.9}));
  step_both(ours, theirs, twins, 10);
  EXPECT_LT(twins.largest_difference(), 5e-6);
  ours.param_groups()[1].options().set_lr(0);
  const auto before = twins.ours[1].detach().clone();
  twins.set_gradients();
  ours.step();
  EXPECT_TRUE(torch::equal(twins.ours[1], before)) << "a rate set between steps holds at once";
}

TEST(AdamW, CallsTheClosureWithGradientsAndReturnsItsLoss) {
  const auto x = torch::full({3}, 2.0).requires_grad_();
  AdamW optimizer({x}, AdamWOptions(0.1).weight_decay(0));
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto value = (x * x).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 12.0F);
  EXPECT_TRUE(torch::allclose(x, torch::full({3}, 1.9)));
}

// The bits do not depend on how the work was shared out.
TEST(AdamW, GivesTheSameBitsOnAnyNumberOfThreads) {
  std::vector<torch::Tensor> results;
  const int before = torch::get_num_threads();
  for (const int threads : {1, 2, 5}) {
    torch::set_num_threads(threads);
    const Twins twins;
    AdamW optimizer(twins.ours, AdamWOptions(1e-2));
    for (int i = 0; i < 3; ++i) {
      twins.set_gradients();
      optimizer.step();
    }
    results.push_back(twins.ours[3].detach());
  }
  torch::set_num_threads(before);
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_TRUE(torch::equal(results[0], results[2]));
}

TEST(AdamW, GoesOnWhereTorchStoppedAndTheOtherWayRound) {
  for (const bool amsgrad : {false, true}) {
    const Twins twins(torch::kDouble);
    AdamW ours(twins.ours, AdamWOptions(1e-2).amsgrad(amsgrad));
    TorchAdamW theirs(twins.theirs, TorchAdamWOptions(1e-2).amsgrad(amsgrad).eps(1e-5));
    for (int i = 0; i < 5; ++i) {
      twins.set_gradients();
      theirs.step();
    }
    for (std::size_t i = 0; i < twins.ours.size(); ++i) twins.ours[i].data().copy_(twins.theirs[i]);
    std::stringstream from_torch;
    torch::save(theirs, from_torch);
    torch::load(ours, from_torch);
    EXPECT_EQ(state_of(ours, twins.ours[3]).step(), 5);
    step_both(ours, theirs, twins, 5);
    EXPECT_LT(twins.largest_difference(), 1e-14) << amsgrad;

    std::stringstream from_mezzo;
    torch::save(ours, from_mezzo);
    TorchAdamW fresh(twins.theirs, TorchAdamWOptions(7.0));
    torch::load(fresh, from_mezzo);
    step_both(ours, fresh, twins, 5);
    EXPECT_LT(twins.largest_difference(), 1e-14) << amsgrad;
  }
}

TEST(AdamW, RestoresItsOwnStateBitForBit) {
  const Twins twins;
  AdamW first(twins.ours, AdamWOptions(1e-2));
  AdamW second(twins.theirs);
  for (int i = 0; i < 3; ++i) {
    twins.set_gradients();
    first.step();
  }
  std::stringstream archive;
  torch::save(first, archive);
  torch::load(second, archive);
  for (std::size_t i = 0; i < twins.ours.size(); ++i) twins.theirs[i].data().copy_(twins.ours[i]);
  step_both(first, second, twins, 3);
  EXPECT_EQ(twins.largest_difference(), 0.0);
}

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// Two groups of the given sizes, each after `steps` steps at the rate `lr`.
struct TwoGroups {
  TwoGroups(std::vector<std::size_t> sizes, double lr, int steps)
      : optimizer(groups(sizes), AdamWOptions(lr)) {
    for (int i = 0; i < steps; ++i) {
      for (const auto& group : optimizer.param_groups()) {
        for (const auto& parameter : group.params()) parameter.mutable_grad() = torch::ones({3});
      }
      optimizer.step();
    }
  }

  std::string file() const {
    std::stringstream file;
    torch::save(optimizer, file);
    return file.str();
  }
  void load(const std::string& file) {
    std::stringstream stream(file);
    torch::load(optimizer, stream);
  }
  double lr(std::size_t group) const { return optimizer.param_groups()[group].options().get_lr(); }

  static Groups groups(const std::vector<std::size_t>& sizes) {
    Groups all;
    for (const std::size_t size : sizes) {
      std::vector<torch::Tensor> parameters;
      for (std::size_t i = 0; i < size; ++i) parameters.push_back(torch::ones({3}));
      all.emplace_back(parameters);
    }
    return all;
  }

  AdamW optimizer;
};

TEST(AdamW, StaysAsItWasWhereAFileDoesNotFitALaterGroup) {
  const TwoGroups other({2, 2}, 0.5, 4);
  TwoGroups loaded({2, 1}, 0.1, 2);
  const auto parameter = loaded.optimizer.param_groups()[0].params()[0];
  const auto& state = static_cast<mezzo::optim::AdamWParamState&>(
      *loaded.optimizer.state().at(parameter.unsafeGetTensorImpl()));
  EXPECT_THROW(loaded.load(other.file()), c10::Error);
  EXPECT_EQ(loaded.lr(0), 0.1);
  EXPECT_EQ(loaded.optimizer.applied_steps(), 2);
  ASSERT_EQ(loaded.optimizer.state().at(parameter.unsafeGetTensorImpl()).get(), &state);
  EXPECT_EQ(state.step(), 2);
}

TEST(AdamW, StaysAsItWasWhereTheRatesOfAFileAreNoRates) {
  TwoGroups other({1, 1}, 0.5, 4);
  other.optimizer.param_groups()[1].options().set_lr(-1);
  TwoGroups loaded({1, 1}, 0.1, 2);
  EXPECT_THAT([&] { loaded.load(other.file()); }, ThrowsMessage<c10::Error>(HasSubstr("lr is -1")));
  EXPECT_EQ(loaded.lr(0), 0.1);
  EXPECT_EQ(loaded.lr(1), 0.1);
  EXPECT_EQ(loaded.optimizer.applied_steps(), 2);
}

// Else a run that is taken back to its start would keep the moments of the steps it took.
TEST(AdamW, KeepsNoStateThatAFileLacks) {
  TwoGroups loaded({1, 1}, 0.1, 0);
  const std::string at_the_start = loaded.file();
  TwoGroups trained({1, 1}, 0.1, 2);
  trained.load(at_the_start);
  EXPECT_TRUE(trained.optimizer.state().empty());
  EXPECT_EQ(trained.optimizer.applied_steps(), 0);
}

TEST(AdamW, CastsLoadedMomentsToTheParametersDtypeAndLayout) {
  const auto row_major = torch::randn({4, 6}, torch::kDouble).requires_grad_();
  const auto column_major = row_major.detach().to(torch::kFloat).t().contiguous().t();
  ASSERT_NE(row_major.strides(), column_major.strides());
  AdamW first({row_major});
  row_major.mutable_grad() = torch::randn({4, 6}, torch::kDouble);
  first.step();
  std::stringstream archive;
  torch::save(first, archive);
  AdamW second({column_major});
  torch::load(second, archive);
  column_major.copy_(row_major.detach());
  row_major.mutable_grad() = torch::randn({4, 6}, torch::kDouble);
  column_major.mutable_grad() = row_major.grad().to(torch::kFloat);
  first.step();
  second.step();
  EXPECT_TRUE(torch::allclose(column_major, row_major.to(torch::kFloat), 1e-5, 1e-6));
}

class AdamWMemory : public testing::Test {
 protected:
  /// One step on `parameter`, whose layout is peculiar, and on a contiguous twin.
  static void expect_same_step(torch::Tensor parameter, torch::Tensor gradient) {
    const auto twin = parameter.detach().clone(torch::MemoryFormat::Contiguous).requires_grad_();
    twin.mutable_grad() = gradient.clone(torch::MemoryFormat::Contiguous);
    parameter.mutable_grad() = gradient;
    AdamW peculiar({parameter}, AdamWOptions(1e-1));
    AdamW plain({twin}, AdamWOptions(1e-1));
    for (int i = 0; i < 3; ++i) {
      peculiar.step();
      plain.step();
    }
    EXPECT_TRUE(torch::equal(parameter, twin));
  }
};

TEST_F(AdamWMemory, StepsTransposedParameters) {
  expect_same_step(torch::randn({6, 4}).t(), torch::randn({4, 6}));
  expect_same_step(torch::randn({6, 4}).t(), torch::randn({6, 4}).t());
  expect_same_step(torch::randn({4, 6}), torch::randn({6, 4}).t());
}

TEST_F(AdamWMemory, RefusesParametersWithGapsAndWritesNothing) {
  const auto base = torch::ones({6, 8});
  const auto with_gaps = base.slice(1, 0, 8, 2), ordinary = torch::ones({3});
  with_gaps.mutable_grad() = torch::randn({6, 4});
  ordinary.mutable_grad() = torch::ones({3});
  AdamW optimizer({ordinary, with_gaps});
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("has gaps in its memory")));
  EXPECT_TRUE(torch::equal(base, torch::ones({6, 8})));
  EXPECT_TRUE(torch::equal(ordinary, torch::ones({3})));
}

TEST_F(AdamWMemory, LeavesCopiesOnWriteAlone) {
  const auto x = torch::ones({8});
  const auto lazy = at::_lazy_clone(x);
  x.mutable_grad() = torch::ones({8});
  AdamW optimizer({x}, AdamWOptions(0.1));
  optimizer.step();
  EXPECT_TRUE(torch::equal(lazy, torch::ones({8})));
  EXPECT_FALSE(torch::equal(x, lazy));
}

TEST_F(AdamWMemory, BumpsTheVersionSoThatAutogradNotices) {
  const auto x = torch::ones({3}).requires_grad_();
  const auto square = (x * x).sum();
  x.mutable_grad() = torch::ones({3});
  AdamW optimizer({x});
  optimizer.step();
  EXPECT_THROW(square.backward(), c10::Error) << "x was written after it was saved for backward";
}

TEST(AdamWDtypes, TrainsBfloat16AndHalfParameters) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto x = torch::full({100}, 2.0, dtype).requires_grad_();
    AdamW optimizer({x}, AdamWOptions(0.05).weight_decay(0));
    for (int i = 0; i < 60; ++i) {
      optimizer.zero_grad();
      (x.to(torch::kFloat) - 1).square().sum().backward();
      optimizer.step();
    }
    EXPECT_TRUE(torch::allclose(x.to(torch::kFloat), torch::ones({100}), 0, 0.1)) << dtype;
    EXPECT_EQ(state_of(optimizer, x).exp_avg().scalar_type(), dtype);
  }
}

TEST(AdamWErrors, NameTheOptionAndItsRange) {
  const std::vector<torch::Tensor> x{torch::ones({1})};
  EXPECT_THAT([&] { AdamW(x, AdamWOptions(-1)); },
              ThrowsMessage<c10::Error>(HasSubstr("AdamW: lr is -1; it should be at least 0")));
  EXPECT_THAT([&] { AdamW(x, AdamWOptions().eps(-1)); },
              ThrowsMessage<c10::Error>(HasSubstr("eps is -1")));
  EXPECT_THAT(
      [&] {
        AdamW(x, AdamWOptions().betas({0.9, 1.0}));
      },
      ThrowsMessage<c10::Error>(HasSubstr("betas are 0.9 and 1")));
  EXPECT_THAT([&] { AdamW(x, AdamWOptions().weight_decay(-0.5)); },
              ThrowsMessage<c10::Error>(HasSubstr("weight_decay is -0.5")));
  EXPECT_THAT([&] { AdamW(x, AdamWOptions(std::numeric_limits<double>::quiet_NaN())); },
              ThrowsMessage<c10::Error>(HasSubstr("lr is nan")));
  std::vector<torch::optim::OptimizerParamGroup> groups{
      {x, std::make_unique<torch::optim::AdamOptions>(1e-3)}};
  EXPECT_THAT([&] { AdamW optimizer(groups); },
              ThrowsMessage<c10::Error>(HasSubstr("are not mezzo::optim::AdamWOptions")));
}

TEST(AdamWErrors, RefuseAParameterThatIsGivenTwice) {
  const auto x = torch::ones({4});
  EXPECT_THAT(
      [&] {
        AdamW({x, torch::ones({1}), x});
      },
      ThrowsMessage<c10::Error>(HasSubstr("is given twice")));
  AdamW optimizer({x}, AdamWOptions(0.1));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({x}));
  x.mutable_grad() = torch::ones({4});
  EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(HasSubstr("is given twice")));
  EXPECT_TRUE(torch::equal(x, torch::ones({4})));
}

TEST(AdamWErrors, RefuseParametersThatShareMemory) {
  const auto x = torch::ones({8});
  EXPECT_THAT(
      [&] {
        AdamW({x.narrow(0, 0, 5), x.narrow(0, 4, 4)});
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("AdamW: parameter 0 of group 0 (float32 [5] on cpu) and parameter 1 of group 0 "
                    "(float32 [4] on cpu) share memory")));
  EXPECT_NO_THROW(AdamW({x.narrow(0, 0, 4), x.narrow(0, 4, 4)}));
  EXPECT_NO_THROW(AdamW({at::_lazy_clone(x), at::_lazy_clone(x), torch::ones({0})}));
  const auto expanded = torch::ones({1}).expand({4});
  const auto y = torch::ones({4});
  AdamW optimizer({y, expanded}, AdamWOptions(0.1));
  y.mutable_grad() = torch::ones({4});
  expanded.mutable_grad() = torch::ones({4});
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("or elements that share it")));
  EXPECT_TRUE(torch::equal(y, torch::ones({4})));
}

TEST(AdamWErrors, RefuseGradientsThatItCannotUseBeforeItWritesAny) {
  const auto good = torch::ones({4});
  const auto bad = torch::ones({4});
  good.mutable_grad() = torch::ones({4});
  AdamW optimizer({good, bad}, AdamWOptions(0.1));
  bad.mutable_grad() = torch::ones({4}).to_sparse();
  EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(HasSubstr("takes dense")));
  const auto half = torch::ones({4}, torch::kHalf);
  half.mutable_grad() = torch::ones({4}, torch::kDouble);
  AdamW narrow({half});
  EXPECT_THAT([&] { narrow.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("has a gradient of float64")));
  EXPECT_TRUE(torch::equal(good, torch::ones({4})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(AdamWErrors, RefuseAStateOfAnotherShape) {
  const auto small = torch::ones({4});
  small.mutable_grad() = torch::ones({4});
  AdamW saved({small});
  saved.step();
  std::stringstream archive;
  torch::save(saved, archive);
  const auto large = torch::ones({5});
  large.mutable_grad() = torch::ones({5});
  AdamW loaded({large});
  EXPECT_THAT([&] { torch::load(loaded, archive); },
              ThrowsMessage<c10::Error>(HasSubstr("another model's")));
  EXPECT_TRUE(loaded.state().empty());
}

}  // namespace
