// mezzo::optim::SGD and Adam beside libtorch's: the same answers and files. What they share with
// AdamW (memory, groups, threads, errors) is tested there.

#include <mezzo/kernels/sgd_element.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <vector>

#include "../kernels/step_buffers.h"

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::SgdCoefficients;
using mezzo::detail::SgdConstants;
using mezzo::detail::SgdRule;
using test_support::SameBits;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// A parameter and its twin, which get the same gradients.
struct Pair {
  torch::Tensor ours = start().requires_grad_();
  torch::Tensor theirs = start().requires_grad_();

  static torch::Tensor start() {
    torch::manual_seed(1);
    return torch::randn({37, 5}, torch::kDouble);
  }

  template <class Left, class Right>
  void step_both(Left& left, Right& right, int steps) const {
    for (int i = 0; i < steps; ++i) {
      ours.mutable_grad() = torch::randn({37, 5}, torch::kDouble);
      theirs.mutable_grad() = ours.grad().clone();
      left.step();
      right.step();
    }
  }

  double difference() const { return (ours - theirs).abs().max().item<double>(); }
};

struct SgdCase {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  template <class Options>
  Options options() const {
    return Options(1e-2)
        .momentum(momentum)
        .dampening(dampening)
        .weight_decay(weight_decay)
        .nesterov(nesterov);
  }
};

const std::vector<SgdCase> kSgdCases{{},
                                     {.weight_decay = 0.1},
                                     {.momentum = 0.9},
                                     {.momentum = 0.9, .dampening = 0.5},
                                     {.momentum = 0.9, .weight_decay = 0.1},
                                     {.momentum = 0.9, .nesterov = true},
                                     {.momentum = 0.8, .weight_decay = 0.1, .nesterov = true}};

TEST(SGD, GivesTorchsAnswers) {
  for (const SgdCase& sgd : kSgdCases) {
    const Pair pair;
    mezzo::optim::SGD ours({pair.ours}, sgd.options<mezzo::optim::SGDOptions>());
    torch::optim::SGD theirs({pair.theirs}, sgd.options<torch::optim::SGDOptions>());
    pair.step_both(ours, theirs, 20);
    EXPECT_LT(pair.difference(), 1e-14) << sgd.momentum << sgd.weight_decay << sgd.nesterov;
  }
}

TEST(SGD, GoesOnWhereTorchStoppedAndTheOtherWayRound) {
  for (const SgdCase& sgd : kSgdCases) {
    const Pair pair;
    mezzo::optim::SGD ours({pair.ours}, mezzo::optim::SGDOptions(7.0));
    torch::optim::SGD theirs({pair.theirs}, sgd.options<torch::optim::SGDOptions>());
    torch::optim::SGD helper({pair.ours}, sgd.options<torch::optim::SGDOptions>());
    pair.step_both(helper, theirs, 3);
    std::stringstream from_torch;
    torch::save(theirs, from_torch);
    torch::load(ours, from_torch);
    pair.step_both(ours, theirs, 3);
    EXPECT_LT(pair.difference(), 1e-14);
    std::stringstream from_mezzo;
    torch::save(ours, from_mezzo);
    torch::optim::SGD fresh({pair.theirs}, torch::optim::SGDOptions(7.0));
    torch::load(fresh, from_mezzo);
    pair.step_both(ours, fresh, 3);
    EXPECT_LT(pair.difference(), 1e-14);
  }
}

