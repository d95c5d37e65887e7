// What users do to an optimizer between two steps, to mezzo's and to libtorch's of the same name.

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
using MakeOfGroups = std::function<std::unique_ptr<Optimizer>(Groups)>;

/// Makes an optimizer whose second group has four times the rate of the first.
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
  MakeOfGroups ours;
  MakeOfGroups theirs;
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

/// Parameters with four dimensions, none, no elements, and one; two in each group. They and their
/// gradients have values of bfloat16 in any dtype.
struct Training {
  explicit Training(const MakeOfGroups& make_optimizer, torch::ScalarType dtype = torch::kDouble)
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

  std::vector<Tensor>& group(std::size_t number) {
    return optimizer->param_groups()[number].params();
  }

  MakeOfGroups make;
  std::vector<Tensor> parameters;
  std::unique_ptr<Optimizer> optimizer;
};

/// Called before each of six steps, with gradients in place.
struct Change {
  std::string name;
  std::function<void(Training&, int step)> apply;
};
std::ostream& operator<<(std::ostream& stream, const Change& change) {
  return stream << change.name;
}

void set_first_gradient(const Training& training, const Tensor& gradient) {
  training.parameters[0].mutable_grad() = gradient;
}

Tensor first_gradient(const Training& training) { return training.parameters[0].grad(); }

const Change kChanges[] = {
    {"Nothing", [](Training&, int) {}},
    {"GradientsInChannelsLast",
     [](Training& training, int) {
       set_first_gradient(training,
                          first_gradient(training).contiguous(torch::MemoryFormat::ChannelsLast));
     }},
    {"ExpandedGradients",
     [](Training& training, int) {
       const Tensor gradient = first_gradient(training);
       set_first_gradient(training, gradient.slice(0, 0, 1).expand_as(gradient));
     }},
    {"GradientsOfAFlatBuffer",
     [](Training& training, int) {
       const Tensor gradient = first_gradient(training);
       const Tensor flat = torch::cat({torch::ones({3}, torch::kDouble), gradient.flatten()});
       set_first_gradient(training, flat.slice(0, 3).view_as(gradient));
     }},
    {"GradientsWithAGraph",
     [](Training& training, int) {
       set_first_gradient(training, first_gradient(training).detach().requires_grad_() * 2);
     }},
    {"GradientsOfFloat",
     [](Training& training, int) {
       set_first_gradient(training, first_gradient(training).to(torch::kFloat));
     }},
    {"NoGradientsInTheThirdStep",
     [](Training& training, int step) {
       if (step == 2) training.optimizer->zero_grad();
     }},
    {"NoGradientsInTheFirstStep",
     [](Training& training, int step) {
       if (step == 0) training.optimizer->zero_grad();
     }},
    {"ZeroedGradients",
     [](Training& training, int step) {
       if (step == 2) training.optimizer->zero_grad(/*set_to_none=*/false);
     }},
    {"AFrozenParameterThatKeepsItsGradient",
     [](Training& training, int step) { training.parameters[0].requires_grad_(step < 2); }},
    {"AParameterThatIsTakenOutAndComesBack",
     [](Training& training, int step) {
       if (step == 2) training.group(0).pop_back();
       if (step == 4) training.group(0).push_back(training.parameters[1]);
     }},
    {"AParameterGivenOtherMemory",
     [](Training& training, int step) {
       if (step == 2) training.parameters[3].set_data(torch::ones({5}, torch::kDouble));
     }},
    {"AnotherOptimizerWithACopyOfTheState",
     [](Training& training, int step) {
       if (step != 2) return;
       auto next = training.make(training.optimizer->param_groups());
       for (const auto& [key, state] : training.optimizer->state()) {
         next->state()[key] = state->clone();
       }
       training.optimizer = std::move(next);
     }},
    {"AStateThatIsForgotten",
     [](Training& training, int step) {
       if (step == 2) training.optimizer->state().clear();
     }},
};

/// Changes that leave the same parameters in the optimizer.
const Change kRearrangements[] = {
    {"AnEmptyGroup",
     [](Training& training, int step) {
       if (step == 2) {
         training.optimizer->add_param_group(torch::optim::OptimizerParamGroup({}));
       }
     }},
    {"AnEmptyFirstGroup",
     [](Training& training, int step) {
       if (step != 2) return;
       auto& groups = training.optimizer->param_groups();
       groups.insert(groups.begin(), groups.front());
       groups.front().params().clear();
     }},
    {"AParameterThatMovesToTheOtherGroup",
     [](Training& training, int step) {
       if (step != 2) return;
       training.group(1).push_back(training.group(0).back());
       training.group(0).pop_back();
     }},
    {"ParametersInAnotherOrder",
     [](Training& training, int step) {
       if (step == 2) std::swap(training.group(0)[0], training.group(0)[1]);
     }},
    {"GroupsInAnotherOrder",
     [](Training& training, int step) {
       if (step != 2) return;
       auto& groups = training.optimizer->param_groups();
       std::reverse(groups.begin(), groups.end());
     }},
};

