#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../support/aten_optimizer.h"
#include "../support/message_of.h"
#include "../support/save_to_string.h"
#include "../support/special_values.h"
#include "../support/throwing_sgd.h"
#include "../support/warning_recorder.h"
#include "../support/weight_storage_cases.h"

namespace {

using mezzo::ConstantCurve;
using mezzo::CosineCurve;
using mezzo::DecayType;
using mezzo::GradStats;
using mezzo::LinearCurve;
using mezzo::LinearSchedule;
using mezzo::OneCycleCurve;
using mezzo::PolynomialCurve;
using mezzo::StepResult;
using mezzo::WarmupStableDecayCurve;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using test_support::load_from_string;
using test_support::message_of;
using test_support::save_to_string;
using testing::DoubleEq;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;
using testing::ThrowsMessage;

static_assert(mezzo::LrCurve<LinearCurve> && mezzo::LrCurve<CosineCurve> &&
              mezzo::LrCurve<PolynomialCurve> && mezzo::LrCurve<ConstantCurve> &&
              mezzo::LrCurve<WarmupStableDecayCurve> && mezzo::LrCurve<OneCycleCurve>);

template <class Curve>
std::vector<double> factors(const Curve& curve, int64_t count) {
  std::vector<double> all;
  for (int64_t n = 0; n < count; ++n) all.push_back(curve.factor(n));
  return all;
}

MATCHER(IsClose, "") { return std::abs(std::get<0>(arg) - std::get<1>(arg)) <= 1e-15; }

/// Reads the recordings of data/lr_schedules.py, by name.
std::map<std::string, std::vector<double>> read_recorded_lrs() {
  std::ifstream file(MEZZO_OPTIM_TEST_DATA "/lr_schedules.txt");
  std::map<std::string, std::vector<double>> lrs;
  for (std::string line, name; std::getline(file, line);) {
    std::istringstream words(line);
    words >> name;
    lrs[name].assign(std::istream_iterator<double>(words), {});
  }
  return lrs;
}

TEST(LrCurves, MatchTransformersAndTorch) {
  const auto recorded = read_recorded_lrs();
  std::size_t num_compared = 0;
  const auto expect_recorded = [&](const std::string& name, const auto& curve) {
    SCOPED_TRACE(name);
    const std::vector<double>& lrs = recorded.at(name);
    EXPECT_THAT(factors(curve, std::ssize(lrs)), Pointwise(IsClose(), lrs));
    ++num_compared;
  };
  expect_recorded("constant", ConstantCurve{.warmup_steps = 4});
  expect_recorded("linear", LinearCurve{.warmup_steps = 4, .total_steps = 10});
  expect_recorded("linear_without_warmup", LinearCurve{.total_steps = 4});
  expect_recorded(
      "polynomial",
      PolynomialCurve{.warmup_steps = 4, .total_steps = 10, .min_factor = 0.1, .power = 2});
  expect_recorded("cosine", CosineCurve{.warmup_steps = 4, .total_steps = 10});
  expect_recorded("cosine_min_lr",
                  CosineCurve{.warmup_steps = 4, .total_steps = 10, .min_factor = 0.1});
  expect_recorded("cosine_restarts",
                  CosineCurve{.warmup_steps = 3, .total_steps = 20, .num_cycles = 3});
  expect_recorded("cosine_one_cycle", CosineCurve{.warmup_steps = 3, .total_steps = 20});
  const WarmupStableDecayCurve wsd{.warmup_steps = 4, .decay_steps = 6, .total_steps = 20};
  expect_recorded("wsd", wsd);
  WarmupStableDecayCurve linear = wsd, sqrt = wsd, none = wsd;
  linear.min_factor = sqrt.min_factor = 0.1;
  linear.decay_type = DecayType::linear;
  expect_recorded("wsd_linear", linear);
  sqrt.warmup_steps = 0;
  sqrt.decay_steps = 7;
  sqrt.decay_type = DecayType::one_minus_sqrt;
  expect_recorded("wsd_sqrt", sqrt);
  none.decay_steps = 0;
  expect_recorded("wsd_without_decay", none);
  expect_recorded("one_cycle", OneCycleCurve{.total_steps = 24});
  expect_recorded("one_cycle_linear", OneCycleCurve{.total_steps = 24,
                                                    .pct_start = 0.1,
                                                    .anneal_strategy = DecayType::linear,
                                                    .div_factor = 10,
                                                    .final_div_factor = 100});
  expect_recorded("one_cycle_three_phase", OneCycleCurve{.total_steps = 24, .three_phase = true});
  expect_recorded("one_cycle_long_rise",
                  OneCycleCurve{.total_steps = 24, .pct_start = 0.6, .three_phase = true});
  expect_recorded("one_cycle_no_rise", OneCycleCurve{.total_steps = 24, .pct_start = 0});
  EXPECT_EQ(num_compared, recorded.size());
}

TEST(OneCycleCurve, StaysAtLastFactor) {
  for (const bool three_phase : {false, true}) {
    for (const double pct_start : {0.0, 0.1, 0.6, 1.0}) {
      const OneCycleCurve curve{
          .total_steps = 10, .pct_start = pct_start, .three_phase = three_phase};
      for (int64_t n = 0; n < 20; ++n) EXPECT_TRUE(curve.factor(n) > 0 && curve.factor(n) <= 1);
      EXPECT_EQ(curve.factor(9), curve.factor(100)) << pct_start << three_phase;
    }
  }
  // torch divides by 0 where the rise has one step.
  EXPECT_EQ((OneCycleCurve{.total_steps = 10, .pct_start = 0.1}.factor(0)), 1);
}

TEST(LinearCurve, WarmsUpAndFallsToMin) {
  EXPECT_THAT(
      factors(
          LinearCurve{
              .warmup_steps = 3, .total_steps = 5, .min_factor = 0.5, .initial_factor = 0.25},
          7),
      ElementsAre(0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.5));
}

TEST(LrCurves, FullWarmupEndsAtFinalFactor) {
  EXPECT_EQ((LinearCurve{.warmup_steps = 5, .total_steps = 5}.factor(4)), 0.8);
  EXPECT_EQ((LinearCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 0);
  EXPECT_EQ((CosineCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 1);
  EXPECT_EQ((PolynomialCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 0);
}

TEST(LrCurves, ThrowForMemberOutOfRange) {
  const std::vector<std::pair<std::function<double()>, std::string>> cases{
      {[] { return LinearCurve{}.factor(0); },
       "LrSchedule: total_steps is 0; it should be at least 1"},
      {[] { return CosineCurve{.warmup_steps = 11, .total_steps = 10}.factor(0); },
       "LrSchedule: warmup_steps is 11; it should be from 0 to total_steps"},
      {[] { return LinearCurve{.warmup_steps = -1, .total_steps = 10}.factor(0); },
       "warmup_steps is -1"},
      {[] { return LinearCurve{.total_steps = 10, .min_factor = 1.5}.factor(0); },
       "min_factor is 1.5; it should be from 0 to 1"},
      {[] { return LinearCurve{.total_steps = 10, .initial_factor = kNan}.factor(0); },
       "initial_factor is nan"},
      {[] { return PolynomialCurve{.total_steps = 10, .power = -2}.factor(0); },
       "LrSchedule: power is -2"},
      {[] { return CosineCurve{.total_steps = 10, .num_cycles = 0}.factor(0); },
       "LrSchedule: num_cycles is 0; it should be at least 1"},
      {[] { return ConstantCurve{.warmup_steps = -1}.factor(0); }, "warmup_steps is -1"},
      {[] {
         return WarmupStableDecayCurve{4, 7, 10}.factor(0);
       },
       "decay_steps is 7; it should be from 0 to total_steps - warmup_steps"},
      {[] { return OneCycleCurve{}.factor(0); }, "total_steps is 0"},
      {[] { return OneCycleCurve{.total_steps = 10, .pct_start = 30}.factor(0); },
       "pct_start is 30; it should be from 0 to 1"},
      {[] { return OneCycleCurve{.total_steps = 10, .div_factor = 0}.factor(0); },
       "div_factor is 0; it should be positive and finite"},
      {[] { return PolynomialCurve{.total_steps = 10}.factor(-1); },
       "LrSchedule: applied_steps is -1; it should be at least 0"}};
  for (const auto& [call, error] : cases) {
    EXPECT_THAT(call, ThrowsMessage<c10::Error>(HasSubstr(error)));
  }
}

// --- Schedules.

torch::Tensor weight(double value = 0) { return torch::full({1}, value).requires_grad_(); }

double get_group_lr(const torch::optim::Optimizer& optimizer, std::size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

StepResult make_result(bool applied) { return StepResult({.applied = applied}); }

torch::optim::OptimizerParamGroup make_group(double lr) {
  return {{weight()}, std::make_unique<torch::optim::SGDOptions>(lr)};
}

/// Trains with gradient 1, or inf for false in `finite`. Returns the weight before each step and
/// after the last.
template <class Optimizer, class Schedule>
std::vector<double> train(torch::Tensor parameter, Optimizer& optimizer, Schedule& schedule,
                          mezzo::GradScaler& scaler, const std::vector<bool>& finite) {
  std::vector<double> weights{parameter.item<double>()};
  for (const bool is_finite : finite) {
    optimizer.zero_grad();
    const double slope = is_finite ? 1 : std::numeric_limits<double>::infinity();
    scaler.scale(parameter.mul(slope).sum()).backward();
    const auto result = scaler.step(optimizer, {});
    scaler.update();
    schedule.step(result);
    weights.push_back(parameter.item<double>());
  }
  return weights;
}

mezzo::GradScaler make_scaler() {
  mezzo::GradScaler scaler(mezzo::GradScalerOptions::dynamic({.init_scale = 4}));
  scaler.on_skip(nullptr);
  return scaler;
}

TEST(LrSchedule, WarnsWhenCountingSkippedStep) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  const auto has_warned = [](auto&& optimizer, const std::vector<double>& slopes) {
    const test_support::WarningRecorder warnings;
    const torch::Tensor parameter = optimizer.param_groups()[0].params()[0];
    LinearSchedule schedule(optimizer, {.total_steps = 4});
    mezzo::GradScaler scaler = make_scaler();
    for (const double slope : slopes) {
      optimizer.zero_grad();
      scaler.scale(parameter.mul(slope).sum()).backward();
      scaler.step(optimizer, {});
      scaler.update();
      schedule.step();
    }
    return warnings.texts;
  };
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_THAT(has_warned(torch::optim::SGD({weight()}, 1.0), {inf}),
              ElementsAre(HasSubstr("schedule.step(result)")));
  EXPECT_THAT(has_warned(torch::optim::SGD({weight()}, 1.0), {inf, 1, 1}).size(), 1U)
      << "only the first skipped step warns";
  EXPECT_THAT(has_warned(torch::optim::SGD({weight()}, 1.0), {1}), ElementsAre());
  EXPECT_THAT(has_warned(mezzo::optim::SGD({weight()}, 1.0), {inf}), ElementsAre());
}

TEST(LrSchedule, ScalesBaseLrsAndLaterGroups) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(make_group(1.0));
  groups.push_back(make_group(0.25));
  torch::optim::SGD optimizer(std::move(groups), torch::optim::SGDOptions(9.0));
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  schedule.step();
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.75, 0.1875));
  optimizer.add_param_group(make_group(8.0));
  schedule.step(make_result(/*applied=*/false));
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.75, 0.1875, 6.0));
  schedule.step();
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.5, 0.125, 4.0));
  EXPECT_THAT(schedule.base_lrs(), ElementsAre(1.0, 0.25, 8.0));
}

