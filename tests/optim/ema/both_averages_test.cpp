// The averages of mezzo's optimizers (`ema_decay`) and those of mezzo::Ema follow one rule: every
// parameter, every applied step.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::Ema;
using mezzo::EmaScope;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::WeightStorage;

struct Kept {
  torch::ScalarType dtype;
  WeightStorage storage;
  bool through_aten;
};

std::string name_of(const testing::TestParamInfo<Kept>& info) {
  const char* const storages[] = {"Plain", "Master", "SplitMaster", "Stochastic"};
  return std::string(c10::toString(info.param.dtype)) +
         storages[static_cast<int>(info.param.storage)] + (info.param.through_aten ? "Aten" : "");
}

/// One optimizer with `ema_decay`, and an Ema beside it. Rates, gradients and weights are few bits,
/// so that every sum is exact in the narrowest dtype, and averages are compared bit for bit.
class BothAverages : public testing::TestWithParam<Kept> {
 protected:
  static constexpr double kDecay = 0.5;

  torch::Tensor parameter(double value) const {
    return torch::full({3, 5}, value, GetParam().dtype).requires_grad_();
  }

  /// A step in which the parameters that `which` names have gradients of 1.
  void step(const std::vector<std::size_t>& which, bool overflows = false) {
    for (const auto& one : parameters_) one.mutable_grad() = torch::Tensor();
    for (const std::size_t i : which) {
      parameters_[i].mutable_grad() = torch::ones_like(parameters_[i].detach());
    }
    mezzo::GradientReport report;
    report.devices.push_back({torch::ones({}), torch::full({}, overflows ? 1.0F : 0.0F)});
    if (GetParam().through_aten) {
      optimizer_.apply_with_aten(report);
    } else {
      optimizer_.apply(report);
    }
    if (!overflows) ema_.update();
  }

  void write(std::size_t i, double value) {
    const torch::NoGradGuard no_grad;
    parameters_[i].fill_(value);
  }

  void expect_agreement(const char* when) const {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const torch::Tensor average = optimizer_.average_of(parameters_[i]);
      ASSERT_TRUE(average.defined()) << when << ", parameter " << i;
      EXPECT_TRUE(torch::equal(average, ema_.averages()[i]))
          << when << ", parameter " << i << ": " << average[0][0].item<double>() << " and "
          << ema_.averages()[i][0][0].item<double>();
    }
  }

  std::vector<torch::Tensor> parameters_{parameter(1), parameter(2), parameter(4)};
  SGD optimizer_{parameters_,
                 SGDOptions(0.25).weight_storage(GetParam().storage).ema_decay(kDecay)};
  Ema ema_{parameters_, {.decay = kDecay}};
};

INSTANTIATE_TEST_SUITE_P(Ema, BothAverages,
                         testing::Values(Kept{torch::kFloat, WeightStorage::plain, false},
                                         Kept{torch::kFloat, WeightStorage::plain, true},
                                         Kept{torch::kDouble, WeightStorage::plain, false},
                                         Kept{torch::kHalf, WeightStorage::plain, false},
                                         Kept{torch::kBFloat16, WeightStorage::plain, true},
                                         Kept{torch::kHalf, WeightStorage::master, false},
                                         Kept{torch::kBFloat16, WeightStorage::master, false},
                                         Kept{torch::kBFloat16, WeightStorage::master, true},
                                         Kept{torch::kBFloat16, WeightStorage::split_master, false},
                                         Kept{torch::kBFloat16, WeightStorage::stochastic, false}),
                         name_of);

TEST_P(BothAverages, FollowParametersThatTakeNoPart) {
  step({0, 1});  // number 2 is frozen from the start
  step({0, 1});
  expect_agreement("frozen from the start");
  step({0});
  step({0});
  expect_agreement("frozen later");
  write(1, 3);
  write(2, 8);
  for (int i = 0; i < 4; ++i) step({0});
  expect_agreement("rewritten and frozen");
  EXPECT_LT((optimizer_.average_of(parameters_[2]) - 8).abs().max().item<double>(), 0.5);
  step({1, 2});
  expect_agreement("unfrozen again");
  step({});
  expect_agreement("without any gradient");
}

TEST_P(BothAverages, StandStillInASkippedStep) {
  step({0, 1}, /*overflows=*/true);
  step({0, 1});
  write(2, 8);
  step({0});
  const auto average = optimizer_.average_of(parameters_[2]).clone();
  step({0}, /*overflows=*/true);
  step({0, 1}, /*overflows=*/true);
  EXPECT_TRUE(torch::equal(optimizer_.average_of(parameters_[2]), average));
  expect_agreement("after skipped steps");
  step({0});
  expect_agreement("after an applied one");
}

TEST_P(BothAverages, GoOnAfterAFile) {
  step({0, 1});
  step({0});
  write(1, 16);
  step({0});
  std::stringstream file;
  torch::save(optimizer_, file);
  optimizer_.state().clear();
  torch::load(optimizer_, file);
  step({0});
  expect_agreement("after a file");
}