void expect_alike(const Training& ours, const Training& theirs) {
  for (std::size_t i = 0; i < ours.parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours.parameters[i], theirs.parameters[i], 1e-12, 1e-13)) << i;
  }
}

using Probe = std::tuple<OptimizerPair, Change>;

std::string name_of_probe(const testing::TestParamInfo<Probe>& info) {
  return std::get<0>(info.param).name + std::get<1>(info.param).name;
}

class OptimizerProbes : public testing::TestWithParam<Probe> {};

TEST_P(OptimizerProbes, GiveTorchsNumbers) {
  const auto& [pair, change] = GetParam();
  Training ours(pair.ours), theirs(pair.theirs);
  for (int step = 0; step < 6; ++step) {
    for (Training* training : {&ours, &theirs}) {
      training->set_gradients(step);
      change.apply(*training, step);
      training->optimizer->step();
    }
  }
  expect_alike(ours, theirs);
}

INSTANTIATE_TEST_SUITE_P(Changes, OptimizerProbes,
                         testing::Combine(testing::Values(kAdam, kAdamW, kSgd),
                                          testing::ValuesIn(kChanges)),
                         name_of_probe);
INSTANTIATE_TEST_SUITE_P(Rearrangements, OptimizerProbes,
                         testing::Combine(testing::Values(kAdam, kAdamW, kSgd),
                                          testing::ValuesIn(kRearrangements)),
                         name_of_probe);

constexpr double kScale = 1024;

/// A power of two comes off to the bit, so that the scaler must not show. The change comes before
/// `step`, which unscales; or between `unscale_` and `step`.
void expect_scaler_makes_no_difference(const MakeOfGroups& make, const Change& change,
                                       bool is_changed_after_unscale) {
  Training plain(make), scaled(make);
  mezzo::GradScaler scaler({.init_scale = kScale});
  for (int step = 0; step < 6; ++step) {
    plain.set_gradients(step);
    change.apply(plain, step);
    plain.optimizer->step();

    (void)scaler.scale(torch::zeros({}));
    scaled.set_gradients(step, kScale);
    if (is_changed_after_unscale) scaler.unscale_(*scaled.optimizer);
    change.apply(scaled, step);
    if (!scaled.parameters[0].grad().defined()) continue;  // nothing was checked: torch throws here
    scaler.step(*scaled.optimizer);
    scaler.update();
  }
  expect_alike(scaled, plain);
}

class ScaledOptimizerProbes : public testing::TestWithParam<Probe> {};

TEST_P(ScaledOptimizerProbes, GiveTheNumbersOfNoScaler) {
  const auto& [pair, change] = GetParam();
  expect_scaler_makes_no_difference(pair.ours, change, false);
  if (change.name == "ExpandedGradients") return;  // which ATen does not write in place
  expect_scaler_makes_no_difference(pair.theirs, change, false);
}

INSTANTIATE_TEST_SUITE_P(Changes, ScaledOptimizerProbes,
                         testing::Combine(testing::Values(kAdamW, kSgd),
                                          testing::ValuesIn(kChanges)),
                         name_of_probe);

class RearrangedOptimizerProbes : public testing::TestWithParam<Probe> {};

TEST_P(RearrangedOptimizerProbes, AreNotUnscaledTwice) {
  const auto& [pair, change] = GetParam();
  for (const MakeOfGroups& make : {pair.ours, pair.theirs}) {
    expect_scaler_makes_no_difference(make, change, true);
  }
}

TEST_P(RearrangedOptimizerProbes, StepMastersToTheBitsOfAFloatModel) {
  const auto& [pair, change] = GetParam();
  Training low(pair.theirs, torch::kBFloat16), whole(pair.theirs, torch::kFloat);
  mezzo::MasterWeights masters(*low.optimizer);
  for (int step = 0; step < 6; ++step) {
    for (Training* training : {&low, &whole}) {
      training->set_gradients(step);
      change.apply(*training, step);
    }
    masters.step();
    whole.optimizer->step();
  }
  for (std::size_t i = 0; i < low.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(low.parameters[i], whole.parameters[i].to(torch::kBFloat16))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Rearrangements, RearrangedOptimizerProbes,
                         testing::Combine(testing::Values(kAdamW, kSgd),
                                          testing::ValuesIn(kRearrangements)),
                         name_of_probe);

// As the head of a model does for another task: what it left is no more than one step behind.
TEST(ReplacedParameters, TakeTheirStatesWithThem) {
  mezzo::optim::AdamW adamw({torch::ones({3}).requires_grad_()}, 1e-3);
  for (int step = 0; step < 10; ++step) {
    Tensor& place = adamw.param_groups()[0].params()[0];
    place = torch::ones({3}).requires_grad_();
    place.mutable_grad() = torch::ones({3});
    adamw.step();
    EXPECT_LE(adamw.state().size(), 2U) << step;
  }
}

}  // namespace