TEST(LrSchedule, ReturnsLrsOfNextTorchStep) {
  const torch::Tensor late = weight();
  torch::optim::SGD optimizer({weight()}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  schedule.step();
  optimizer.add_param_group({{late}, std::make_unique<torch::optim::SGDOptions>(8.0)});
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.75, 8.0)) << "the new group has no factor yet";
  late.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_EQ(late.item<float>(), -8.0F);
  schedule.step();
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.5, 4.0));
  for (int i = 0; i < 2; ++i) schedule.step();
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.0, 0.0));
  optimizer.param_groups()[0].options().set_lr(0.125);
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.125, 0.0));
}

TEST(LrSchedule, InvalidCurvePreservesOptimizer) {
  torch::optim::SGD optimizer({weight()}, 2.0);
  EXPECT_THAT([&] { LinearSchedule schedule(optimizer, {.warmup_steps = 3, .total_steps = 2}); },
              ThrowsMessage<c10::Error>(HasSubstr("warmup_steps is 3")));
  EXPECT_EQ(get_group_lr(optimizer), 2.0);
}

// --- The lr option

/// Returns the lr option before each of six steps; the third overflows.
template <class Optimizer, class Wrapper>
std::vector<double> get_lr_options(Optimizer& optimizer, Wrapper& wrapper) {
  LinearSchedule schedule(wrapper, {.warmup_steps = 2, .total_steps = 4});
  mezzo::GradScaler scaler = make_scaler();
  const torch::Tensor parameter = optimizer.param_groups()[0].params()[0];
  std::vector<double> lrs;
  for (const bool is_finite : {true, true, false, true, true, true}) {
    lrs.push_back(get_group_lr(optimizer));
    const double slope = is_finite ? 1 : std::numeric_limits<double>::infinity();
    optimizer.zero_grad();
    scaler.scale(parameter.mul(slope).sum()).backward();
    const auto result = scaler.step(wrapper);
    scaler.update();
    schedule.step(result);
    EXPECT_THAT(schedule.lrs(), ElementsAre(get_group_lr(optimizer)));
  }
  return lrs;
}

