#include <mezzo/diagnostics/tensor_summary.h>
#include <mezzo/diagnostics/underflow_report.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::LayerRangeStats;
using mezzo::UnderflowReport;
using testing::HasSubstr;
using testing::ThrowsMessage;

const float kFloat32Infinity = std::numeric_limits<float>::infinity();

float power(int exponent) { return std::ldexp(1.0F, exponent); }

/// Statistics computed by casting all values.
LayerRangeStats stats_by_casting(const torch::Tensor& values, at::ScalarType dtype,
                                 float smallest_normal) {
  LayerRangeStats stats;
  stats.num_samples = values.numel();
  const auto fraction = [&](const torch::Tensor& mask) {
    return mask.sum().item<double>() / static_cast<double>(values.numel());
  };
  const torch::Tensor cast = values.to(dtype).to(torch::kFloat);
  stats.zero = fraction(values == 0);
  stats.underflow = fraction((values != 0) & (cast == 0));
  stats.subnormal = fraction((cast != 0) & (values.abs() < smallest_normal));
  stats.overflow = fraction(values.isfinite() & ~cast.isfinite());
  stats.nonfinite = fraction(~values.isfinite());
  return stats;
}

class UnderflowReportDtypes : public testing::TestWithParam<at::ScalarType> {};

TEST_P(UnderflowReportDtypes, FractionsMatchCasts) {
  torch::manual_seed(2);
  torch::Tensor values =
      torch::exp2(torch::rand({5000}) * 250 - 130) * (torch::randn({5000}).sign());
  values.index_put_({torch::indexing::Slice(0, 100)}, 0);
  values.index_put_({torch::indexing::Slice(100, 130)}, kFloat32Infinity);
  values.index_put_({torch::indexing::Slice(130, 150)}, std::nanf(""));
  UnderflowReport report(GetParam());
  report.add("layer", values);
  const LayerRangeStats layer = report.layers().at(0);
  const float normal = power(mezzo::ExponentRange::from_dtype(GetParam()).min_normal);
  const LayerRangeStats expected = stats_by_casting(values, GetParam(), normal);
  EXPECT_EQ(layer.num_samples, 5000);
  EXPECT_DOUBLE_EQ(layer.zero, 0.02);
  EXPECT_NEAR(layer.underflow, expected.underflow, 1e-9);
  EXPECT_NEAR(layer.subnormal, expected.subnormal, 1e-9);
  EXPECT_NEAR(layer.overflow, expected.overflow, 1e-9);
  EXPECT_DOUBLE_EQ(layer.nonfinite, 0.01);
  EXPECT_GT(layer.subnormal, 0);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, UnderflowReportDtypes,
                         testing::Values(torch::kHalf, torch::kBFloat16),
                         [](const auto& dtype) { return std::string(c10::toString(dtype.param)); });

TEST(UnderflowReport, MatchesFloat8Casts) {
  const torch::Tensor values = torch::exp2(torch::arange(-20, 20)) * 1.25;
  for (const auto dtype : {torch::kFloat8_e5m2, torch::kFloat8_e4m3fn}) {
    UnderflowReport report(dtype);
    report.add("layer", values);
    const LayerRangeStats layer = report.layers().at(0);
    const float normal = power(mezzo::ExponentRange::from_dtype(dtype).min_normal);
    const LayerRangeStats expected = stats_by_casting(values, dtype, normal);
    EXPECT_NEAR(layer.underflow, expected.underflow, 1e-9) << dtype;
    EXPECT_NEAR(layer.subnormal, expected.subnormal, 1e-9) << dtype;
    // By the format: libtorch's casts to float8_e4m3fn saturate in 2.15, and made NaN in 2.11.
    const double largest = dtype == torch::kFloat8_e5m2 ? 57344 : 448;
    EXPECT_EQ(layer.overflow, (values > largest).to(torch::kDouble).mean().item<double>()) << dtype;
  }
}

TEST(UnderflowReport, ReportsMinAndMaxExponent) {
  UnderflowReport report(torch::kHalf);
  report.add("layer", torch::tensor({power(-20), -1.5F * power(-20), power(3), 0.0F}));
  report.add("layer", torch::tensor({7.9F, 8.1F}, torch::kDouble));
  const LayerRangeStats layer = report.layers().at(0);
  EXPECT_EQ(layer.min_exponent, -20);
  EXPECT_EQ(layer.max_exponent, 3);
  EXPECT_EQ(layer.num_samples, 6);
}

TEST(UnderflowReport, CountsFloat64BeyondFloat32Range) {
  mezzo::UnderflowReport report(torch::kBFloat16);
  report.add("layer", torch::tensor({1e39, 1e-50}, torch::kDouble));
  EXPECT_EQ(report.total().nonfinite, 0);
  EXPECT_EQ(report.total().overflow, 0.5);
  EXPECT_EQ(report.total().underflow, 0.5);
  EXPECT_EQ(report.total().min_exponent, -167);
}

TEST(UnderflowReport, SamplesAllColumns) {
  UnderflowReport report(torch::kHalf, {.max_samples = 1024});
  const torch::Tensor columns = torch::exp2(torch::arange(16) - 8.0).repeat({4096, 1});
  report.add("layer", columns.t());  // not contiguous
  report.add("rows", columns);
  for (const LayerRangeStats& layer : report.layers()) {
    EXPECT_LE(layer.num_samples, 1024);
    EXPECT_GE(layer.num_samples, 900);
    EXPECT_EQ(layer.min_exponent, -8);
    EXPECT_EQ(layer.max_exponent, 7);
  }
}

