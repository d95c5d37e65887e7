#include <mezzo/base/detail/float_bits.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace {

using mezzo::summarize;
using mezzo::TensorSummary;

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

TEST(TensorSummary, ReadsAllDtypesAndLayouts) {
  const torch::Tensor values = torch::tensor(
      {-3.0F, 0.5F, 2.0F, -kFloatInfinity, kFloatInfinity, std::nanf(""), -kFloatInfinity});
  const torch::Tensor sparse = torch::sparse_coo_tensor(
      torch::tensor({{5L, 2L}}), torch::tensor({1.0F, -kFloatInfinity}), {9});
  const std::vector<TensorSummary> all =
      summarize({values, values.to(torch::kHalf), values.to(torch::kDouble).unsqueeze(0).t(),
                 sparse, torch::ones({4}).to(torch::kFloat8_e5m2), torch::arange(3),
                 torch::Tensor(), torch::empty({0}), torch::full({2}, kFloatInfinity)});
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
  EXPECT_EQ(all[0].to_string(), "float32 [7] in [-3, 2], |x| >= 0.5, 3 inf, 1 NaN");
  EXPECT_EQ(all[3].numel, 2);
  EXPECT_EQ(all[3].negative_infs, 1);
  EXPECT_EQ(all[4].max, 1);
  for (int i = 5; i < 8; ++i) EXPECT_EQ(all[i].dtype, at::ScalarType::Undefined) << i;
  EXPECT_EQ(all[8].to_string(), "float32 [2], 2 inf");
}

TEST(ExponentRange, MatchesRoundingOfTorchCasts) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    for (const double end : {0x1p-25, 0x1p-134, 0x1p-150, 65520.0, 0x1.FFp+127, 0x1.FFFFFFp+127}) {
      for (const double value : {end * (1 - 0x1p-20), end, -end * (1 + 0x1p-10)}) {
#ifdef __FAST_MATH__  // subnormal numbers are 0 in a program linked with it
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

}  // namespace
