// mezzo::optim::LAMB against the paper's algorithm in libtorch's ops, as Apex's FusedLAMB has it.

#include <mezzo/optim/lamb.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <tuple>
#include <vector>

namespace {

using mezzo::optim::LAMB;
using mezzo::optim::LAMBOptions;
using mezzo::optim::LAMBParamState;
using testing::HasSubstr;
using testing::ThrowsMessage;

LAMBParamState& state_of(const LAMB& optimizer, const torch::Tensor& parameter) {
  return static_cast<LAMBParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

/// One parameter's LAMB in ops.
class LambInOps {
 public:
  LambInOps(const torch::Tensor& parameter, const LAMBOptions& options)
      : options_(options),
        parameter_(parameter.detach().clone()),
        mean_(torch::zeros_like(parameter_)),
        square_(torch::zeros_like(parameter_)) {}

  void step(const torch::Tensor& gradient) {
    const auto [beta1, beta2] = options_.betas();
    ++count_;
    mean_ = beta1 * mean_ + (1 - beta1) * gradient;
    square_ = beta2 * square_ + (1 - beta2) * gradient * gradient;
    auto mean = mean_;
    auto square = square_;
    if (options_.bias_correction()) {
      mean = mean / (1 - std::pow(beta1, count_));
      square = square / (1 - std::pow(beta2, count_));
    }
    const auto update =
        mean / (square.sqrt() + options_.eps()) + options_.weight_decay() * parameter_;
    ratio_ = 1;
    if (options_.weight_decay() != 0 || options_.always_adapt()) {
      const double parameter_norm = parameter_.to(torch::kDouble).norm().item<double>();
      const double update_norm = update.to(torch::kDouble).norm().item<double>();
      if (parameter_norm > 0 && update_norm > 0) ratio_ = parameter_norm / update_norm;
    }
    parameter_ = parameter_ - options_.lr() * ratio_ * update;
  }

  const torch::Tensor& parameter() const { return parameter_; }
  double ratio() const { return ratio_; }  // of the last step

 private:
  LAMBOptions options_;
  torch::Tensor parameter_;
  torch::Tensor mean_;
  torch::Tensor square_;
  int count_ = 0;
  double ratio_ = 1;
};

/// Sizes within a piece and of two, and layouts of every kind.
std::vector<torch::Tensor> parameters(torch::ScalarType dtype) {
  torch::manual_seed(3);
  const auto random = [&](at::IntArrayRef shape) { return torch::randn(shape, dtype); };
  return {random({33, 17}),
          random({1}),
          random({16385}),
          random({0}),
          random({6, 5}).t(),
          random({6, 8}).slice(1, 0, 8, 2),
          random({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)};
}

void expect_plain_steps(torch::ScalarType dtype, const LAMBOptions& options, int steps,
                        double tolerance) {
  const auto ours = parameters(dtype);
  std::vector<LambInOps> plain;
  for (const auto& parameter : ours) plain.emplace_back(parameter, options);
  LAMB optimizer(ours, options);
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ours[i].mutable_grad() = torch::randn(ours[i].sizes(), dtype) * (1 + step % 3);
      plain[i].step(ours[i].grad());
    }
    optimizer.step();
  }
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(torch::allclose(ours[i], plain[i].parameter(), tolerance, tolerance))
        << i << ": " << (ours[i] - plain[i].parameter()).abs().max();
  }
}

// The tolerances are about ten units in the last place of a value near 1.
TEST(LAMB, TakesThePapersStepsInFloatAndDouble) {
  const auto options = LAMBOptions(1e-2).weight_decay(0.1);
  expect_plain_steps(torch::kFloat, options, /*steps=*/100, 1e-6);
  expect_plain_steps(torch::kDouble, options, /*steps=*/100, 2e-15);
}

TEST(LAMB, TakesThePapersStepsWithEveryOption) {
  for (const auto& options :
       {LAMBOptions(1e-2).weight_decay(0.3).betas({0.8, 0.95}).eps(1e-3),
        LAMBOptions(1e-2).bias_correction(false), LAMBOptions(1e-2).weight_decay(0),
        LAMBOptions(1e-2).weight_decay(0).always_adapt(true)}) {
    expect_plain_steps(torch::kDouble, options, /*steps=*/10, 2e-15);
  }
}

TEST(LAMB, HasApexsDefaults) {
  const LAMBOptions options;
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(options.eps(), 1e-6);
  EXPECT_EQ(options.weight_decay(), 0.01);
  EXPECT_TRUE(options.bias_correction());
  EXPECT_FALSE(options.always_adapt());
}