TEST(LrOption, HoldsLrOfNextStep) {
  const auto rates = ElementsAre(0, 0.25, 0.5, 0.5, 0.25, 0);
  torch::optim::SGD libtorchs({weight()}, 0.5);
  EXPECT_THAT(get_lr_options(libtorchs, libtorchs), rates);
  mezzo::optim::SGD mezzo_sgd({weight()}, 0.5);
  EXPECT_THAT(get_lr_options(mezzo_sgd, mezzo_sgd), rates);
  torch::optim::SGD inner({weight()}, 0.5);
  mezzo::MasterWeights masters(inner);
  EXPECT_THAT(get_lr_options(inner, masters), rates);
}

/// A step that a device decides, ready when `is_ready` is set.
class ManualStepFuture final : public mezzo::StepFuture {
 public:
  bool ready() const noexcept override { return is_ready; }
  const mezzo::StepResult::Values& values() override {
    EXPECT_TRUE(is_ready) << "the schedule synchronized with a device";
    return values_;
  }
  bool is_ready = false;

 private:
  mezzo::StepResult::Values values_{.applied = true};
};

/// Counts steps in a tensor, as for GPU parameters.
struct DeviceCountSgd : mezzo::optim::SGD {
  using SGD::SGD;
  void count_step() {
    step();
    applied_steps_.step_count().move_to(torch::full({}, static_cast<float>(applied_steps())));
  }
};

