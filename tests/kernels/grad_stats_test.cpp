// GradStats against a scalar reference in float64, for every dtype, instruction set and layout,
// sizes around vectors and chunks, and extreme values.

#include <mezzo/kernels/compute_grad_stats.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "../support/isa_name.h"
#include "../support/special_values.h"

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::kGradStatsChunkElements;
using mezzo::detail::PartialGradStats;

struct ReferenceGradStats {
  bool found_inf = false;
  double norm_sq = 0;
  double max_abs = 0;
};

ReferenceGradStats reference_grad_stats(const std::vector<torch::Tensor>& gradients,
                                        float inv_scale) {
  ReferenceGradStats stats;
  for (const torch::Tensor& gradient : gradients) {
    const auto stored = gradient.to(torch::kDouble).clone(torch::MemoryFormat::Contiguous);
    const bool is_double = gradient.scalar_type() == torch::kDouble;
    const double* values = stored.const_data_ptr<double>();
    for (int64_t j = 0; j < stored.numel(); ++j) {
      const double product = is_double
                                 ? values[j] * static_cast<double>(inv_scale)
                                 : static_cast<double>(static_cast<float>(values[j]) * inv_scale);
      const double magnitude = std::abs(product);
      stats.norm_sq += magnitude * magnitude;
      if (!(magnitude <= stats.max_abs) && !std::isnan(stats.max_abs)) {
        stats.max_abs = magnitude;
      }
      stats.found_inf = stats.found_inf || !std::isfinite(magnitude);
    }
  }
  return stats;
}

torch::Tensor inverse_of(float scale) { return torch::full({}, 1.0F / scale); }

void expect_near(double actual, double expected) {
  if (std::isfinite(expected)) {
    EXPECT_NEAR(actual, expected, 1e-6 * expected);
  } else {
    EXPECT_FALSE(std::isfinite(actual));
  }
}

void expect_grad_stats(const std::vector<torch::Tensor>& gradients, float inv_scale) {
  const auto expected = reference_grad_stats(gradients, inv_scale);
  const auto stats = mezzo::detail::compute_grad_stats(gradients, torch::full({}, inv_scale));
  EXPECT_EQ(stats.found_inf.item<float>() != 0, expected.found_inf);
  expect_near(stats.norm_sq.item<double>(), expected.norm_sq);
  if (std::isnan(expected.max_abs)) {
    EXPECT_TRUE(std::isnan(stats.max_abs.item<double>()));
  } else {
    EXPECT_EQ(stats.max_abs.item<double>(), expected.max_abs);
  }
}

class GradStatsKernel : public testing::TestWithParam<std::tuple<torch::ScalarType, CpuIsa>> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(isa())) GTEST_SKIP() << "this CPU has no " << isa_name(isa());
  }
  static torch::ScalarType dtype() { return std::get<0>(GetParam()); }
  static CpuIsa isa() { return std::get<1>(GetParam()); }

  static PartialGradStats run(const torch::Tensor& values, CpuIsa isa) {
    PartialGradStats partial;
    mezzo::detail::get_grad_stats_kernel(dtype(), isa)(values.const_data_ptr(), values.numel(),
                                                       partial);
    return partial;
  }
  static PartialGradStats scalar_reference(const torch::Tensor& values) {
    using mezzo::detail::GradStatsKernel;
    using mezzo::detail::ScalarVec;
    PartialGradStats partial;
    mezzo::detail::dispatch_gradient_dtype(dtype(), [&]<class Element>(Element) {
      GradStatsKernel<Element, ScalarVec<Element>>::run(values.const_data_ptr(), values.numel(),
                                                        partial);
    });
    return partial;
  }
  static torch::Tensor random(int64_t count) {
    return (torch::randn({count}, torch::kDouble) * 100).to(dtype());
  }
};