TEST(UnderflowReport, GroupsGradsAndActivationsByLayer) {
  torch::nn::Sequential model;
  model->push_back("first", torch::nn::Linear(4, 8));
  model->push_back("unused", torch::nn::Linear(4, 4));
  model->push_back("last", torch::nn::Linear(8, 2));
  const auto first = model->ptr<torch::nn::LinearImpl>(0);
  const auto last = model->ptr<torch::nn::LinearImpl>(2);
  UnderflowReport report(torch::kHalf, {.loss_scale = 4});
  const torch::Tensor hidden = first->forward(torch::ones({3, 4}));
  hidden.register_hook([&](const torch::Tensor& gradient) { report.add("hidden", gradient); });
  last->forward(hidden).sum().backward();
  report.add_gradients(*model);
  const auto layers = report.layers();
  ASSERT_EQ(layers.size(), 3);
  EXPECT_EQ(layers[0].layer, "hidden");
  EXPECT_EQ(layers[0].num_samples, 24);
  EXPECT_EQ(layers[1].layer, "first");
  EXPECT_EQ(layers[1].num_samples, 40);
  EXPECT_EQ(layers[2].layer, "last");
  EXPECT_EQ(report.total().num_samples, 24 + 40 + 18);
}

TEST(SuggestLossScale, UsesDtypeRange) {
  UnderflowReport report(torch::kHalf, {.loss_scale = 64});
  report.add("layer", torch::tensor({power(-3), power(-25) * 1.5F, power(-30), 0.0F}));
  // The largest, 2^-3, may grow to 2^12: three powers of two below float16's 2^15.
  EXPECT_EQ(mezzo::suggest_loss_scale(report), 64 * power(15));
  EXPECT_EQ(mezzo::suggest_loss_scale(report, 5), 64 * power(13));
  std::ostringstream text;
  text << report;
  EXPECT_THAT(text.str(), HasSubstr("can grow by 2^18 before"));
  EXPECT_THAT(text.str(), HasSubstr("float16 (2^-24 to 2^15), percent of sampled values"));

  UnderflowReport small(torch::kHalf, {.loss_scale = 1024});
  small.add("layer", torch::tensor({power(-30)}));
  EXPECT_EQ(mezzo::suggest_loss_scale(small), power(24)) << "Apex's maximum";
  report.add("layer", torch::tensor({kFloat32Infinity}));
  EXPECT_EQ(mezzo::suggest_loss_scale(report), 32);
}

TEST(SuggestLossScale, HandlesAllZeroGrads) {
  const torch::Tensor weight = torch::ones({8}, torch::requires_grad());
  const auto report_at = [&weight](double scale) {
    weight.mutable_grad() = torch::Tensor();
    const torch::Tensor tiny = torch::full({8}, power(-24), torch::kHalf);
    (weight.to(torch::kHalf) * tiny * power(-4)).sum().to(torch::kFloat).mul(scale).backward();
    UnderflowReport report(torch::kHalf, {.loss_scale = scale});
    report.add("weight", weight.grad());
    return report;
  };
  const UnderflowReport underflowed = report_at(1);
  ASSERT_EQ(underflowed.total().zero, 1) << "the exact gradient is 2^-28";
  // At most 2^-25, which may grow to 2^12: 37 doublings, limited to 24 by Apex's maximum.
  const double suggested = mezzo::suggest_loss_scale(underflowed);
  EXPECT_EQ(suggested, power(24));
  EXPECT_EQ(mezzo::suggest_loss_scale(underflowed, 20), power(20));
  std::ostringstream text;
  text << underflowed;
  EXPECT_THAT(text.str(),
              HasSubstr("every value is 0: with the loss scale 1 all are at most 2^-25, "
                        "or the loss does not depend on these weights. To find out, use "
                        "a loss scale of 16777216, which overflows none"));
  // The advice, followed as far as the float16 loss allows.
  EXPECT_EQ(report_at(power(14)).total().zero, 0);
}

TEST(SuggestLossScale, LowersScaleAfterOverflow) {
  UnderflowReport report(torch::kHalf, {.loss_scale = 64});
  report.add("layer", torch::tensor({0.5F, kFloat32Infinity}));
  std::ostringstream text;
  text << report;
  EXPECT_EQ(mezzo::suggest_loss_scale(report), 32);
  EXPECT_THAT(text.str(),
              HasSubstr("a value overflowed: lower the loss scale from 64 to 32 or less"));
  EXPECT_THAT(text.str(), testing::Not(HasSubstr("can grow")));
}

TEST(UnderflowReport, ThrowsForInvalidArguments) {
  EXPECT_THAT([] { UnderflowReport report(torch::kInt); },
              ThrowsMessage<c10::Error>(HasSubstr("unsupported dtype Int")));
  EXPECT_THAT([] { UnderflowReport(torch::kHalf, {.loss_scale = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("loss_scale must be positive, but got 0")));
  EXPECT_THAT([] { UnderflowReport(torch::kHalf, {.max_samples = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("max_samples must be positive, but got 0")));
  UnderflowReport report(torch::kHalf);
  EXPECT_THAT([&] { mezzo::suggest_loss_scale(report); },
              ThrowsMessage<c10::Error>(HasSubstr("no values; call add_gradients()")));
  EXPECT_THAT([&] { report.add("ids", torch::zeros({2}, torch::kLong)); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("expected a floating-point tensor for ids, but got Long")));
}

}  // namespace