TEST(LrOption, FollowsCompletedDeviceSteps) {
  const torch::Tensor parameter = weight();
  DeviceCountSgd optimizer({parameter}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 8});
  std::vector<std::shared_ptr<ManualStepFuture>> futures;
  for (int step = 0; step < 3; ++step) {
    parameter.mutable_grad() = torch::ones({1});
    optimizer.count_step();
    futures.push_back(std::make_shared<ManualStepFuture>());
    schedule.step(StepResult(futures.back()));
  }
  ASSERT_FALSE(optimizer.has_host_step_count());
  EXPECT_EQ(get_group_lr(optimizer), 1.0);
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.625)) << "three steps are applied on the device";
  futures[0]->is_ready = true;
  futures[2]->is_ready = true;
  schedule.step(make_result(/*applied=*/false));
  EXPECT_EQ(get_group_lr(optimizer), 0.75);
  EXPECT_EQ(parameter.item<double>(), -1 - 0.875 - 0.75)
      << "each factor multiplies the base lr once";
}

TEST(LrOption, ManualLrLastsOneStep) {
  const auto steps = [](auto&& optimizer) {
    const torch::Tensor parameter = optimizer.param_groups()[0].params()[0];
    LinearSchedule schedule(optimizer, {.total_steps = 4});
    std::vector<double> weights;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) optimizer.param_groups()[0].options().set_lr(get_group_lr(optimizer) / 2);
      parameter.mutable_grad() = torch::ones({1});
      optimizer.step();
      schedule.step();
      weights.push_back(parameter.template item<double>());
    }
    EXPECT_THAT(schedule.base_lrs(), ElementsAre(8.0));
    return weights;
  };
  const auto halved_once = ElementsAre(-8, -14, -16, -18);
  EXPECT_THAT(steps(torch::optim::SGD({weight()}, 8.0)), halved_once);
  EXPECT_THAT(steps(mezzo::optim::SGD({weight()}, 8.0)), halved_once);
}

TEST(LrOption, WarmupManualLrLastsOneStep) {
  const torch::Tensor parameter = weight();
  mezzo::optim::SGD optimizer({parameter}, 8.0);
  LinearSchedule schedule(optimizer, {.warmup_steps = 2, .total_steps = 4});
  EXPECT_EQ(get_group_lr(optimizer), 0.0);
  optimizer.param_groups()[0].options().set_lr(2.0);
  EXPECT_THAT(schedule.lrs(), ElementsAre(2.0));
  parameter.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_EQ(parameter.item<double>(), -2.0);
  schedule.step();
  EXPECT_THAT(schedule.lrs(), ElementsAre(4.0)) << "half of the base lr";
}

TEST(LrOption, ZeroLrPreservesBaseLr) {
  const auto rates = [](auto&& optimizer) {
    const torch::Tensor parameter = optimizer.param_groups()[0].params()[0];
    LinearSchedule schedule(optimizer, {.total_steps = 10});
    std::vector<double> lrs;
    for (int step = 0; step < 6; ++step) {
      if (step == 2 || step == 3) optimizer.param_groups()[0].options().set_lr(0.0);
      lrs.push_back(schedule.lrs()[0]);
      parameter.mutable_grad() = torch::ones({1});
      optimizer.step();
      schedule.step();
    }
    return lrs;
  };
  const auto wanted = Pointwise(DoubleEq(), std::vector<double>{1.0, 0.9, 0.0, 0.0, 0.6, 0.5});
  EXPECT_THAT(rates(torch::optim::SGD({weight()}, 1.0)), wanted);
  EXPECT_THAT(rates(mezzo::optim::SGD({weight()}, 1.0)), wanted);
  EXPECT_THAT(rates(mezzo::optim::AdamW({weight()}, 1.0)), wanted);
}

TEST(LrOption, IsBaseLrAfterScheduleEnds) {
  mezzo::optim::SGD optimizer({weight()}, 8.0);
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  optimizer.step();
  schedule.step();
  EXPECT_EQ(get_group_lr(optimizer), 6.0);
  optimizer.set_lr_factors({});
  EXPECT_EQ(get_group_lr(optimizer), 8.0);
  optimizer.param_groups()[0].options().set_lr(1.0);
  LinearSchedule next(optimizer, {.total_steps = 4});
  EXPECT_THAT(next.base_lrs(), ElementsAre(1.0));
}

TEST(LrSchedule, ThrowsForCurveBeyondDeviceCount) {
  mezzo::optim::AdamW optimizer({weight()}, 1e-3);
  EXPECT_THAT([&] { LinearSchedule(optimizer, {.total_steps = 1 << 24}); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("total_steps is 16777216; it should be from 0 to 16777215")));
  EXPECT_TRUE(optimizer.lr_factors().empty());
}

