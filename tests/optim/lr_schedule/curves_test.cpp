#include <mezzo/optim/lr_schedule.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "../../support/special_values.h"

namespace {

using mezzo::CosineCurve;
using mezzo::LinearCurve;
using mezzo::PolynomialCurve;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;
using testing::ThrowsMessage;

static_assert(mezzo::LrCurve<LinearCurve> && mezzo::LrCurve<CosineCurve> &&
              mezzo::LrCurve<PolynomialCurve>);

template <class Curve>
std::vector<double> factors(const Curve& curve, int64_t count) {
  std::vector<double> all;
  for (int64_t n = 0; n < count; ++n) all.push_back(curve.factor(n));
  return all;
}

MATCHER(IsClose, "") { return std::abs(std::get<0>(arg) - std::get<1>(arg)) <= 1e-15; }

// The expected numbers are those of transformers 5.23 with torch 2.11: the rate of SGD(lr=1) before
// each step under the function that is named.

TEST(LrCurves, HaveTheNumbersOfHuggingFaces) {
  // get_linear_schedule_with_warmup(optimizer, 4, 10)
  EXPECT_THAT(factors(LinearCurve{.warmup_steps = 4, .total_steps = 10}, 13),
              Pointwise(IsClose(), {0.0, 0.25, 0.5, 0.75, 1.0, 5. / 6, 4. / 6, 3. / 6, 2. / 6,
                                    1. / 6, 0.0, 0.0, 0.0}));
  // get_cosine_schedule_with_warmup(optimizer, 4, 10), which rises again from the twelfth on
  EXPECT_THAT(factors(CosineCurve{.warmup_steps = 4, .total_steps = 10}, 13),
              Pointwise(IsClose(), {0.0, 0.25, 0.5, 0.75, 1.0, 0.9330127018922194, 0.75, 0.5,
                                    0.2500000000000001, 0.06698729810778065, 0.0, 0.0, 0.0}));
  // get_cosine_schedule_with_warmup(optimizer, 4, 10, num_cycles=1.0)
  EXPECT_THAT(factors(CosineCurve{.warmup_steps = 4, .total_steps = 10, .cycles = 1}, 11),
              Pointwise(IsClose(), {0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.2500000000000001, 0.0,
                                    0.24999999999999978, 0.75, 1.0}));
  // get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 10, min_lr_rate=0.1)
  EXPECT_THAT(factors(CosineCurve{.warmup_steps = 4, .total_steps = 10, .min_factor = 0.1}, 11),
              Pointwise(IsClose(), {0.0, 0.25, 0.5, 0.75, 1.0, 0.9397114317029974, 0.775, 0.55,
                                    0.3250000000000001, 0.16028856829700258, 0.1}));
  // get_polynomial_decay_schedule_with_warmup(optimizer, 4, 10, lr_end=0.1, power=2.0)
  EXPECT_THAT(
      factors(PolynomialCurve{.warmup_steps = 4, .total_steps = 10, .min_factor = 0.1, .power = 2},
              13),
      Pointwise(IsClose(), {0.0, 0.25, 0.5, 0.75, 1.0, 0.7250000000000001, 0.5000000000000001,
                            0.325, 0.2, 0.125, 0.1, 0.1, 0.1}));
}

TEST(LinearCurve, RisesFromItsInitialFactorAndFallsToItsMinimum) {
  EXPECT_THAT(factors(LinearCurve{.warmup_steps = 4, .total_steps = 4, .min_factor = 1}, 7),
              ElementsAre(0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0));
  EXPECT_THAT(
      factors(
          LinearCurve{
              .warmup_steps = 3, .total_steps = 5, .min_factor = 0.5, .initial_factor = 0.25},
          7),
      ElementsAre(0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.5));
}

/// Hugging Face's lambdas, in Python:
///     if current_step < num_warmup_steps:
///         return float(current_step) / float(max(1, num_warmup_steps))
double hugging_faces_warmup(int64_t n, int64_t w) {
  return static_cast<double>(n) / static_cast<double>(std::max<int64_t>(1, w));
}
/// _get_linear_schedule_with_warmup_lr_lambda:
///     return max(0.0, float(num_training_steps - current_step) /
///                         float(max(1, num_training_steps - num_warmup_steps)))
double hugging_faces_linear(int64_t n, int64_t w, int64_t t) {
  if (n < w) return hugging_faces_warmup(n, w);
  return std::max(0.0,
                  static_cast<double>(t - n) / static_cast<double>(std::max<int64_t>(1, t - w)));
}
/// _get_cosine_schedule_with_warmup_lr_lambda:
///     progress = float(current_step - num_warmup_steps) /
///                    float(max(1, num_training_steps - num_warmup_steps))
///     return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress)))
double hugging_faces_cosine(int64_t n, int64_t w, int64_t t) {
  if (n < w) return hugging_faces_warmup(n, w);
  const double progress =
      static_cast<double>(n - w) / static_cast<double>(std::max<int64_t>(1, t - w));
  return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * 0.5 * 2.0 * progress)));
}

