#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::summarize;
using mezzo::TensorSummary;
using testing::HasSubstr;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

TEST(Summarize, GivesRangesWithSignAndCountsOfEachDtypeLayoutAndStride) {
  const torch::Tensor values =
      torch::tensor({-3.0F, 0.5F, 2.0F, -kInfinite, kInfinite, std::nanf(""), -kInfinite});
  const torch::Tensor sparse =
      torch::sparse_coo_tensor(torch::tensor({{5L, 2L}}), torch::tensor({1.0F, -kInfinite}), {9});
  const std::vector<TensorSummary> all =
      summarize({values, values.to(torch::kHalf), values.to(torch::kDouble).unsqueeze(0).t(),
                 sparse, torch::ones({4}).to(torch::kFloat8_e5m2), torch::arange(3),
                 torch::Tensor(), torch::empty({0}), torch::full({2}, kInfinite)});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(all[i].numel, 7) << i;
    EXPECT_EQ(all[i].min, -3) << i;
    EXPECT_EQ(all[i].max, 2) << i;
    EXPECT_EQ(all[i].min_abs, 0.5) << i;
    EXPECT_EQ(all[i].max_abs, 3) << i;
    EXPECT_EQ(all[i].infs, 3) << i;
    EXPECT_EQ(all[i].negative_infs, 2) << i;
    EXPECT_EQ(all[i].nans, 1) << i;
    EXPECT_FALSE(all[i].is_finite()) << i;
  }
  EXPECT_EQ(all[2].sizes, (std::vector<std::int64_t>{7, 1}));
  EXPECT_EQ(all[0].to_string(), "float32 [7] -3 to 2, |x| from 0.5 3 inf 1 NaN");
  EXPECT_EQ(all[3].numel, 2);
  EXPECT_EQ(all[3].negative_infs, 1);
  EXPECT_EQ(all[4].max, 1);
  for (int i = 5; i < 8; ++i) EXPECT_EQ(all[i].dtype, at::ScalarType::Undefined) << i;
  EXPECT_EQ(all[8].to_string(), "float32 [2] 2 inf");
}

TEST(ExponentRange, HasTheRoundingOfLibtorchsConversions) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    for (const double end : {0x1p-25, 0x1p-134, 0x1p-150, 65520.0, 0x1.FFp+127, 0x1.FFFFFFp+127}) {
      for (const double value : {end * (1 - 0x1p-20), end, -end * (1 + 0x1p-10)}) {
#ifdef __FAST_MATH__  // where a program is linked so, subnormal numbers are 0
        if (end < 1) continue;
#endif
        const auto cast = torch::scalar_tensor(value, torch::kDouble).to(dtype).item<double>();
        EXPECT_EQ(mezzo::detail::overflows(value, dtype), mezzo::detail::is_nonfinite(cast))
            << value << " in " << dtype;
        EXPECT_EQ(mezzo::detail::underflows(value, dtype), cast == 0) << value << " in " << dtype;
      }
    }
  }
}

TEST(Names, FindTiedWeightsViewsAndParametersOfOneBuffer) {
  const torch::Tensor flat = torch::zeros({10});
  torch::nn::Linear layer(2, 2);
  const mezzo::detail::Names names({{"a.weight", flat.narrow(0, 0, 4)},
                                    {"b.weight", flat.narrow(0, 4, 6)},
                                    {"c", layer->weight}});
  EXPECT_EQ(names.name_of(flat.narrow(0, 5, 2)), "b.weight");
  EXPECT_EQ(names.name_of(flat.narrow(0, 0, 2).view({2, 1})), "a.weight");
  EXPECT_EQ(names.name_of(layer->weight.t()), "c");
  EXPECT_EQ(names.name_of(torch::zeros({4})), "");
  const std::vector<c10::IValue> inputs = {torch::zeros({2}), flat.narrow(0, 4, 6)};
  EXPECT_EQ(names.module_of(mezzo::detail::OpArguments(inputs.data(), inputs.size())), "b");
  layer->weight.set_data(torch::zeros({2, 2}));
  EXPECT_EQ(names.name_of(flat), "a.weight");
}

TEST(Finding, IsOneLineOrWrappedWithItsRemedyUnbroken) {
  const mezzo::Finding finding{.severity = mezzo::FindingSeverity::warning,
                               .check = "range",
                               .where = "encoder.0",
                               .reason = "words" + std::string(30, ' ') + "of a reason " +
                                         std::string(80, 'x') + " that is long",
                               .remedy = std::string(120, 'y')};
  EXPECT_THAT(finding.message(), testing::StartsWith("encoder.0: words"));
  EXPECT_THAT(finding.message(), testing::EndsWith("; " + finding.remedy));
  std::ostringstream text;
  text << finding;
  EXPECT_THAT(text.str(), testing::StartsWith("  warning  encoder.0: words of a reason\n"));
  EXPECT_THAT(text.str(), HasSubstr("\n           > " + finding.remedy + "\n"));
}

}  // namespace
