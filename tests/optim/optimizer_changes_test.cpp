// Changes of an optimizer between two steps, compared with torch's optimizer of the same name.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;
using torch::optim::Optimizer;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using OptimizerFactory = std::function<std::unique_ptr<Optimizer>(Groups)>;

/// Makes an optimizer whose second group has four times the lr of the first.
template <class Made, class Options>
std::unique_ptr<Optimizer> make_optimizer(Groups groups) {
  Options options(1e-2);
  options.weight_decay(0.1);
  if constexpr (requires { options.momentum(0.9); }) options.momentum(0.9);
  auto made = std::make_unique<Made>(std::move(groups), options);
  made->param_groups().back().options().set_lr(4e-2);
  return made;
}

struct OptimizerPair {
  std::string name;
  OptimizerFactory ours;
  OptimizerFactory theirs;
};
std::ostream& operator<<(std::ostream& stream, const OptimizerPair& pair) {
  return stream << pair.name;
}

const OptimizerPair kAdam{"Adam", make_optimizer<mezzo::optim::Adam, mezzo::optim::AdamOptions>,
                          make_optimizer<torch::optim::Adam, torch::optim::AdamOptions>};
const OptimizerPair kAdamW{"AdamW", make_optimizer<mezzo::optim::AdamW, mezzo::optim::AdamWOptions>,
                           make_optimizer<torch::optim::AdamW, torch::optim::AdamWOptions>};
const OptimizerPair kSgd{"SGD", make_optimizer<mezzo::optim::SGD, mezzo::optim::SGDOptions>,
                         make_optimizer<torch::optim::SGD, torch::optim::SGDOptions>};

/// 4D, 0D, empty and 1D parameters, two in each group. Values and gradients are exact in bfloat16.
struct Training {
  explicit Training(const OptimizerFactory& make_optimizer,
                    torch::ScalarType dtype = torch::kDouble)
      : make(make_optimizer) {
    torch::manual_seed(1);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{4, 3, 2, 2}, {}, {0, 3}, {5}}) {
      parameters.push_back(torch::randn(shape, torch::kBFloat16).to(dtype).requires_grad_());
    }
    Groups groups;
    groups.emplace_back(std::vector{parameters[0], parameters[1]});
    groups.emplace_back(std::vector{parameters[2], parameters[3]});
    optimizer = make(std::move(groups));
  }

  void set_gradients(int step, double scale = 1) const {
    torch::manual_seed(100 + step);
    for (const Tensor& parameter : parameters) {
      parameter.mutable_grad() =
          (torch::randn(parameter.sizes(), torch::kBFloat16) * scale).to(parameter.scalar_type());
    }
  }

  OptimizerFactory make;
  std::vector<Tensor> parameters;
  std::unique_ptr<Optimizer> optimizer;
};

/// Applies a change before step `step` of six, when gradients are set.
void apply_change(const std::string& what, Training& training, int step) {
  Tensor& gradient = training.parameters[0].mutable_grad();
  auto& groups = training.optimizer->param_groups();
  if (what == "ChannelsLastGradient") {
    gradient = gradient.contiguous(torch::MemoryFormat::ChannelsLast);
  } else if (what == "ExpandedGradients") {
    gradient = Tensor(gradient).slice(0, 0, 1).expand_as(gradient);
  } else if (what == "FlatBufferGradient") {
    const Tensor flat = torch::cat({torch::ones({3}, torch::kDouble), gradient.flatten()});
    gradient = flat.slice(0, 3).view_as(gradient);
  } else if (what == "GradientWithGraph") {
    gradient = gradient.detach().requires_grad_() * 2;
  } else if (what == "Float32Gradient") {
    gradient = gradient.to(torch::kFloat);
  } else if (what == "FrozenParamWithGradient") {
    training.parameters[0].requires_grad_(step < 2);
  } else if (what == "NoGradientsInFirstStep" && step == 0) {
    training.optimizer->zero_grad();
  } else if (what == "RemovedAndReaddedParam" && step == 4) {
    groups[0].params().push_back(training.parameters[1]);
  }
  if (step != 2) return;
  if (what == "NoGradientsInThirdStep") training.optimizer->zero_grad();
  if (what == "ZeroedGradients") training.optimizer->zero_grad(/*set_to_none=*/false);
  if (what == "RemovedAndReaddedParam") groups[0].params().pop_back();
  if (what == "ReplacedParamData") {
    training.parameters[3].set_data(torch::ones({5}, torch::kDouble));
  } else if (what == "OptimizerWithClonedState") {
    auto next = training.make(groups);
    for (const auto& [key, state] : training.optimizer->state()) {
      next->state()[key] = state->clone();
    }
    training.optimizer = std::move(next);
  } else if (what == "ClearedState") {
    training.optimizer->state().clear();
  } else if (what == "EmptyGroup") {
    training.optimizer->add_param_group(torch::optim::OptimizerParamGroup({}));
  } else if (what == "EmptyFirstGroup") {
    groups.insert(groups.begin(), groups.front());
    groups.front().params().clear();
  } else if (what == "ParamMovedToOtherGroup") {
    groups[1].params().push_back(groups[0].params().back());
    groups[0].params().pop_back();
  } else if (what == "ReorderedParams") {
    std::swap(groups[0].params()[0], groups[0].params()[1]);
  } else if (what == "ReorderedGroups") {
    std::reverse(groups.begin(), groups.end());
  }
}