TEST(LrSchedule, FollowsAddedAndRemovedGroups) {
  const torch::Tensor first = weight();
  const torch::Tensor late = weight();
  mezzo::optim::SGD optimizer({first}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  mezzo::GradScaler scaler = make_scaler();
  train(first, optimizer, schedule, scaler, {true});
  optimizer.add_param_group({{late}, std::make_unique<mezzo::optim::SGDOptions>(8.0)});
  train(late, optimizer, schedule, scaler, {true});
  EXPECT_EQ(late.item<double>(), -6.0);
  optimizer.param_groups().pop_back();
  train(first, optimizer, schedule, scaler, {true});
  EXPECT_EQ(get_group_lr(optimizer), 0.25);
}

struct Halving {
  int64_t total_steps = 3;
  double factor(int64_t applied_steps) const {
    return 1.0 / static_cast<double>(1 << std::min(applied_steps, total_steps));
  }
};

TEST(LrSchedule, AcceptsCustomCurve) {
  torch::optim::SGD host({weight()}, 1.0);
  mezzo::LrSchedule schedule(host, Halving());
  schedule.step();
  schedule.step();
  EXPECT_EQ(get_group_lr(host), 0.25);
  mezzo::optim::SGD fused({weight()}, 1.0);
  const mezzo::LrSchedule table(fused, Halving());
  EXPECT_THAT(fused.lr_factors(), ElementsAre(1, 0.5, 0.25, 0.125));
}

TEST(LrSchedule, SetAppliedStepsMovesLrs) {
  torch::optim::SGD optimizer({weight()}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  schedule.set_applied_steps(3);
  EXPECT_EQ(get_group_lr(optimizer), 0.25);
  EXPECT_THAT([&] { schedule.set_applied_steps(-1); },
              ThrowsMessage<c10::Error>(HasSubstr("applied_steps is -1")));
  mezzo::optim::SGD fused({weight()}, 1.0);
  LinearSchedule table(fused, {.total_steps = 4});
  table.set_applied_steps(3);
  EXPECT_EQ(fused.applied_steps(), 3);
  EXPECT_THAT(table.lrs(), ElementsAre(0.25));
}

TEST(LrSchedule, CountsStepsWithoutGradients) {
  const auto count_five_steps = [](auto& wrapper, auto& optimizer, const torch::Tensor& parameter) {
    LinearSchedule schedule(wrapper, {.total_steps = 10});
    for (const bool has_gradient : {false, true, true, false, true}) {
      optimizer.zero_grad();
      parameter.mutable_grad() = has_gradient ? torch::ones_like(parameter) : torch::Tensor();
      wrapper.step();
      schedule.step();
    }
    EXPECT_THAT(schedule.lrs(), ElementsAre(0.5));
    EXPECT_DOUBLE_EQ(parameter.template item<double>(), -2.3)
        << "the lrs of the steps are 0.9, 0.8 and 0.6";
    return schedule.applied_steps();
  };
  const auto parameter = [] { return torch::zeros({1}, torch::kDouble).requires_grad_(); };
  const torch::Tensor first = parameter();
  torch::optim::SGD libtorchs({first}, 1.0);
  EXPECT_EQ(count_five_steps(libtorchs, libtorchs, first), 5);
  const torch::Tensor second = parameter();
  mezzo::optim::SGD mezzo_sgd({second}, 1.0);
  EXPECT_EQ(count_five_steps(mezzo_sgd, mezzo_sgd, second), 5);
  const torch::Tensor third = parameter();
  torch::optim::SGD inner({third}, 1.0);
  mezzo::MasterWeights masters(inner);
  EXPECT_EQ(count_five_steps(masters, inner, third), 5);
}

/// Trains, saves, loads and resumes. Returns the weights of the resumed steps.
template <class Before, class After>
std::vector<double> resume(bool load_before_attaching) {
  torch::Tensor parameter = weight();
  Before optimizer({parameter}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 8});
  mezzo::GradScaler scaler = make_scaler();
  train(parameter, optimizer, schedule, scaler, {true, false, true});
  const auto files = std::pair(save_to_string(optimizer), save_to_string(schedule));

  parameter = weight();
  After resumed({parameter}, 1.0);
  if (load_before_attaching) load_from_string(resumed, files.first);
  LinearSchedule again(resumed, {.total_steps = 8});
  if (!load_before_attaching) load_from_string(resumed, files.first);
  load_from_string(again, files.second);
  EXPECT_EQ(again.applied_steps(), 2);
  EXPECT_THAT(again.base_lrs(), ElementsAre(1.0));
  return train(parameter, resumed, again, scaler, {true, false, true});
}

TEST(LrScheduleArchive, ResumesInEitherConstructionOrder) {
  const auto goes_on = ElementsAre(0, -0.75, -0.75, -1.375);
  for (const bool first : {false, true}) {
    EXPECT_THAT((resume<torch::optim::SGD, torch::optim::SGD>(first)), goes_on);
    EXPECT_THAT((resume<mezzo::optim::SGD, mezzo::optim::SGD>(first)), goes_on);
  }
  EXPECT_THAT((resume<mezzo::optim::SGD, torch::optim::SGD>(false)), goes_on);
}

TEST(LrScheduleArchive, MovesFromTorchToMezzoOptimizer) {
  const auto move = [](auto before, auto after) {
    LinearSchedule schedule(before, {.total_steps = 8});
    mezzo::GradScaler scaler = make_scaler();
    train(before.param_groups()[0].params()[0], before, schedule, scaler, {true, false, true});
    load_from_string(after, save_to_string(before));
    LinearSchedule again(after, {.total_steps = 8});
    load_from_string(again, save_to_string(schedule));
    return again.lrs();
  };
  EXPECT_THAT(move(torch::optim::AdamW({weight()}, 1.0), mezzo::optim::AdamW({weight()}, 1.0)),
              ElementsAre(0.75));
  const test_support::WarningRecorder warnings;
  EXPECT_THAT(move(torch::optim::SGD({weight()}, 1.0), mezzo::optim::SGD({weight()}, 1.0)),
              ElementsAre(0.75));
}

TEST(LrScheduleArchive, OptimizerArchiveHoldsBaseLrs) {
  const auto resume_both = [](auto& optimizer, auto& wrapper, auto& resumed,
                              auto& resumed_stepper) {
    LinearSchedule schedule(wrapper, {.total_steps = 4});
    wrapper.step();
    schedule.step();
    load_from_string(resumed_stepper, save_to_string(wrapper));
    EXPECT_EQ(get_group_lr(resumed), get_group_lr(optimizer))
        << "the saved lr, for a run without a schedule";
    LinearSchedule again(resumed_stepper, {.total_steps = 4});
    EXPECT_THAT(again.base_lrs(), ElementsAre(8.0));
    EXPECT_EQ(get_group_lr(resumed), 6.0);
  };
  mezzo::optim::SGD first({weight()}, 8.0);
  mezzo::optim::SGD second({weight()}, 1.0);
  resume_both(first, first, second, second);
  torch::optim::SGD inner({weight()}, 8.0);
  torch::optim::SGD other({weight()}, 1.0);
  mezzo::MasterWeights masters(inner);
  mezzo::MasterWeights other_masters(other);
  resume_both(inner, masters, other, other_masters);
}

TEST(LrScheduleArchive, ManualLrSurvivesNewSchedule) {
  mezzo::optim::SGD before({weight()}, 8.0);
  LinearSchedule schedule(before, {.total_steps = 4});
  before.step();
  schedule.step();
  mezzo::optim::SGD tuned({weight()}, 1.0);
  load_from_string(tuned, save_to_string(before));
  tuned.param_groups()[0].options().set_lr(0.5);
  tuned.set_applied_steps(0);
  LinearSchedule next(tuned, {.total_steps = 4});
  EXPECT_THAT(next.lrs(), ElementsAre(0.5));
}

/// The archive of 50 steps of torch::optim::SGD, which has no step count.
struct HalfRun {
  HalfRun() {
    torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(2.0).momentum(0.9));
    LinearSchedule schedule(optimizer, {.total_steps = 100});
    for (int step = 0; step < 50; ++step) {
      parameter.mutable_grad() = torch::ones({1});
      optimizer.step();
      schedule.step();
    }
    optimizer_file = save_to_string(optimizer);
    schedule_file = save_to_string(schedule);
  }
  torch::Tensor parameter = weight();
  std::string optimizer_file, schedule_file;
};

