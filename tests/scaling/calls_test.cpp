// Calls that a scaler accepts and refuses, and what it remembers between them.

#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "../support/throwing_sgd.h"
#include "../support/tiny_optimizer.h"

namespace {

using namespace test_support;
using mezzo::GradScaler;
using testing::HasSubstr;
using testing::StartsWith;

TEST(GradScaler, KeepsTorchsWordsForCallsInTheWrongOrder) {
  const std::string fix =
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration.";
  GradScaler fresh;
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {1});
  EXPECT_THAT(error_of([&] { fresh.unscale_(optimizer); }), StartsWith("Attempted unscale_" + fix));
  EXPECT_THAT(error_of([&] { fresh.step(optimizer); }), StartsWith("Attempted step" + fix));
  EXPECT_THAT(error_of([&] { fresh.update(); }), StartsWith("Attempted update" + fix));

  auto scaler = quiet_scaler({});
  scaler.unscale_(optimizer);
  EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }),
              StartsWith("unscale_() has already been called on this optimizer since the last "
                         "update(). In C++: call"));
  scaler.step(optimizer);
  EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }),
              StartsWith("unscale_() is being called after step(). In C++: call"));
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }),
              StartsWith("step() has already been called since the last update(). In C++: call"));
  scaler.update();
  EXPECT_TRUE(scaler.step(optimizer).ran());
}

TEST(GradScaler, RefusesClosuresAndTakesNone) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {1});
  EXPECT_THAT(error_of([&] { scaler.step(optimizer, [] { return torch::zeros({}); }); }),
              StartsWith("Closure use is not currently supported if GradScaler is enabled. In C++: "
                         "compute the loss"));
  EXPECT_TRUE(scaler.step(optimizer, nullptr).ran());
}

class SgdWithArguments : public torch::optim::SGD {
 public:
  using SGD::SGD;
  using SGD::step;
  torch::Tensor step(int factor, std::unique_ptr<int> summand) {
    return torch::full({}, factor + *summand);
  }
};

TEST(GradScaler, ForwardsArgumentsAndReturnsWhatTheStepReturned) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  SgdWithArguments optimizer({x}, torch::optim::SGDOptions(1.0));
  set_gradient(x, {1});
  const auto result = scaler.step(optimizer, 3, std::make_unique<int>(4));
  EXPECT_EQ(result.value().value().item<int>(), 7);
}

TEST(GradScaler, MayStepAgainAfterAnOptimizerThatThrew) {
  for (const double max_norm : {100.0, double{kInfinity}}) {
    auto scaler = quiet_scaler({.init_scale = 4});
    auto x = parameter({1});
    ThrowingSgd optimizer({x}, torch::optim::SGDOptions(1.0));
    set_gradient(x, {4});
    EXPECT_FALSE(scaler.is_unscaled(optimizer));
    optimizer.throws = true;
    EXPECT_THROW(scaler.step(optimizer, {.max_norm = max_norm}), std::runtime_error);
    EXPECT_FALSE(scaler.is_unscaled(optimizer)) << "the gradients are what they were";
    EXPECT_EQ(x.grad().item<float>(), 4.0F);
    optimizer.throws = false;
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = max_norm}).ran());
    EXPECT_EQ(x.item<float>(), 0.0F) << "unscaled once";
    EXPECT_FALSE(scaler.is_unscaled(optimizer));
  }
}

TEST(GradScaler, MayTakeTorchsStepAgainAfterAnOptimizerThatThrew) {
  auto scaler = quiet_scaler({.init_scale = 4});
  auto x = parameter({1});
  ThrowingSgd optimizer({x}, torch::optim::SGDOptions(1.0));
  set_gradient(x, {4});
  optimizer.throws = true;
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  EXPECT_TRUE(scaler.is_unscaled(optimizer));
  EXPECT_EQ(x.grad().item<float>(), 1.0F);
  optimizer.throws = false;
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), 0.0F) << "unscaled once";
}

TEST(GradScaler, NeverTakesANewOptimizerForADeadOneAtItsAddress) {
  auto scaler = quiet_scaler({.init_scale = 2});
  std::optional<torch::optim::SGD> optimizer;
  std::vector<torch::Tensor> kept;
  for (int i = 0; i < 3; ++i) {  // in one iteration, one place in memory
    auto x = parameter({0});
    set_gradient(x, {2});
    kept.push_back(x);
    optimizer.emplace(std::vector<torch::Tensor>{x}, torch::optim::SGDOptions(1.0));
    ASSERT_NO_THROW(scaler.unscale_(*optimizer)) << i;
    ASSERT_TRUE(scaler.step(*optimizer).ran()) << i;
    EXPECT_EQ(x.item<float>(), -1.0F);
  }
  EXPECT_THAT(error_of([&] { scaler.step(*optimizer); }), HasSubstr("already been called"));
}

TEST(GradScaler, KeepsNoParametersMemoryAlive) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1}), y = parameter({1});
  const auto unknown = x.weak_use_count();
  for (const auto& each : {x, y}) set_gradient(each, {1});
  {
    auto optimizer = sgd({x, y});
    scaler.step(optimizer);
  }
  for (const auto* each : {&x, &y}) {
    EXPECT_EQ(each->use_count(), 1U);
    EXPECT_GT(each->weak_use_count(), unknown) << "its address may be given to another";
  }
  scaler.update();
  for (const auto* each : {&x, &y}) EXPECT_EQ(each->weak_use_count(), unknown);
}

TEST(GradScaler, DisabledPassesEverythingThrough) {
  GradScaler scaler({.enabled = false});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  set_gradient(x, {kInfinity});
  scaler.unscale_(optimizer);
  int closures = 0;
  const auto result = scaler.step(optimizer, [&] {
    ++closures;
    return torch::full({}, 5.0);
  });
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.scale(), 1.0F);
  EXPECT_EQ(result.value().value().item<float>(), 5.0F);
  EXPECT_EQ(closures, 1);
  scaler.update();
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({{"nonsense", 1}});
}

TEST(GradScaler, MovesWithItsState) {
  auto scaler = quiet_scaler({.init_scale = 4});
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_gradient(x, {4});
  scaler.unscale_(optimizer);
  GradScaler moved = std::move(scaler);
  EXPECT_TRUE(moved.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), -1.0F);
}

}  // namespace