TEST(SGD, RemembersNothingWithoutMomentum) {
  const auto x = torch::ones({3});
  x.mutable_grad() = torch::ones({3});
  mezzo::optim::SGD optimizer({x}, mezzo::optim::SGDOptions(0.5));
  optimizer.step();
  EXPECT_TRUE(torch::equal(x, torch::full({3}, 0.5)));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(SGD, BeginsABufferAsTorchDoesWhenMomentumIsTurnedOnLater) {
  using mezzo::optim::SGDOptions;
  const Pair pair;
  mezzo::optim::SGD ours({pair.ours}, SGDOptions(1e-2));
  torch::optim::SGD theirs({pair.theirs}, torch::optim::SGDOptions(1e-2));
  pair.step_both(ours, theirs, 3);
  const auto turn = [&](double momentum) {
    static_cast<SGDOptions&>(ours.param_groups()[0].options()).momentum(momentum).dampening(0.5);
    static_cast<torch::optim::SGDOptions&>(theirs.param_groups()[0].options())
        .momentum(momentum)
        .dampening(0.5);
  };
  for (const double momentum : {0.9, 0.0, 0.8}) {
    turn(momentum);
    pair.step_both(ours, theirs, 3);
    EXPECT_LT(pair.difference(), 1e-14) << momentum;
  }
}

TEST(SGD, RefusesNesterovWithoutMomentumOrWithDampening) {
  const std::vector<torch::Tensor> x{torch::ones({1})};
  using mezzo::optim::SGDOptions;
  EXPECT_THAT([&] { mezzo::optim::SGD(x, SGDOptions(1).nesterov(true)); },
              ThrowsMessage<c10::Error>(HasSubstr("it needs a positive momentum")));
  EXPECT_THAT(
      [&] { mezzo::optim::SGD(x, SGDOptions(1).momentum(0.9).dampening(0.1).nesterov(true)); },
      ThrowsMessage<c10::Error>(HasSubstr("dampening 0.1")));
  EXPECT_THAT([&] { mezzo::optim::SGD(x, SGDOptions(-1)); },
              ThrowsMessage<c10::Error>(HasSubstr("SGD: lr is -1")));
}

/// One element in float, or double for double.
template <bool kHasMomentum, class T>
void plain_sgd(const SgdCoefficients& c, T& parameter, T gradient, T& buffer) {
  if (c.weight_decay != 0) gradient = std::fma(static_cast<T>(c.weight_decay), parameter, gradient);
  T direction = gradient;
  if (kHasMomentum) {
    buffer = std::fma(static_cast<T>(c.momentum), buffer, static_cast<T>(c.share) * gradient);
    direction = buffer;
  }
  if (kHasMomentum && c.look_ahead != 0) {
    direction = std::fma(static_cast<T>(c.look_ahead), buffer, gradient);
  }
  parameter = std::fma(static_cast<T>(-c.lr), direction, parameter);
}

class SgdLoop : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }

  template <bool kHasMomentum>
  static void expect_plain_bits(const DtypePair& dtypes, StepBuffers buffers,
                                const SgdConstants& constants) {
    const SgdCoefficients coefficients = constants.at(/*lr=*/0.1, /*step=*/2);
    const bool is_double = dtypes.parameter == torch::kDouble;
    const auto wide = is_double ? torch::kDouble : torch::kFloat;
    const auto parameter = buffers.parameter.to(wide, false, /*copy=*/true);
    const auto gradient = buffers.gradient.to(wide, false, /*copy=*/true);
    const auto buffer = buffers.moments[0].to(wide, false, /*copy=*/true);
    const auto step_all = [&]<class T>(T) {
      for (int64_t i = 0; i < parameter.numel(); ++i) {
        plain_sgd<kHasMomentum, T>(coefficients, parameter.data_ptr<T>()[i],
                                   gradient.data_ptr<T>()[i] * static_cast<T>(0.3),
                                   buffer.data_ptr<T>()[i]);
      }
    };
    is_double ? step_all(double{}) : step_all(float{});
    const auto loop = mezzo::detail::step_loop<SgdRule<kHasMomentum>>(
        mezzo::optim::WeightStorage::plain, dtypes.parameter, GetParam());
    mezzo::detail::run_step_cpu(
        {task_of(loop, dtypes, buffers.span(), coefficients, {.factor = 0.3})});
    EXPECT_THAT(buffers.parameter, SameBits(parameter.to(dtypes.parameter))) << name_of(dtypes);
    EXPECT_THAT(buffers.moments[0], SameBits(buffer.to(dtypes.parameter))) << name_of(dtypes);
  }

  template <bool kHasMomentum>
  static void expect_plain_bits_for_all_dtypes(const SgdConstants& constants) {
    for (const DtypePair& dtypes : kDtypePairs) {
      for (const int64_t count : {0, 1, 15, 16, 17, 64, 67}) {
        expect_plain_bits<kHasMomentum>(dtypes, StepBuffers::random(dtypes, count), constants);
      }
      expect_plain_bits<kHasMomentum>(dtypes, StepBuffers::edges(dtypes), constants);
    }
  }
};

TEST_P(SgdLoop, GivesThePlainReferencesBits) {
  expect_plain_bits_for_all_dtypes<false>({});
  expect_plain_bits_for_all_dtypes<false>({.weight_decay = 0.1});
  expect_plain_bits_for_all_dtypes<true>({.momentum = 0.9, .dampening = 0.25});
  expect_plain_bits_for_all_dtypes<true>({.momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, SgdLoop,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return name_of(test.param); });

TEST(Adam, GivesTorchsAnswersAndGoesOnWhereItStopped) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      const Pair pair;
      mezzo::optim::Adam ours(
          {pair.ours}, mezzo::optim::AdamOptions(1e-2).weight_decay(weight_decay).amsgrad(amsgrad));
      torch::optim::Adam theirs(
          {pair.theirs},
          torch::optim::AdamOptions(1e-2).weight_decay(weight_decay).amsgrad(amsgrad));
      pair.step_both(ours, theirs, 20);
      EXPECT_LT(pair.difference(), 1e-13) << weight_decay << amsgrad;
      std::stringstream from_torch;
      torch::save(theirs, from_torch);
      mezzo::optim::Adam resumed({pair.ours});
      torch::load(resumed, from_torch);
      pair.step_both(resumed, theirs, 3);
      std::stringstream from_mezzo;
      torch::save(resumed, from_mezzo);
      torch::optim::Adam fresh({pair.theirs});
      torch::load(fresh, from_mezzo);
      pair.step_both(resumed, fresh, 3);
      EXPECT_LT(pair.difference(), 1e-13) << weight_decay << amsgrad;
    }
  }
}

}  // namespace