// In a first step with bias correction each element of the update is 1 or -1 (eps 0).
TEST(LAMB, StepsAsFarAsTheRateTimesTheParameterIsLong) {
  const auto x = torch::tensor({3.0, 0.0, -4.0, 0.0}, torch::kDouble);
  LAMB optimizer({x}, LAMBOptions(0.1).weight_decay(0).eps(0).always_adapt(true));
  x.mutable_grad() = torch::tensor({1.0, -7.0, 0.5, 2.0}, torch::kDouble);
  optimizer.step();
  const auto expected = torch::tensor({2.75, 0.25, -4.25, -0.25}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-14)) << x;
}

TEST(LAMB, TakesAdamsStepsInGroupsWithoutWeightDecay) {
  const auto x = torch::tensor({3.0, 0.0, -4.0, 0.0}, torch::kDouble);
  LAMB optimizer({x}, LAMBOptions(0.1).weight_decay(0).eps(0));
  x.mutable_grad() = torch::tensor({1.0, -7.0, 0.5, 2.0}, torch::kDouble);
  optimizer.step();
  const auto expected = torch::tensor({2.9, 0.1, -4.1, -0.1}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-14)) << x;
}

TEST(LAMB, HasATrustRatioOfOneForAParameterOrAnUpdateOfZeros) {
  const auto zeros = torch::zeros({4}, torch::kDouble);
  const auto still = torch::tensor({3.0, 4.0}, torch::kDouble);
  LAMB optimizer({zeros, still}, LAMBOptions(0.5).eps(1).weight_decay(0).always_adapt(true));
  zeros.mutable_grad() = torch::full({4}, 3.0, torch::kDouble);
  still.mutable_grad() = torch::zeros({2}, torch::kDouble);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(zeros, torch::full({4}, -0.5 * 3 / 4, torch::kDouble), 0, 1e-14));
  EXPECT_TRUE(torch::equal(still, torch::tensor({3.0, 4.0}, torch::kDouble)));
}

TEST(LAMB, LetsANaNShowInAllOfItsParameterAndInNoOther) {
  const auto bad = torch::ones({5});
  const auto good = torch::ones({5});
  LAMB optimizer({bad, good});
  bad.mutable_grad() = torch::tensor({1.0F, 2.0F, std::nanf(""), 1.0F, 1.0F});
  good.mutable_grad() = torch::ones({5});
  optimizer.step();
  EXPECT_TRUE(bad.isnan().all().item<bool>());
  EXPECT_TRUE(good.isfinite().all().item<bool>());
}

std::vector<torch::Tensor> everything_of(const LAMB& optimizer, const torch::Tensor& parameter) {
  const auto& state = state_of(optimizer, parameter);
  return {parameter.clone(), state.exp_avg().clone(), state.exp_avg_sq().clone(),
          torch::tensor(static_cast<double>(state.step()))};
}

TEST(LAMB, UnderAScalerStepsAsWithoutAndLeavesAllBitsWhenItSkips) {
  const auto x = torch::randn({20000});
  const auto y = x.clone();
  LAMB scaled({x}, LAMBOptions(1e-2));
  LAMB plain({y}, LAMBOptions(1e-2));
  mezzo::GradScaler scaler({.init_scale = 4});
  scaler.on_skip(nullptr);
  for (const bool is_bad : {false, true, false}) {
    const auto gradient = torch::randn({20000});  // of a norm of 140 or so
    const auto before = is_bad ? everything_of(scaled, x) : std::vector<torch::Tensor>{};
    (void)scaler.scale(torch::zeros({}));
    x.mutable_grad() = gradient * scaler.get_scale();
    if (is_bad) x.mutable_grad()[19999] = std::numeric_limits<float>::infinity();
    const bool ran = scaler.step(scaled, {.max_norm = 1.0, .zero_grad = true}).ran();
    scaler.update();
    EXPECT_EQ(ran, !is_bad);
    EXPECT_FALSE(x.grad().any().item<bool>()) << "cleared, after a skipped step too";
    const auto after = everything_of(scaled, x);
    if (!is_bad) {
      y.mutable_grad() = gradient / gradient.norm();
      plain.step();
    }
    const auto expected = is_bad ? before : everything_of(plain, y);
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double tolerance = is_bad ? 0 : 1e-5;
      const double mean = expected[i].abs().mean().item<double>();
      EXPECT_TRUE(torch::allclose(after[i], expected[i], tolerance, tolerance * mean)) << i;
    }
  }
}

