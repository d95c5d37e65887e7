// mezzo::optim::Lion against the paper's algorithm, which libtorch does not have.

#include <mezzo/optim/lion.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <vector>

#include "../kernels/step_buffers.h"

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::LionConstants;
using mezzo::detail::LionRule;
using mezzo::optim::Lion;
using mezzo::optim::LionOptions;
using test_support::SameBits;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// One element in float, or double for double.
template <class T>
void plain_lion(const mezzo::detail::LionCoefficients& c, T& parameter, T gradient, T& mean) {
  const auto in = [](double value) { return static_cast<T>(value); };
  const T direction = std::fma(in(c.beta1), mean, in(1.0 - c.beta1) * gradient);
  mean = std::fma(in(c.beta2), mean, in(1.0 - c.beta2) * gradient);
  const T nothing = direction * 0;  // of the direction's sign, or NaN
  const T change = direction > 0 ? in(-c.lr) : direction < 0 ? in(c.lr) : nothing;
  parameter = std::fma(parameter, in(c.decay), change);
}

class LionLoop : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }

  static void expect_plain_bits(const DtypePair& dtypes, StepBuffers buffers) {
    const LionConstants constants{.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
    const auto coefficients = constants.at(/*lr=*/1e-2, /*step=*/1);
    const bool is_double = dtypes.parameter == torch::kDouble;
    const auto wide = is_double ? torch::kDouble : torch::kFloat;
    const auto parameter = buffers.parameter.to(wide, false, /*copy=*/true);
    const auto gradient = buffers.gradient.to(wide, false, /*copy=*/true);
    const auto mean = buffers.moments[0].to(wide, false, /*copy=*/true);
    const auto step_all = [&]<class T>(T) {
      for (int64_t i = 0; i < parameter.numel(); ++i) {
        plain_lion<T>(coefficients, parameter.data_ptr<T>()[i],
                      gradient.data_ptr<T>()[i] * static_cast<T>(0.3), mean.data_ptr<T>()[i]);
      }
    };
    is_double ? step_all(double{}) : step_all(float{});
    const auto loop = mezzo::detail::step_loop<LionRule>(mezzo::optim::WeightStorage::plain,
                                                         dtypes.parameter, GetParam());
    mezzo::detail::run_step_cpu(
        {task_of(loop, dtypes, buffers.span(), coefficients, {.factor = 0.3})});
    EXPECT_THAT(buffers.parameter, SameBits(parameter.to(dtypes.parameter))) << name_of(dtypes);
    EXPECT_THAT(buffers.moments[0], SameBits(mean.to(dtypes.parameter))) << name_of(dtypes);
  }
};

TEST_P(LionLoop, GivesThePlainReferencesBits) {
  for (const DtypePair& dtypes : kDtypePairs) {
    for (const int64_t count : {0, 1, 15, 16, 17, 64, 67}) {
      expect_plain_bits(dtypes, StepBuffers::random(dtypes, count));
    }
    expect_plain_bits(dtypes, StepBuffers::edges(dtypes));
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, LionLoop,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return name_of(test.param); });

/// Ops of libtorch, as the paper writes the algorithm.
void paper_step(torch::Tensor& parameter, torch::Tensor& mean, const torch::Tensor& gradient,
                double lr, double decay) {
  const auto update = (0.9 * mean + 0.1 * gradient).sign();
  parameter = parameter - lr * (update + decay * parameter);
  mean = 0.99 * mean + 0.01 * gradient;
}

TEST(Lion, TakesThePapersStepsAndGoesOnAfterAReload) {
  torch::manual_seed(2);
  const auto x = torch::randn({50}, torch::kDouble);
  auto expected = x.clone();
  auto mean = torch::zeros({50}, torch::kDouble);
  const auto options = LionOptions(1e-2).weight_decay(0.1);
  auto optimizer = std::make_unique<Lion>(std::vector<torch::Tensor>{x}, options);
  for (int i = 0; i < 20; ++i) {
    if (i == 10) {
      std::stringstream archive;
      torch::save(*optimizer, archive);
      optimizer = std::make_unique<Lion>(std::vector<torch::Tensor>{x});
      torch::load(*optimizer, archive);
    }
    x.mutable_grad() = torch::randn({50}, torch::kDouble);
    paper_step(expected, mean, x.grad(), 1e-2, 0.1);
    optimizer->step();
  }
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-13));
}

TEST(Lion, SkipsAndStepsUnderAScaler) {
  const auto x = torch::zeros({2});
  Lion optimizer({x}, LionOptions(0.5));
  mezzo::GradScaler scaler({.init_scale = 4});
  scaler.on_skip(nullptr);
  for (const float gradient : {std::numeric_limits<float>::infinity(), 8.0F}) {
    (void)scaler.scale(torch::zeros({}));
    x.mutable_grad() = torch::tensor({gradient, -gradient});
    const bool ran = scaler.step(optimizer, {.max_norm = 1.0}).ran();
    EXPECT_EQ(ran, gradient == 8.0F);
    scaler.update();
  }
  EXPECT_TRUE(torch::equal(x, torch::tensor({-0.5F, 0.5F})));
}

TEST(Lion, NamesABadOption) {
  const std::vector<torch::Tensor> x{torch::ones({1})};
  EXPECT_THAT([&] { Lion(x, LionOptions(-1)); },
              ThrowsMessage<c10::Error>(HasSubstr("Lion: lr is -1")));
  EXPECT_THAT(
      [&] {
        Lion(x, LionOptions().betas({1.0, 0.5}));
      },
      ThrowsMessage<c10::Error>(HasSubstr("betas are 1 and 0.5")));
}

}  // namespace