TEST(LrCurves, AreHuggingFacesFormulasUntilTheirEndWithAnyWarmup) {
  for (const int64_t total : {1, 2, 5, 10}) {
    for (int64_t warmup = 0; warmup <= total; ++warmup) {
      const LinearCurve linear{.warmup_steps = warmup, .total_steps = total};
      const CosineCurve cosine{.warmup_steps = warmup, .total_steps = total};
      for (int64_t n = 0; n <= total; ++n) {
        EXPECT_DOUBLE_EQ(linear.factor(n), hugging_faces_linear(n, warmup, total))
            << n << " of " << total << " after " << warmup;
        EXPECT_NEAR(cosine.factor(n), hugging_faces_cosine(n, warmup, total), 1e-15)
            << n << " of " << total << " after " << warmup;
      }
      EXPECT_EQ(linear.factor(total + 3), linear.factor(total));
      EXPECT_EQ(cosine.factor(total + 3), cosine.factor(total));
    }
  }
}

TEST(LrCurves, EndRightAfterAWarmupThatTakesAllSteps) {
  EXPECT_EQ((LinearCurve{.warmup_steps = 5, .total_steps = 5}.factor(4)), 0.8);
  EXPECT_EQ((LinearCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 0);
  EXPECT_EQ((CosineCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 1);
  EXPECT_EQ((PolynomialCurve{.warmup_steps = 5, .total_steps = 5}.factor(5)), 0);
}

TEST(LrCurves, NameTheNumberThatIsOutOfRange) {
  const std::vector<std::pair<std::function<double()>, std::string>> cases{
      {[] { return LinearCurve{}.factor(0); },
       "LinearCurve: total_steps is 0; it should be at least 1"},
      {[] { return CosineCurve{.warmup_steps = 11, .total_steps = 10}.factor(0); },
       "CosineCurve: warmup_steps is 11; it should be from 0 to total_steps (10)"},
      {[] { return LinearCurve{.warmup_steps = -1, .total_steps = 10}.factor(0); },
       "warmup_steps is -1"},
      {[] { return LinearCurve{.total_steps = 10, .min_factor = 1.5}.factor(0); },
       "min_factor is 1.5; it should be from 0 to 1"},
      {[] { return LinearCurve{.total_steps = 10, .initial_factor = kNan}.factor(0); },
       "initial_factor is nan"},
      {[] { return CosineCurve{.total_steps = 10, .cycles = 0}.factor(0); },
       "CosineCurve: cycles is 0; it should be positive and finite"},
      {[] { return PolynomialCurve{.total_steps = 10, .power = -2}.factor(0); },
       "PolynomialCurve: power is -2"},
      {[] { return PolynomialCurve{.total_steps = 10}.factor(-1); },
       "PolynomialCurve: applied_steps is -1; it should be at least 0"}};
  for (const auto& [call, error] : cases) {
    EXPECT_THAT(call, ThrowsMessage<c10::Error>(HasSubstr(error)));
  }
}

}  // namespace
