// The CPU's loops of SGD and Lion, for each instruction set, give the bits of a plain reference.

#include <mezzo/kernels/lion_element.h>
#include <mezzo/kernels/sgd_element.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../kernels/step_buffers.h"

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::LionConstants;
using mezzo::detail::LionRule;
using mezzo::detail::SgdConstants;
using mezzo::detail::SgdRule;
using test_support::SameBits;

/// One element in float, or double for double.
template <bool kHasMomentum, class T>
void plain_sgd(const mezzo::detail::SgdCoefficients& c, T& parameter, T gradient, T& buffer) {
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

template <class T>
void plain_lion(const mezzo::detail::LionCoefficients& c, T& parameter, T gradient, T& mean) {
  const auto in = [](double value) { return static_cast<T>(value); };
  const T direction = std::fma(in(c.beta1), mean, in(1.0 - c.beta1) * gradient);
  mean = std::fma(in(c.beta2), mean, in(1.0 - c.beta2) * gradient);
  const T nothing = direction * 0;  // of the direction's sign, or NaN
  const T change = direction > 0 ? in(-c.lr) : direction < 0 ? in(c.lr) : nothing;
  parameter = std::fma(parameter, in(c.decay), change);
}

/// `plain` steps one element: it is given coefficients, the parameter, the gradient and the
/// moment.
template <class Rule>
void expect_plain_bits(CpuIsa isa, const typename Rule::Constants& constants, const auto& plain) {
  const auto coefficients = constants.at(/*lr=*/0.1, /*step=*/2);
  const auto check = [&](const DtypePair& dtypes, StepBuffers buffers) {
    const bool is_double = dtypes.parameter == torch::kDouble;
    const auto wide = is_double ? torch::kDouble : torch::kFloat;
    const auto parameter = buffers.parameter.to(wide, false, /*copy=*/true);
    const auto gradient = buffers.gradient.to(wide, false, /*copy=*/true);
    const auto moment = buffers.moments[0].to(wide, false, /*copy=*/true);
    const auto step_all = [&]<class T>(T) {
      for (int64_t i = 0; i < parameter.numel(); ++i) {
        plain(coefficients, parameter.data_ptr<T>()[i],
              gradient.data_ptr<T>()[i] * static_cast<T>(0.3), moment.data_ptr<T>()[i]);
      }
    };
    is_double ? step_all(double{}) : step_all(float{});
    const auto loop =
        mezzo::detail::step_loop<Rule>(mezzo::optim::WeightStorage::plain, dtypes.parameter, isa);
    mezzo::detail::run_step_cpu(
        {task_of(loop, dtypes, buffers.span(), coefficients, {.factor = 0.3})});
    EXPECT_THAT(buffers.parameter, SameBits(parameter.to(dtypes.parameter))) << name_of(dtypes);
    EXPECT_THAT(buffers.moments[0], SameBits(moment.to(dtypes.parameter))) << name_of(dtypes);
  };
  for (const DtypePair& dtypes : kDtypePairs) {
    for (const int64_t count : {0, 1, 15, 16, 17, 64, 67}) {
      check(dtypes, StepBuffers::random(dtypes, count));
    }
    check(dtypes, StepBuffers::edges(dtypes));
  }
}

class RuleLoops : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }
};

TEST_P(RuleLoops, GiveThePlainReferencesBits) {
  const auto without = [](const auto& c, auto& p, auto g, auto& m) {
    plain_sgd<false>(c, p, g, m);
  };
  const auto momentum = [](const auto& c, auto& p, auto g, auto& m) {
    plain_sgd<true>(c, p, g, m);
  };
  const auto lion = [](const auto& c, auto& p, auto g, auto& m) { plain_lion(c, p, g, m); };
  expect_plain_bits<SgdRule<false>>(GetParam(), {}, without);
  expect_plain_bits<SgdRule<false>>(GetParam(), {.weight_decay = 0.1}, without);
  expect_plain_bits<SgdRule<true>>(GetParam(), {.momentum = 0.9, .dampening = 0.25}, momentum);
  expect_plain_bits<SgdRule<true>>(
      GetParam(), {.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}, momentum);
  expect_plain_bits<LionRule>(GetParam(), {.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}, lion);
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, RuleLoops,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
