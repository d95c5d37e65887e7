// LAMB compared with the algorithm of Apex's FusedLAMB in torch ops.

#include <mezzo/optim/lamb.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

namespace {

using mezzo::optim::LAMB;
using mezzo::optim::LAMBOptions;

/// Reference LAMB of one parameter.
class ReferenceLamb {
 public:
  ReferenceLamb(const torch::Tensor& parameter, const LAMBOptions& options)
      : options_(options),
        parameter_(parameter.detach().clone()),
        exp_avg_(torch::zeros_like(parameter_)),
        exp_avg_sq_(torch::zeros_like(parameter_)) {}

  void step(const torch::Tensor& gradient) {
    const auto [beta1, beta2] = options_.betas();
    ++count_;
    exp_avg_ = beta1 * exp_avg_ + (1 - beta1) * gradient;
    exp_avg_sq_ = beta2 * exp_avg_sq_ + (1 - beta2) * gradient * gradient;
    auto mean = exp_avg_;
    auto square = exp_avg_sq_;
    if (options_.bias_correction()) {
      mean = mean / (1 - std::pow(beta1, count_));
      square = square / (1 - std::pow(beta2, count_));
    }
    const auto update =
        mean / (square.sqrt() + options_.eps()) + options_.weight_decay() * parameter_;
    double ratio = 1;
    if (options_.weight_decay() != 0 || options_.use_nvlamb()) {
      const double parameter_norm = parameter_.to(torch::kDouble).norm().item<double>();
      const double update_norm = update.to(torch::kDouble).norm().item<double>();
      if (parameter_norm > 0 && update_norm > 0) ratio = parameter_norm / update_norm;
    }
    parameter_ = parameter_ - options_.lr() * ratio * update;
  }

  const torch::Tensor& parameter() const { return parameter_; }

 private:
  LAMBOptions options_;
  torch::Tensor parameter_;
  torch::Tensor exp_avg_;
  torch::Tensor exp_avg_sq_;
  int count_ = 0;
};

/// Sizes of one and two chunks, and several layouts.
std::vector<torch::Tensor> make_parameters(torch::ScalarType dtype) {
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
  const auto ours = make_parameters(dtype);
  std::vector<ReferenceLamb> plain;
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

// Tolerances of about ten ULPs at 1.
TEST(LAMB, MatchesReferenceInFloat32AndFloat64) {
  const auto options = LAMBOptions(1e-2).weight_decay(0.1);
  expect_plain_steps(torch::kFloat, options, /*steps=*/100, 1e-6);
  expect_plain_steps(torch::kDouble, options, /*steps=*/100, 2e-15);
}

TEST(LAMB, MatchesReferenceForEachOption) {
  for (const auto& options :
       {LAMBOptions(1e-2).weight_decay(0.3).betas({0.8, 0.95}).eps(1e-3),
        LAMBOptions(1e-2).bias_correction(false), LAMBOptions(1e-2).weight_decay(0),
        LAMBOptions(1e-2).weight_decay(0).use_nvlamb(true)}) {
    expect_plain_steps(torch::kDouble, options, /*steps=*/10, 2e-15);
  }
}

TEST(LAMB, DefaultsMatchApex) {
  const LAMBOptions options;
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(options.eps(), 1e-6);
  EXPECT_EQ(options.weight_decay(), 0.01);
  EXPECT_TRUE(options.bias_correction());
  EXPECT_FALSE(options.use_nvlamb());
}

// In a first step with bias correction each element of the update is 1 or -1 (eps 0).
TEST(LAMB, UpdateNormIsLrTimesParamNorm) {
  const auto x = torch::tensor({3.0, 0.0, -4.0, 0.0}, torch::kDouble);
  LAMB optimizer({x}, LAMBOptions(0.1).weight_decay(0).eps(0).use_nvlamb(true));
  x.mutable_grad() = torch::tensor({1.0, -7.0, 0.5, 2.0}, torch::kDouble);
  optimizer.step();
  const auto expected = torch::tensor({2.75, 0.25, -4.25, -0.25}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-14)) << x;
}

TEST(LAMB, MatchesAdamWithoutWeightDecay) {
  const auto x = torch::tensor({3.0, 0.0, -4.0, 0.0}, torch::kDouble);
  LAMB optimizer({x}, LAMBOptions(0.1).weight_decay(0).eps(0));
  x.mutable_grad() = torch::tensor({1.0, -7.0, 0.5, 2.0}, torch::kDouble);
  optimizer.step();
  const auto expected = torch::tensor({2.9, 0.1, -4.1, -0.1}, torch::kDouble);
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-14)) << x;
}

TEST(LAMB, ZeroNormMeansTrustRatioOne) {
  const auto zeros = torch::zeros({4}, torch::kDouble);
  const auto still = torch::tensor({3.0, 4.0}, torch::kDouble);
  LAMB optimizer({zeros, still}, LAMBOptions(0.5).eps(1).weight_decay(0).use_nvlamb(true));
  zeros.mutable_grad() = torch::full({4}, 3.0, torch::kDouble);
  still.mutable_grad() = torch::zeros({2}, torch::kDouble);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(zeros, torch::full({4}, -0.5 * 3 / 4, torch::kDouble), 0, 1e-14));
  EXPECT_TRUE(torch::equal(still, torch::tensor({3.0, 4.0}, torch::kDouble)));
}

TEST(LAMB, NaNSpreadsOverOneParamOnly) {
  const auto bad = torch::ones({5});
  const auto good = torch::ones({5});
  LAMB optimizer({bad, good});
  bad.mutable_grad() = torch::tensor({1.0F, 2.0F, std::nanf(""), 1.0F, 1.0F});
  good.mutable_grad() = torch::ones({5});
  optimizer.step();
  EXPECT_TRUE(bad.isnan().all().item<bool>());
  EXPECT_TRUE(good.isfinite().all().item<bool>());
}

}  // namespace