TEST(AveragesOfBystanders, OfMastersKeepTheirBitsWhenFrozen) {
  for (const auto storage : {WeightStorage::master, WeightStorage::split_master}) {
    const auto trained = torch::ones({7}, torch::kBFloat16).requires_grad_();
    const auto other = torch::ones({1}).requires_grad_();
    SGD optimizer({trained, other}, SGDOptions(0x1p-12).weight_storage(storage).ema_decay(0.5));
    trained.mutable_grad() = torch::ones_like(trained);
    optimizer.step();  // a 4096th less, of which bfloat16 sees nothing
    trained.mutable_grad() = torch::Tensor();
    other.mutable_grad() = torch::ones_like(other);
    for (int i = 0; i < 40; ++i) optimizer.step();
    EXPECT_TRUE(torch::equal(optimizer.average_of(trained), torch::full({7}, 1 - 0x1p-12F)));
    EXPECT_TRUE(torch::equal(trained, torch::ones({7}, torch::kBFloat16)));
  }
}

TEST(AveragesOfBystanders, OfAParameterThatWasRewrittenAndFrozenArriveThere) {
  auto weight = torch::full({4}, 2.0F).requires_grad_();
  const auto other = torch::ones({1}).requires_grad_();
  SGD optimizer({weight, other}, SGDOptions(1.0).ema_decay(0.5));
  weight.mutable_grad() = torch::ones_like(weight);
  optimizer.step();
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(100);
  }
  weight.mutable_grad() = torch::Tensor();
  weight.requires_grad_(false);
  other.mutable_grad() = torch::zeros_like(other);
  for (int i = 0; i < 30; ++i) optimizer.step();
  const EmaScope averaged(optimizer);
  EXPECT_TRUE(torch::equal(weight, torch::full({4}, 100.0F)));
}

TEST(AveragesOfBystanders, MakeNoMasterForAFrozenParameterAndTrainItAfreshOnceItIsUnfrozen) {
  const auto frozen = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto trained = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto alone = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto options = mezzo::optim::AdamWOptions(0.1).weight_storage(WeightStorage::master);
  mezzo::optim::AdamW optimizer({frozen, trained},
                                mezzo::optim::AdamWOptions(options).ema_decay(0.5));
  mezzo::optim::AdamW reference({alone}, options);
  trained.mutable_grad() = torch::ones_like(trained);
  for (int i = 0; i < 3; ++i) optimizer.step();
  const auto& state = static_cast<const mezzo::optim::AdamWParamState&>(
      *optimizer.state().at(frozen.unsafeGetTensorImpl()));
  EXPECT_FALSE(state.master().defined());
  frozen.mutable_grad() = torch::ones_like(frozen);
  alone.mutable_grad() = torch::ones_like(alone);
  optimizer.step();
  reference.step();
  EXPECT_TRUE(torch::equal(frozen, alone));
}

TEST(AveragesOfBystanders, GoWhereTheDecayIsSetTo0) {
  const auto frozen = torch::ones({4}).requires_grad_();
  const auto trained = torch::ones({4}).requires_grad_();
  SGD optimizer({frozen, trained}, SGDOptions(1.0).ema_decay(0.5));
  trained.mutable_grad() = torch::ones_like(trained);
  optimizer.step();
  EXPECT_TRUE(optimizer.average_of(frozen).defined());
  static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).ema_decay(0);
  optimizer.step();
  EXPECT_FALSE(optimizer.average_of(frozen).defined());
  EXPECT_FALSE(optimizer.average_of(trained).defined());
}

TEST(AveragesOfBystanders, AreNotMadeOfWhatHasNoFloatingPoint) {
  const auto numbers = torch::ones({4}, torch::kLong);
  const auto trained = torch::ones({4}).requires_grad_();
  SGD optimizer({numbers, trained}, SGDOptions(1.0).ema_decay(0.5));
  trained.mutable_grad() = torch::ones_like(trained);
  optimizer.step();
  EXPECT_FALSE(optimizer.average_of(numbers).defined());
  EXPECT_TRUE(optimizer.average_of(trained).defined());
}

TEST(AveragesOfBystanders, OfAnotherShapeAreRefusedBeforeAnythingIsWritten) {
  const auto frozen = torch::ones({4}).requires_grad_();
  const auto trained = torch::ones({4}).requires_grad_();
  SGD optimizer({trained, frozen}, SGDOptions(1.0).ema_decay(0.5));
  trained.mutable_grad() = torch::ones_like(trained);
  optimizer.step();
  frozen.set_data(torch::ones({6}));
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_TRUE(torch::equal(trained, torch::zeros({4})));
}

TEST(AveragesOfBystanders, OfAnotherOptimizersStateAreRefusedBeforeAnythingIsWritten) {
  const auto frozen = torch::ones({4}).requires_grad_();
  const auto trained = torch::ones({4}).requires_grad_();
  SGD optimizer({trained, frozen}, SGDOptions(1.0).ema_decay(0.5));
  optimizer.state()[frozen.unsafeGetTensorImpl()] =
      std::make_unique<torch::optim::AdamParamState>();
  trained.mutable_grad() = torch::ones_like(trained);
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_TRUE(torch::equal(trained, torch::ones({4})));
  EXPECT_EQ(optimizer.applied_steps(), 0);
}

}  // namespace