TEST(LrScheduleArchive, RestoresCountMissingInTorchSgd) {
  const HalfRun run;
  for (const bool steps_between : {false, true}) {
    test_support::WarningRecorder warnings;
    mezzo::optim::SGD optimizer({run.parameter}, 7.0);
    LinearSchedule schedule(optimizer, {.total_steps = 100});
    load_from_string(optimizer, run.optimizer_file);
    EXPECT_THAT(
        warnings.texts,
        ElementsAre(HasSubstr("SGD: the archive of torch::optim::SGD has no step count; load the "
                              "schedule's archive, or call set_applied_steps(n)")));
    EXPECT_EQ(optimizer.applied_steps(), 0);
    if (steps_between) optimizer.step();
    load_from_string(schedule, run.schedule_file);
    EXPECT_EQ(optimizer.applied_steps(), 50);
    EXPECT_THAT(schedule.base_lrs(), ElementsAre(2.0));
    EXPECT_THAT(schedule.lrs(), ElementsAre(1.0)) << "a factor of 0.5";
  }
}

TEST(LrScheduleArchive, ThrowsForOtherGroupsOrArchives) {
  torch::optim::SGD optimizer({weight()}, 1.0);
  LinearSchedule schedule(optimizer, {.total_steps = 4});
  schedule.step();
  const std::string file = save_to_string(schedule);

  torch::optim::SGD other({weight()}, 4.0);
  other.add_param_group(make_group(2.0));
  LinearSchedule wider(other, {.total_steps = 4});
  EXPECT_THAT([&] { load_from_string(wider, file); },
              ThrowsMessage<c10::Error>(HasSubstr("parameter groups, 1, than this optimizer, 2")));
  EXPECT_THAT(wider.lrs(), ElementsAre(4.0, 2.0));
  EXPECT_EQ(wider.applied_steps(), 0);

  const std::string tensor = save_to_string(torch::ones({2}));
  EXPECT_THAT([&] { load_from_string(schedule, tensor); },
              ThrowsMessage<c10::Error>(HasSubstr("This archive is not that of a schedule")));
  const std::vector<double> rates{1.0};
  for (const auto& [steps, lrs, message] :
       std::vector<std::tuple<c10::IValue, c10::IValue, std::string>>{
           {2, c10::IValue(), "is not that of a schedule"},
           {2.0, rates, "is not that of a schedule"},
           {2, 1.0, "is not that of a schedule"},
           {-1, rates, "has -1 applied steps"},
           {2, std::vector<double>{kNan}, "has the base lrs [nan]"}}) {
    torch::serialize::OutputArchive archive;
    archive.write("applied_steps", steps);
    if (!lrs.isNone()) archive.write("base_lrs", lrs);
    std::ostringstream bytes;
    archive.save_to(bytes);
    EXPECT_THAT([&] { load_from_string(schedule, bytes.str()); },
                ThrowsMessage<c10::Error>(HasSubstr(message)));
  }
  mezzo::optim::SGD mezzo_sgd({weight()}, 1.0);
  EXPECT_THAT(
      [&] {
        mezzo_sgd.set_base_lrs({1.0, 2.0});
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("expected 1 learning rates, one for each param group, but got 2")));
  EXPECT_EQ(schedule.applied_steps(), 1);
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.75));
}