TEST_P(GradStatsKernel, BitwiseEqualsScalarForEveryTail) {
  torch::manual_seed(1);
  for (int64_t count = 0; count <= 70; ++count) {
    const auto values = random(count);
    const PartialGradStats reference = scalar_reference(values);
    const PartialGradStats partial = run(values, isa());
    EXPECT_EQ(std::bit_cast<uint64_t>(partial.norm_sq), std::bit_cast<uint64_t>(reference.norm_sq))
        << count;
    EXPECT_EQ(partial.max_double, reference.max_double) << count;
    EXPECT_EQ(partial.max_float, reference.max_float) << count;
    const auto expected = reference_grad_stats({values}, 1.0F);
    EXPECT_NEAR(partial.norm_sq, expected.norm_sq, 1e-12 * expected.norm_sq);
  }
}

TEST_P(GradStatsKernel, ReadsMisalignedMemory) {
  torch::manual_seed(2);
  constexpr int64_t kCount = 53;
  const auto values = random(kCount);
  const PartialGradStats reference = scalar_reference(values);
  const auto bytes = static_cast<std::size_t>(kCount) * values.element_size();
  for (std::size_t offset = 0; offset < 65; ++offset) {
    std::vector<char> memory(bytes + 130, 'm');
    std::memcpy(memory.data() + offset, values.const_data_ptr(), bytes);
    PartialGradStats partial;
    mezzo::detail::get_grad_stats_kernel(dtype(), isa())(memory.data() + offset, kCount, partial);
    EXPECT_EQ(partial.norm_sq, reference.norm_sq) << offset;
  }
}

TEST_P(GradStatsKernel, FindsNonfiniteElementAtEveryIndex) {
  constexpr int64_t kCount = 39;
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    for (int64_t index = 0; index < kCount; ++index) {
      auto values = torch::ones({kCount}, dtype());
      values[index] = bad;
      const mezzo::detail::FinalGradStats result(run(values, isa()), 0.5F);
      EXPECT_TRUE(result.found_inf) << bad << " at " << index;
      EXPECT_EQ(std::isnan(result.max_abs), std::isnan(bad)) << bad << " at " << index;
    }
  }
}

TEST_P(GradStatsKernel, AcceptsExtremeFiniteValues) {
  const double largest = dtype() == torch::kHalf       ? 65504.0
                         : dtype() == torch::kBFloat16 ? 3.3895313892515355e38
                         : dtype() == torch::kFloat    ? std::numeric_limits<float>::max()
                                                       : 1e150;
  auto values =
      torch::tensor({largest, -largest, 0.0, -0.0, 6e-8, 1e-40, 1e-45, 1e-300}, torch::kDouble)
          .to(dtype())
          .repeat({11});
  const PartialGradStats partial = run(values, isa());
  const mezzo::detail::FinalGradStats result(partial, 1.0F);
  EXPECT_FALSE(result.found_inf);
  EXPECT_EQ(result.max_abs, largest);
  EXPECT_DOUBLE_EQ(result.norm_sq, 22 * largest * largest);
}

TEST_P(GradStatsKernel, SumsSubnormals) {
  const double smallest = dtype() == torch::kHalf       ? std::ldexp(1.0, -24)
                          : dtype() == torch::kBFloat16 ? std::ldexp(1.0, -133)
                                                        : std::ldexp(1.0, -149);
  const auto values = torch::full({37}, 3 * smallest, torch::kDouble).to(dtype());
  EXPECT_EQ(run(values, isa()).norm_sq, 37 * 9 * smallest * smallest);
}

INSTANTIATE_TEST_SUITE_P(AllDtypesAndInstructionSets, GradStatsKernel,
                         testing::Combine(testing::Values(torch::kFloat, torch::kDouble,
                                                          torch::kHalf, torch::kBFloat16),
                                          testing::Values(CpuIsa::scalar, CpuIsa::vector128,
                                                          CpuIsa::avx2, CpuIsa::avx512)),
                         [](const auto& test) {
                           return std::string(torch::toString(std::get<0>(test.param))) + "_" +
                                  isa_name(std::get<1>(test.param));
                         });

