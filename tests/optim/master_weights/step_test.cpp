// MasterWeights: any optimizer of libtorch's, or a user's own, trains float masters of half and
// bfloat16 parameters, and is an ordinary optimizer again after each step.

#include <mezzo/autocast/autocast.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../../support/state_of.h"
#include "master_model.h"

namespace {

using namespace master_weights_test;
using mezzo::GradScaler;
using mezzo::master_params;
using mezzo::MasterWeights;
using test_support::state_of;
using testing::HasSubstr;
using testing::ThrowsMessage;

class StepOfDtype : public testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(MasterWeightsStep, StepOfDtype,
                         testing::Values(torch::kHalf, torch::kBFloat16));

void expect_rounded(const Model& model, const Tensors& masters) {
  for (std::size_t i = 0; i < masters.size(); ++i) {
    EXPECT_EQ(masters[i].scalar_type(), torch::kFloat);
    const auto& parameter = model.parameters[i];
    EXPECT_THAT(parameter, SameBits(masters[i].to(parameter.scalar_type()))) << i;
  }
}

TEST_P(StepOfDtype, TrainsTheBitsOfAFloatModel) {
  for (const MakeOptimizer& make : libtorch_optimizers()) {
    const Model model(GetParam());
    const Model floats = model.in_float();
    const auto inner = make(model.groups());
    const auto reference = make(floats.groups());
    MasterWeights optimizer(*inner);
    GradScaler scaler = quiet_scaler();
    for (int step = 0; step < 8; ++step) {
      model.set_gradients(step);
      floats.take_gradients(model);
      EXPECT_TRUE(scaler.step(optimizer).ran());
      scaler.update();
      reference->step();
    }
    EXPECT_THAT(master_params(optimizer), SameBits(floats.parameters));
    expect_rounded(model, master_params(optimizer));
    EXPECT_EQ(optimizer.applied_steps(), 8);
  }
}

TEST_P(StepOfDtype, BumpsTheVersionsOfWhatItWrites) {
  const Model model(GetParam());
  torch::optim::SGD inner(model.groups(), torch::optim::SGDOptions(0.1));
  MasterWeights optimizer(inner);
  model.set_gradients(0);
  std::vector<int64_t> versions;
  for (const auto& parameter : model.parameters) versions.push_back(parameter._version());
  optimizer.step();
  for (std::size_t i = 0; i < versions.size(); ++i) {
    if (model.parameters[i].scalar_type() != GetParam()) continue;  // written by libtorch
    EXPECT_GT(model.parameters[i]._version(), versions[i]) << i;
  }
}

TEST(MasterWeightsStep, LeavesTheGradientOfAFloatParameterThatIsGivenTwice) {
  auto tied = torch::ones({2}).requires_grad_();
  auto half = torch::ones({2}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd(Tensors{tied, tied, half}, torch::optim::SGDOptions(1.0));
  MasterWeights optimizer(sgd);
  GradScaler scaler = quiet_scaler();
  const auto gradient = torch::full({2}, 0.25 * kScale);
  tied.mutable_grad() = gradient;
  half.mutable_grad() = gradient.to(torch::kHalf);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_TRUE(tied.grad().is_same(gradient));
  EXPECT_EQ(tied[0].item<float>(), 0.5F) << "libtorch's SGD steps twice";
  EXPECT_EQ(half[0].item<float>(), 0.75F);
}

TEST(MasterWeightsStep, TheInnerOptimizerIsAnOrdinaryOneInBetween) {
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
  inner.step();  // alone, on the parameter of 16 bits
  const auto after = model.parameters[0].detach().to(torch::kFloat);
  EXPECT_FALSE(same_bits(master.to(torch::kBFloat16), model.parameters[0]));
  const auto followed = master_params(optimizer)[0];
  const auto is_kept = master.to(torch::kBFloat16).eq(model.parameters[0]);
  EXPECT_THAT(followed, SameBits(torch::where(is_kept, master, after)));
}

TEST(MasterWeightsStep, AParameterThatIsResizedBeginsANewMaster) {
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

TEST(MasterWeightsStep, FollowsSchedulesThatStandOnIt) {
  const auto x = torch::zeros({1}, torch::kHalf).requires_grad_();
  torch::optim::SGD inner({x}, torch::optim::SGDOptions(8.0));
  MasterWeights optimizer(inner);
  GradScaler scaler = quiet_scaler();
  mezzo::LinearSchedule ours(optimizer, {.total_steps = 4});
  const std::vector<std::pair<float, double>> expected_weights_and_rates = {
      {8.0F, 6.0}, {8.0F, 6.0}, {14.0F, 4.0}};  // the second step is skipped
  for (const auto& [expected, next_rate] : expected_weights_and_rates) {
    x.mutable_grad() =
        torch::full_like(x, expected == 8.0F && x.item<float>() != 0 ? kInfinity : -kScale);
    const auto result = scaler.step(optimizer);
    scaler.update(kScale);
    ours.step(result);
    EXPECT_EQ(x.item<float>(), expected);
    EXPECT_EQ(inner.param_groups()[0].options().get_lr(), next_rate);
  }
  EXPECT_EQ(ours.lrs(), std::vector<double>{4.0});
  optimizer.set_lr_factors({});
  torch::optim::StepLR theirs(inner, /*step_size=*/1, /*gamma=*/0.5);
  theirs.step();  // halves the rate at its second step
  theirs.step();
  x.mutable_grad() = torch::full_like(x, -1);
  optimizer.step();
  EXPECT_EQ(x.item<float>(), 18.0F);
}

TEST(MasterWeightsStep, CallsAClosureOnceWithGradients) {
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

/// A user's own: subtracts what has added up, throws when told to, and has no learning rate.
struct SummingOptions : torch::optim::OptimizerCloneableOptions<SummingOptions> {};
struct SummingState : torch::optim::OptimizerCloneableParamState<SummingState> {
  torch::Tensor sum;
};
class Summing : public torch::optim::Optimizer {
 public:
  explicit Summing(Tensors parameters)
      : Optimizer(std::move(parameters), std::make_unique<SummingOptions>()) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(closure);
    int number = 0;
    for (auto& group : param_groups_) {
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined() || !parameter.requires_grad()) continue;
        if (number++ == throw_at) throw std::runtime_error("stop");
        auto& state = state_[parameter.unsafeGetTensorImpl()];
        if (!state) {
          state = std::make_unique<SummingState>();
          static_cast<SummingState&>(*state).sum = torch::zeros_like(parameter);
        }
        parameter -= static_cast<SummingState&>(*state).sum.add_(parameter.grad());
      }
    }
    return {};
  }
  int throw_at = -1;
};

TEST(MasterWeightsStep, StepsAnOptimizerOfTheUsersOwn) {
  const auto x = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  Summing inner({x});
  MasterWeights optimizer(inner);
  GradScaler scaler = quiet_scaler();
  for (int step = 0; step < 3; ++step) {
    x.mutable_grad() = torch::full_like(x, kScale);
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(x[0].item<float>(), -6.0F);
  const auto& state = state_of<SummingState>(inner, x);
  EXPECT_EQ(state.sum.scalar_type(), torch::kFloat);
}

TEST(MasterWeightsStep, PutsEverythingBackWhenTheInnerStepThrows) {
  const Tensors all{torch::zeros({2}, torch::kHalf).requires_grad_(),
                    torch::zeros({2}).requires_grad_(),
                    torch::zeros({2}, torch::kHalf).requires_grad_()};
  Summing inner(all);
  MasterWeights optimizer(inner);
  GradScaler scaler = quiet_scaler();
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
  EXPECT_TRUE(scaler.step(optimizer).ran()) << "the iteration goes on where it stood";
  EXPECT_EQ(all[0][0].item<float>(), -3.0F);
  EXPECT_EQ(all[2][0].item<float>(), -1.0F);
}

TEST(MasterWeightsStep, ConvertsStateThatIsOf16Bits) {
  const auto x = torch::ones({2}, torch::kBFloat16).requires_grad_();
  const auto moments_of = [&](const torch::optim::AdamW& adam) {
    return state_of<torch::optim::AdamWParamState>(adam, x);
  };
  torch::optim::AdamW inner({x}, torch::optim::AdamWOptions(1e-3));
  x.mutable_grad() = torch::ones_like(x);
  inner.step();
  ASSERT_EQ(moments_of(inner).exp_avg_sq().scalar_type(), torch::kBFloat16);
  MasterWeights optimizer(inner);
  optimizer.step();
  EXPECT_EQ(moments_of(inner).exp_avg().scalar_type(), torch::kFloat);
  EXPECT_EQ(moments_of(inner).exp_avg_sq().scalar_type(), torch::kFloat);
  EXPECT_EQ(moments_of(inner).step(), 2);
}

TEST(MasterWeightsStep, RefusesWhatItCannotStep) {
  const auto x = torch::zeros({4}, torch::kHalf).requires_grad_();
  torch::optim::LBFGS lbfgs({x});
  EXPECT_THAT([&] { MasterWeights optimizer(lbfgs); },
              ThrowsMessage<c10::Error>(HasSubstr("LBFGS calls its closure several times")));
  mezzo::optim::SGD ours({x}, mezzo::optim::SGDOptions(0.1));
  EXPECT_THAT([&] { MasterWeights optimizer(ours); },
              ThrowsMessage<c10::Error>(HasSubstr("{.weight_storage = WeightStorage::master}")));
  torch::optim::SGD overlapping({x, x.detach().slice(0, 1, 3).requires_grad_()},
                                torch::optim::SGDOptions(0.1));
  EXPECT_THAT([&] { MasterWeights optimizer(overlapping); },
              ThrowsMessage<c10::Error>(HasSubstr("share memory")));
  torch::optim::SGD twice({x, x}, torch::optim::SGDOptions(0.1));
  EXPECT_THAT([&] { MasterWeights optimizer(twice); },
              ThrowsMessage<c10::Error>(HasSubstr("is given twice")));
}

TEST(MasterWeightsStep, AModelThatIsCastMeanwhileTrainsAsWhatItIs) {
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
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(7.0);
  }
  model->to(torch::kBFloat16);
  step();
  EXPECT_EQ(master_params(optimizer)[0][0][0].item<float>(), 6.0F);
  EXPECT_EQ(model->weight[1][2].item<float>(), 6.0F);
}

}  // namespace