const char* const kChanges[] = {"Nothing",
                                "ChannelsLastGradient",
                                "ExpandedGradients",
                                "FlatBufferGradient",
                                "GradientWithGraph",
                                "Float32Gradient",
                                "NoGradientsInThirdStep",
                                "NoGradientsInFirstStep",
                                "ZeroedGradients",
                                "FrozenParamWithGradient",
                                "RemovedAndReaddedParam",
                                "ReplacedParamData",
                                "OptimizerWithClonedState",
                                "ClearedState"};
/// Changes that leave the same parameters in the optimizer.
const char* const kRearrangements[] = {"EmptyGroup", "EmptyFirstGroup", "ParamMovedToOtherGroup",
                                       "ReorderedParams", "ReorderedGroups"};

void expect_close(const Training& ours, const Training& theirs) {
  for (std::size_t i = 0; i < ours.parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours.parameters[i], theirs.parameters[i], 1e-12, 1e-13)) << i;
  }
}

using Change = std::tuple<OptimizerPair, const char*>;

std::string make_name(const testing::TestParamInfo<Change>& info) {
  return std::get<0>(info.param).name + std::get<1>(info.param);
}

class OptimizerChangesBetweenSteps : public testing::TestWithParam<Change> {};

TEST_P(OptimizerChangesBetweenSteps, MatchTorch) {
  const auto& [pair, what] = GetParam();
  Training ours(pair.ours), theirs(pair.theirs);
  for (int step = 0; step < 6; ++step) {
    for (Training* training : {&ours, &theirs}) {
      training->set_gradients(step);
      apply_change(what, *training, step);
      training->optimizer->step();
    }
  }
  expect_close(ours, theirs);
}

INSTANTIATE_TEST_SUITE_P(Changes, OptimizerChangesBetweenSteps,
                         testing::Combine(testing::Values(kAdam, kAdamW, kSgd),
                                          testing::ValuesIn(kChanges)),
                         make_name);
INSTANTIATE_TEST_SUITE_P(Rearrangements, OptimizerChangesBetweenSteps,
                         testing::Combine(testing::Values(kAdam, kAdamW, kSgd),
                                          testing::ValuesIn(kRearrangements)),
                         make_name);

constexpr double kScale = 1024;

/// Unscaling by a power of two is exact, so results equal unscaled training. The change is before
/// `step`, or between `unscale_` and `step`.
void expect_scaler_makes_no_difference(const OptimizerFactory& make, const std::string& what,
                                       bool is_changed_after_unscale) {
  Training plain(make), scaled(make);
  mezzo::GradScaler scaler({.init_scale = kScale});
  for (int step = 0; step < 6; ++step) {
    plain.set_gradients(step);
    apply_change(what, plain, step);
    plain.optimizer->step();

    (void)scaler.scale(torch::zeros({}));
    scaled.set_gradients(step, kScale);
    if (is_changed_after_unscale) scaler.unscale_(*scaled.optimizer);
    apply_change(what, scaled, step);
    if (!scaled.parameters[0].grad().defined()) continue;  // nothing was checked: torch throws here
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  expect_close(scaled, plain);
}

class ScaledOptimizerChangesBetweenSteps : public testing::TestWithParam<Change> {};

TEST_P(ScaledOptimizerChangesBetweenSteps, MatchUnscaledTraining) {
  const auto& [pair, what] = GetParam();
  expect_scaler_makes_no_difference(pair.ours, what, false);
  if (what == std::string("ExpandedGradients")) return;  // ATen does not write it in place
  expect_scaler_makes_no_difference(pair.theirs, what, false);
}

INSTANTIATE_TEST_SUITE_P(Changes, ScaledOptimizerChangesBetweenSteps,
                         testing::Combine(testing::Values(kAdamW, kSgd),
                                          testing::ValuesIn(kChanges)),
                         make_name);

class ParamGroupChangesBetweenSteps : public testing::TestWithParam<Change> {};

TEST_P(ParamGroupChangesBetweenSteps, UnscaleOnce) {
  const auto& [pair, what] = GetParam();
  for (const OptimizerFactory& make : {pair.ours, pair.theirs}) {
    expect_scaler_makes_no_difference(make, what, true);
  }
}

TEST_P(ParamGroupChangesBetweenSteps, MastersMatchFloat32Model) {
  const auto& [pair, what] = GetParam();
  Training low(pair.theirs, torch::kBFloat16), whole(pair.theirs, torch::kFloat);
  mezzo::MasterWeights masters(*low.optimizer);
  for (int step = 0; step < 6; ++step) {
    for (Training* training : {&low, &whole}) {
      training->set_gradients(step);
      apply_change(what, *training, step);
    }
    masters.step();
    whole.optimizer->step();
  }
  for (std::size_t i = 0; i < low.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(low.parameters[i], whole.parameters[i].to(torch::kBFloat16))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Rearrangements, ParamGroupChangesBetweenSteps,
                         testing::Combine(testing::Values(kAdamW, kSgd),
                                          testing::ValuesIn(kRearrangements)),
                         make_name);

}  // namespace