class GradStatsOfDtype : public testing::TestWithParam<torch::ScalarType> {};

TEST_P(GradStatsOfDtype, MatchesReferenceForSizesAroundChunk) {
  torch::manual_seed(4);
  for (const int64_t count :
       {int64_t{0}, int64_t{1}, kGradStatsChunkElements - 1, kGradStatsChunkElements,
        kGradStatsChunkElements + 1, 3 * kGradStatsChunkElements + 17}) {
    const auto values = torch::randn({count}, torch::kDouble).to(GetParam());
    SCOPED_TRACE(count);
    expect_grad_stats({values}, 0.25F);
    if (count == 0) continue;
    for (const int64_t index : {int64_t{0}, count / 2, count - 1}) {
      auto broken = values.clone();
      broken[index] = index == count / 2 ? kNan : kInfinity;
      const auto stats = mezzo::detail::compute_grad_stats({values, broken}, inverse_of(4));
      EXPECT_EQ(stats.found_inf.item<float>(), 1.0F) << index;
    }
  }
}

TEST_P(GradStatsOfDtype, MatchesReferenceForEveryScale) {
  torch::manual_seed(5);
  const auto values = torch::randn({1000}, torch::kDouble).to(GetParam());
  for (int exponent = -24; exponent <= 24; ++exponent) {
    SCOPED_TRACE(exponent);
    expect_grad_stats({values}, std::ldexp(1.0F, exponent));
    expect_grad_stats({values}, std::ldexp(1.37F, exponent));
  }
}

TEST_P(GradStatsOfDtype, ReadsEveryLayoutWithoutWriting) {
  torch::manual_seed(6);
  const auto base = torch::randn({40, 30}, torch::kDouble).to(GetParam());
  const auto before = base.clone();
  const std::vector<torch::Tensor> layouts{
      base.t(),
      base.slice(0, 0, 40, 3),
      base.slice(1, 1, 29),
      base.flatten().slice(0, 1),
      torch::ones({1}, GetParam()).expand({17}),
      torch::_efficientzerotensor({5}, GetParam()),
      torch::empty({0, 3}, GetParam()),
      base.view({2, 20, 30}).permute({1, 2, 0}),
      torch::_neg_view(base),
  };
  const auto version = base._version();
  for (const auto& layout : layouts) {
    SCOPED_TRACE(layout.sizes());
    expect_grad_stats({layout}, 0.5F);
  }
  expect_grad_stats(layouts, 0.5F);
  EXPECT_TRUE(torch::equal(base, before));
  EXPECT_EQ(base._version(), version);
}

TEST_P(GradStatsOfDtype, BitwiseIdenticalForAnyThreadCount) {
  torch::manual_seed(7);
  std::vector<torch::Tensor> gradients;
  for (int64_t i = 0; i < 40; ++i) {
    gradients.push_back(torch::randn({1 + i * i * 97}, torch::kDouble).to(GetParam()));
  }
  const int threads = at::get_num_threads();
  std::vector<double> sums;
  for (const int count : {1, 2, 3, 4}) {
    at::set_num_threads(count);
    for (int repeat = 0; repeat < 3; ++repeat) {
      sums.push_back(
          mezzo::detail::compute_grad_stats(gradients, inverse_of(3)).norm_sq.item<double>());
    }
  }
  at::set_num_threads(threads);
  for (const double sum : sums) {
    EXPECT_EQ(std::bit_cast<uint64_t>(sum), std::bit_cast<uint64_t>(sums.front()));
  }
}