TEST(StepProgress, ThrowsForCorruptOptimizerOrSchedule) {
  const auto read = [](const c10::IValue& steps, const std::vector<double>& lrs,
                       const char* owner) {
    torch::serialize::OutputArchive archive;
    archive.write("applied_steps", steps);
    archive.write("base_lrs", c10::IValue(lrs));
    std::stringstream bytes;
    archive.save_to(bytes);
    torch::serialize::InputArchive input;
    input.load_from(bytes);
    return mezzo::detail::read_progress(input, /*num_groups=*/1, owner);
  };
  for (const std::string owner : {"an optimizer", "a schedule"}) {
    const auto error = [&](const c10::IValue& steps, const std::vector<double>& lrs) {
      return message_of([&] { read(steps, lrs, owner.c_str()); });
    };
    EXPECT_EQ(read(3, {0.5}, owner.c_str()).applied_steps, 3);
    EXPECT_THAT(error(-1, {0.5}), HasSubstr("The archive of " + owner + " has -1 applied steps"));
    EXPECT_THAT(error(2.0, {0.5}), HasSubstr(owner + " has 2. applied steps"));
    EXPECT_THAT(error(3, {0.5, 0.5}), HasSubstr("groups, 2, than this optimizer, 1"));
    EXPECT_THAT(error(3, {kNan}), HasSubstr("has the base lrs [nan]"));
  }
}

// --- lr factors.

GradStats make_grad_stats(bool found_inf) {
  return {torch::ones({}), torch::full({}, found_inf ? 1.0F : 0.0F)};
}

TEST(LrFactors, ApplyForEachWeightStorage) {
  for (const test_support::WeightStorageCase& storage_case : test_support::weight_storage_cases()) {
    const torch::Tensor parameter = torch::zeros({2}, storage_case.dtype).requires_grad_();
    const test_support::OwnedOptimizer owned = storage_case.make({parameter});
    mezzo::optim::MixedPrecisionOptimizer* const optimizer = owned.ref().mixed_precision();
    if (optimizer == nullptr) continue;
    SCOPED_TRACE(storage_case.name);
    optimizer->set_lr_factors({1.0, 0.5, 0.25, 0.125});
    double expected = 0;
    for (const double factor : {1.0, 0.5, 0.25, 0.125, 0.125}) {  // without set_optimizer_lrs
      parameter.mutable_grad() = torch::ones_like(parameter.detach());
      (void)owned.ref().step();
      expected -= factor;
      EXPECT_EQ(parameter[0].item<double>(), expected);
      EXPECT_EQ(owned.inner->param_groups()[0].options().get_lr(), 1.0)
          << "a step does not change the lr option";
    }
  }
}