TEST(LAMB, KeepsOptionsAndStateInFiles) {
  const auto x = torch::ones({3});
  LAMB saved({x}, LAMBOptions(0.5)
                      .betas({0.8, 0.9})
                      .eps(0.25)
                      .weight_decay(0.75)
                      .bias_correction(false)
                      .always_adapt(true));
  x.mutable_grad() = torch::rand({3});
  saved.step();
  std::stringstream file;
  torch::save(saved, file);
  LAMB loaded({x});
  torch::load(loaded, file);
  const auto& options = static_cast<const LAMBOptions&>(loaded.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.5);
  EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.9));
  EXPECT_EQ(options.eps(), 0.25);
  EXPECT_EQ(options.weight_decay(), 0.75);
  EXPECT_FALSE(options.bias_correction());
  EXPECT_TRUE(options.always_adapt());
  EXPECT_EQ(state_of(loaded, x).step(), 1);
  EXPECT_TRUE(torch::equal(state_of(loaded, x).exp_avg(), state_of(saved, x).exp_avg()));
  EXPECT_TRUE(torch::equal(state_of(loaded, x).exp_avg_sq(), state_of(saved, x).exp_avg_sq()));
}

TEST(LAMB, NamesABadOption) {
  const std::vector<torch::Tensor> x{torch::ones({1})};
  const auto expect_error = [&](const LAMBOptions& options, const char* message) {
    EXPECT_THAT([&] { LAMB(x, options); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
  };
  expect_error(LAMBOptions(-1), "LAMB: lr is -1");
  expect_error(LAMBOptions(std::nan("")), "LAMB: lr is nan");
  expect_error(LAMBOptions().eps(-2), "LAMB: eps is -2");
  expect_error(LAMBOptions().weight_decay(-3), "LAMB: weight_decay is -3");
  expect_error(LAMBOptions().betas({1.0, 0.5}), "LAMB: betas are 1 and 0.5");
  expect_error(LAMBOptions().betas({0.5, -0.5}), "LAMB: betas are 0.5 and -0.5");
}

TEST(LAMB, RefusesSparseGradientsAndTouchesNothing) {
  const auto good = torch::ones({3});
  const auto bad = torch::ones({3});
  LAMB optimizer({good, bad});
  good.mutable_grad() = torch::ones({3});
  bad.mutable_grad() = torch::ones({3}).to_sparse();
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("LAMB does not support sparse gradients, and "
                                                  "parameter 1 of group 0")));
  EXPECT_TRUE(torch::equal(good, torch::ones({3})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(LAMB, LeavesParametersWithoutAGradientAlone) {
  const auto with = torch::ones({3});
  const auto without = torch::ones({3});
  LAMB optimizer({with, without});
  with.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_FALSE(torch::equal(with, torch::ones({3})));
  EXPECT_TRUE(torch::equal(without, torch::ones({3})));
  EXPECT_EQ(optimizer.state().size(), 1U);
}

TEST(LAMB, ReturnsTheLossOfItsClosure) {
  const auto x = torch::ones({3}).requires_grad_();
  LAMB optimizer({x});
  const auto loss = optimizer.step([&] {
    const auto value = x.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3.0F);
  EXPECT_EQ(state_of(optimizer, x).step(), 1);
}

// Gradients of bfloat16 and steps far below its last digit.
TEST(LAMB, InMasterWeightsTrainsBfloat16AsFloats) {
  torch::manual_seed(5);
  const auto low = torch::randn({300}).to(torch::kBFloat16).requires_grad_();
  const auto wide = low.detach().to(torch::kFloat).requires_grad_();
  const auto options = LAMBOptions(1e-3).weight_decay(0.1);
  LAMB inner({low}, options);
  mezzo::MasterWeights masters(inner);
  LAMB plain({wide}, options);
  for (int step = 0; step < 20; ++step) {
    const auto gradient = torch::randn({300}).to(torch::kBFloat16);
    low.mutable_grad() = gradient.clone();
    wide.mutable_grad() = gradient.to(torch::kFloat);
    masters.step();
    plain.step();
  }
  EXPECT_TRUE(torch::equal(mezzo::master_params(masters)[0], wide));
  EXPECT_TRUE(torch::equal(low, wide.to(torch::kBFloat16)));
}

}  // namespace
