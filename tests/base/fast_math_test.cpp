// Compiled with -ffast-math, which folds `x != x` and std::isfinite(x) to constants (on Clang with
// -fno-finite-math-only). A different inline namespace keeps the linker from choosing the kernels
// of another translation unit.

#undef MEZZO_COMPILED_LIB
#include <mezzo/base/version.h>
#undef MEZZO_ABI_NAMESPACE
#define MEZZO_ABI_NAMESPACE fast_math

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/simd.h>
#include <mezzo/kernels/unscale.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>

#if !defined(__FAST_MATH__) && !defined(__clang__)  // Clang defines it only for all its flags
#error "fast_math_test.cpp must be compiled with -ffast-math"
#endif

namespace {

using mezzo::fast_math::GradScalerOptions;
using mezzo::fast_math::detail::CpuIsa;

// From bits: the compiler may assume that a literal infinity does not occur.
constexpr std::array<uint32_t, 3> kNonfinite{0x7F800000U, 0xFF800000U, 0x7FC00000U};

class FastMath : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::fast_math::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
  }
};

TEST_P(FastMath, FindsInfAndNan) {
  const auto unscale = mezzo::fast_math::detail::get_unscale_kernel<float>(GetParam());
  const auto summarize = mezzo::fast_math::detail::get_grad_stats_kernel<float>(GetParam());
  const auto found_inf = [&](const void* values) {
    mezzo::fast_math::detail::PartialGradStats partial;
    summarize(values, 33, partial);
    return mezzo::fast_math::detail::FinalGradStats(partial, 1.0F).found_inf;
  };
  for (const uint32_t bad : kNonfinite) {
    for (const std::size_t place : {0U, 17U, 32U}) {
      std::array<uint32_t, 33> values{};
      values.fill(0x3F800000U);
      EXPECT_FALSE(found_inf(values.data()));
      values[place] = bad;
      EXPECT_TRUE(found_inf(values.data()));
      EXPECT_TRUE(unscale(values.data(), values.data(), 33, 0.5));
    }
  }
}

TEST_P(FastMath, RoundsFloat16AndBfloat16) {
  std::array<uint16_t, 5> half{0x3C00, 0x7BFF, 0x0001, 0x8003,
                               0x7C00};  // 1, 65504, two subnormals, inf
  mezzo::fast_math::detail::get_unscale_kernel<c10::Half>(GetParam())(half.data(), half.data(), 5,
                                                                      0.5);
  EXPECT_EQ(half, (std::array<uint16_t, 5>{0x3800, 0x77FF, 0x0000, 0x8002, 0x7C00}));
  std::array<uint16_t, 3> bfloat16{0x3F80, 0x3F81, 0x7F80};  // 1, 1 + an ulp, inf
  mezzo::fast_math::detail::get_unscale_kernel<c10::BFloat16>(GetParam())(bfloat16.data(),
                                                                          bfloat16.data(), 3, 0.5);
  EXPECT_EQ(bfloat16, (std::array<uint16_t, 3>{0x3F00, 0x3F01, 0x7F80}));
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, FastMath,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512));

TEST(FastMathFma, RoundsOnce) {
#ifdef __clang__
  GTEST_SKIP() << "Clang rounds its fma twice under -ffast-math";
#endif
  volatile float a = 0x1.000126p+0F, b = 0x1.fffdb4p-1F, c = -0x1.000002p+24F;
  const float left = a, right = b;
  float sum = c;
  mezzo::fast_math::detail::ScalarVec<float>::fma(left, right, sum, sum);
  EXPECT_EQ(sum, -0x1.000002p+24F);
}

TEST(FastMathFma, PreservesInfinity) {
  volatile float a = 2.0F, b = 3.0F;
  volatile uint32_t infinity = kNonfinite[1];
  const auto c = std::bit_cast<float>(uint32_t{infinity});
  const float left = a, right = b;
  float sum = 0;
  mezzo::fast_math::detail::ScalarVec<float>::fma(left, right, c, sum);
  EXPECT_EQ(std::bit_cast<uint32_t>(sum), kNonfinite[1]);
}

TEST(FastMathComparisons, ThrowsForNan) {
  const auto check = [](double option) {
    TORCH_CHECK(mezzo::fast_math::detail::is_at_least(option, 0), "below");
    TORCH_CHECK(mezzo::fast_math::detail::is_above(option, -1), "not above");
  };
  volatile uint64_t nan = 0x7FF8000000000000U;
  EXPECT_THROW(check(std::bit_cast<double>(uint64_t{nan})), c10::Error);
  EXPECT_THROW(check(-1.0), c10::Error);
  EXPECT_NO_THROW(check(0.0));
}

TEST(FastMathGradScalerOptions, GrowthStaysFinite) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 3e38, .growth_interval = 1});
  EXPECT_EQ(options.next(options.initial_state(), false).scale, 3e38F);
}

TEST(FastMathGradScalerOptions, ThrowsForNanAndInf) {
  const auto infinity = std::bit_cast<double>(uint64_t{0x7FF0000000000000U});
  const auto nan = std::bit_cast<double>(uint64_t{0x7FF8000000000000U});
  for (const double bad : {infinity, nan}) {
    EXPECT_THROW(GradScalerOptions::dynamic({.init_scale = bad}), c10::Error);
    EXPECT_THROW(GradScalerOptions::dynamic({.growth_factor = bad}), c10::Error);
    EXPECT_THROW(GradScalerOptions::fixed(bad), c10::Error);
  }
}

}  // namespace