TEST_P(GradStatsOfDtype, MatchesAtenImplementation) {
  torch::manual_seed(8);
  std::vector<torch::Tensor> gradients{torch::randn({3, 50}, torch::kDouble).to(GetParam()),
                                       torch::empty({0}, GetParam()), torch::randn({7}),
                                       torch::randn({9}, torch::kDouble)};
  for (const float bad : {1.0F, 0.0F, kInfinity, kNan}) {
    for (const float inv_scale : {1.0F, 1e-3F, 4096.0F}) {
      gradients[0][1][3] = bad;
      const auto factor = torch::full({1}, inv_scale);
      const auto stats = mezzo::detail::compute_grad_stats(gradients, factor);
      const auto aten = mezzo::detail::compute_grad_stats_aten(gradients, factor);
      EXPECT_EQ(aten.found_inf.item<float>(), stats.found_inf.item<float>());
      expect_near(aten.norm_sq.item<double>(), stats.norm_sq.item<double>());
      EXPECT_TRUE(torch::allclose(aten.max_abs, stats.max_abs, 1e-6, 0, true));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, GradStatsOfDtype,
                         testing::Values(torch::kFloat, torch::kDouble, torch::kHalf,
                                         torch::kBFloat16),
                         [](const auto& test) { return torch::toString(test.param); });

TEST(GradStats, FindsOverflowOfFiniteFactors) {
  expect_grad_stats({torch::full({3}, 1e30F)}, 1e20F);
  expect_grad_stats({torch::full({3}, 1e30, torch::kDouble)}, 1e20F);  // finite in float64
  expect_grad_stats({torch::zeros({3})}, kInfinity);
  expect_grad_stats({torch::zeros({3}, torch::kDouble)}, kNan);
  expect_grad_stats({torch::full({3}, std::numeric_limits<float>::max())},
                    std::nextafter(1.0F, 2.0F));
}

TEST(GradStats, MergesAdjacentGradientsOfOneBuffer) {
  const torch::Tensor buffer = torch::randn({100000});
  const auto part = [&](int64_t begin, int64_t end) { return buffer.slice(0, begin, end); };
  const torch::Tensor inv_scale = torch::full({}, 0.5F);
  const auto expect_one = [&](const std::vector<torch::Tensor>& parts) {
    const auto whole = mezzo::detail::compute_grad_stats({buffer}, inv_scale);
    const auto merged = mezzo::detail::compute_grad_stats(parts, inv_scale);
    EXPECT_TRUE(torch::equal(merged.norm_sq, whole.norm_sq));
    EXPECT_TRUE(torch::equal(merged.max_abs, whole.max_abs));
    EXPECT_TRUE(torch::equal(merged.found_inf, whole.found_inf));
  };
  expect_one({part(0, 7), part(7, 50000), part(50000, 100000)});
  expect_one({part(50000, 100000), part(7, 50000), part(0, 7)});
  buffer[77777] = std::numeric_limits<float>::infinity();
  expect_one({part(50000, 100000), part(7, 50000), part(0, 7)});
  // The element between the two parts is not read.
  EXPECT_EQ(mezzo::detail::compute_grad_stats({part(0, 77777), part(77778, 100000)}, inv_scale)
                .found_inf.item<float>(),
            0.0F);
}

TEST(GradStats, ZeroWithoutGradients) {
  for (const std::vector<torch::Tensor>& nothing :
       {std::vector<torch::Tensor>{}, {torch::empty({0})}}) {
    const auto inv_scale = torch::ones({});
    const auto stats = mezzo::detail::compute_grad_stats(nothing, inv_scale);
    EXPECT_EQ(stats.found_inf.item<float>(), 0);
    EXPECT_EQ(stats.norm_sq.item<double>(), 0);
    EXPECT_EQ(stats.max_abs.item<double>(), 0);
    const auto aten = mezzo::detail::compute_grad_stats_aten(nothing, inv_scale);
    EXPECT_EQ(aten.found_inf.item<float>(), 0);
    EXPECT_EQ(aten.norm_sq.item<double>(), 0);
  }
}

TEST(GradStats, PreservesCopyOnWriteSharing) {
  const auto gradient = torch::ones({100});
  const auto lazy = torch::_lazy_clone(gradient);
  mezzo::detail::compute_grad_stats({lazy}, torch::ones({}));
  EXPECT_EQ(lazy.const_data_ptr(), gradient.const_data_ptr());
}

}  // namespace