TEST(LrFactors, ThrowingInnerStepPreservesLrOption) {
  const torch::Tensor parameter = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  test_support::ThrowingSgd inner({parameter}, 1.0);
  mezzo::MasterWeights masters(inner);
  masters.set_lr_factors({1.0, 0.5, 0.25});
  for (const bool throws : {false, true, false}) {
    inner.throws = throws;
    parameter.mutable_grad() = torch::ones_like(parameter.detach());
    EXPECT_EQ(test_support::throws([&] { masters.step(); }), throws);
    EXPECT_EQ(inner.param_groups()[0].options().get_lr(), 1.0);
  }
  EXPECT_EQ(parameter[0].item<double>(), -1.5);
}

class LrFactorUpdates : public testing::TestWithParam<bool> {
 protected:
  /// Returns the update of a step of SGD with gradient 1.
  double step(bool found_inf = false) {
    const double before = parameter_.item<double>();
    parameter_.mutable_grad() = torch::ones({}, torch::kDouble);
    optimizer_.apply(optimizer_.plan(), make_grad_stats(found_inf));
    return before - parameter_.item<double>();
  }

  template <class Optimizer>
  std::unique_ptr<SGD> make() const {
    return std::make_unique<Optimizer>(std::vector{parameter_}, SGDOptions(0.5));
  }

  torch::Tensor parameter_ = torch::zeros({}, torch::kDouble).requires_grad_();
  std::unique_ptr<SGD> owned_ = GetParam() ? make<test_support::AtenOptimizer<SGD>>() : make<SGD>();
  SGD& optimizer_ = *owned_;
};

TEST_P(LrFactorUpdates, FollowTableThenLastFactor) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.0, 2.0});
  for (const double expected : {0.5, 0.25, 0.0, 1.0, 1.0, 1.0}) {
    EXPECT_DOUBLE_EQ(step(), expected);
  }
  EXPECT_EQ(optimizer_.applied_steps(), 6);
}

TEST_P(LrFactorUpdates, SkippedStepsConsumeNoFactor) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.25});
  EXPECT_EQ(step(true), 0);
  EXPECT_EQ(optimizer_.applied_steps(), 0);
  EXPECT_DOUBLE_EQ(step(), 0.5);
  EXPECT_EQ(step(true), 0);
  EXPECT_EQ(step(true), 0);
  EXPECT_DOUBLE_EQ(step(), 0.25);
  EXPECT_EQ(optimizer_.applied_steps(), 2);
}

TEST_P(LrFactorUpdates, ResumeFromSetAppliedSteps) {
  optimizer_.set_lr_factors({1.0, 0.5, 0.25, 0.125});
  optimizer_.set_applied_steps(2);
  EXPECT_DOUBLE_EQ(step(), 0.125) << "before any step";
  optimizer_.set_applied_steps(1);
  EXPECT_EQ(step(true), 0);
  EXPECT_DOUBLE_EQ(step(), 0.25);
  EXPECT_EQ(optimizer_.applied_steps(), 2);
  const std::string file = test_support::save_to_string(optimizer_);
  SGD resumed({parameter_}, SGDOptions(3));
  test_support::load_from_string(resumed, file);
  EXPECT_EQ(resumed.applied_steps(), 2);
}

INSTANTIATE_TEST_SUITE_P(AllPaths, LrFactorUpdates, testing::Bool(), [](const auto& one) {
  return one.param ? "ThroughAten" : "ByMezzosKernels";
});

TEST(LrFactors, CountOptimizerSteps) {
  const auto always = torch::zeros({1}).requires_grad_();
  const auto seldom = torch::zeros({1}).requires_grad_();
  SGD optimizer({always, seldom}, SGDOptions(1.0));
  optimizer.set_lr_factors({1.0, 0.5, 0.25});
  always.mutable_grad() = torch::ones({1});
  optimizer.step();
  optimizer.step();
  seldom.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_EQ(seldom.item<float>(), -0.25F);
}

TEST(LrFactors, ThrowForInvalidFactor) {
  const auto parameter = torch::zeros({1}).requires_grad_();
  SGD optimizer({parameter}, SGDOptions(1.0));
  for (const double bad :
       {-0.5, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(
        [&] {
          optimizer.set_lr_factors({1.0, bad});
        },
        ThrowsMessage<c10::Error>(HasSubstr("factors[1] is")));
  }
  EXPECT_TRUE(optimizer.lr_factors().empty());
}

TEST(AppliedSteps, SettingPreservesParamSteps) {
  const auto parameter = torch::zeros({4}).requires_grad_();
  AdamW optimizer({parameter}, AdamWOptions(0.1));
  parameter.mutable_grad() = torch::ones({4});
  optimizer.step();
  optimizer.set_applied_steps(1000);
  const auto& state =
      static_cast<mezzo::optim::AdamWParamState&>(*optimizer.state().begin()->second);
  EXPECT_EQ(state.step(), 1);
  EXPECT_EQ(optimizer.applied_steps(), 1000);
  EXPECT_THAT([&] { optimizer.set_applied_steps(-1); },
              ThrowsMessage<c10::Error>(HasSubstr("applied_steps is -1")));
  EXPECT_EQ(optimizer.applied_steps(), 1000);
}

}  // namespace
