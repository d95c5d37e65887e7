// CPU unscaling against scalar references, for every dtype, instruction set, tail and alignment,
// and for values at the limits of the formats.

#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/work_chunks.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../support/isa_name.h"
#include "../support/special_values.h"

namespace {

using mezzo::detail::CpuIsa;

class UnscaleKernel : public testing::TestWithParam<std::tuple<torch::ScalarType, CpuIsa>> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(isa())) GTEST_SKIP() << "this CPU has no " << isa_name(isa());
    kernel_ = mezzo::detail::get_unscale_kernel(dtype(), isa());
  }
  static torch::ScalarType dtype() { return std::get<0>(GetParam()); }
  static CpuIsa isa() { return std::get<1>(GetParam()); }

  static torch::Tensor random(int64_t count) {
    return (torch::randn({count}, torch::kDouble) * 100).to(dtype());
  }
  /// The expected products: computed in float32 (float64 for float64), rounded once.
  static torch::Tensor product(const torch::Tensor& values, float inv_scale) {
    const auto wide = dtype() == torch::kDouble ? torch::kDouble : torch::kFloat;
    return (values.to(wide) * inv_scale).to(dtype());
  }

  bool unscale(void* data, int64_t count, float inv_scale) const {
    return kernel_(data, data, count, inv_scale);
  }

  mezzo::detail::UnscaleKernelFn kernel_ = nullptr;
};

TEST_P(UnscaleKernel, MultipliesEveryElementForEveryTail) {
  torch::manual_seed(1);
  for (int64_t count = 0; count <= 70; ++count) {
    auto values = random(count);
    const auto expected = product(values, 0.3F);
    EXPECT_FALSE(unscale(values.data_ptr(), count, 0.3F)) << count;
    EXPECT_TRUE(torch::equal(values, expected)) << count;
  }
}

TEST_P(UnscaleKernel, UnscalesMisalignedMemoryInBounds) {
  torch::manual_seed(2);
  constexpr int64_t kCount = 37;
  const auto values = random(kCount);
  const auto expected = product(values, 0.125F);
  const auto bytes = static_cast<std::size_t>(kCount * values.element_size());
  for (std::size_t offset = 0; offset < 65; ++offset) {
    std::vector<char> memory(bytes + 130, 'm');
    std::memcpy(memory.data() + offset, values.data_ptr(), bytes);
    unscale(memory.data() + offset, kCount, 0.125F);
    EXPECT_EQ(std::memcmp(memory.data() + offset, expected.data_ptr(), bytes), 0) << offset;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const bool is_outside = i < offset || i >= offset + bytes;
      if (is_outside) {
        ASSERT_EQ(memory[i], 'm') << offset << " " << i;
      }
    }
  }
}

TEST_P(UnscaleKernel, FindsNonfiniteElementAtEveryIndex) {
  constexpr int64_t kCount = 39;
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    for (int64_t index = 0; index < kCount; ++index) {
      auto values = torch::ones({kCount}, dtype());
      values[index] = bad;
      EXPECT_TRUE(unscale(values.data_ptr(), kCount, 0.5F)) << bad << " at " << index;
    }
  }
}

TEST_P(UnscaleKernel, AcceptsExtremeFiniteValues) {
  const double largest = dtype() == torch::kHalf       ? 65504.0
                         : dtype() == torch::kBFloat16 ? 3.3895313892515355e38
                         : dtype() == torch::kFloat    ? std::numeric_limits<float>::max()
                                                       : std::numeric_limits<double>::max();
  auto values = torch::tensor({largest, -largest, 0.0, -0.0, 1e-45, 1e-300}, torch::kDouble)
                    .to(dtype())
                    .repeat({11});
  const auto before = values.clone();
  EXPECT_FALSE(unscale(values.data_ptr(), values.numel(), 1.0F));
  EXPECT_TRUE(torch::equal(values, before));
}

// torch checks before multiplying, and finds neither.
TEST_P(UnscaleKernel, FindsOverflowOfFiniteFactors) {
  const bool is_double = dtype() == torch::kDouble;
  auto values = torch::zeros({21}, dtype());
  values[20] = dtype() == torch::kHalf ? 6e4 : is_double ? 1e300 : 1e30;
  EXPECT_TRUE(unscale(values.data_ptr(), 21, 1e20F));
  auto zeros = torch::zeros({21}, dtype());
  EXPECT_TRUE(unscale(zeros.data_ptr(), 21, kInfinity));
}

INSTANTIATE_TEST_SUITE_P(AllDtypesAndInstructionSets, UnscaleKernel,
                         testing::Combine(testing::Values(torch::kFloat, torch::kDouble,
                                                          torch::kHalf, torch::kBFloat16),
                                          testing::Values(CpuIsa::scalar, CpuIsa::vector128,
                                                          CpuIsa::avx2, CpuIsa::avx512)),
                         [](const auto& test) {
                           return std::string(torch::toString(std::get<0>(test.param))) + "_" +
                                  isa_name(std::get<1>(test.param));
                         });

template <class Element>
void expect_rounding_of_c10(const std::vector<float>& values) {
  using Format = mezzo::detail::FloatFormat<Element>;
  for (const float value : values) {
    uint32_t bits = 0;
    Format::from_opmath(value, bits);
    const Element expected(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(
          std::isnan(static_cast<float>(std::bit_cast<Element>(static_cast<uint16_t>(bits)))));
    } else {
      ASSERT_EQ(bits, expected.x) << std::hexfloat << value;
    }
  }
}

std::vector<float> floats_of_every_exponent() {
  std::mt19937 random(3);
  std::uniform_int_distribution<uint32_t> mantissa(0, 0x7FFFFFU);
  std::vector<float> values{kNan, -kNan, kInfinity, -kInfinity, 65519.99F, 65520.0F, 65536.0F};
  for (uint32_t exponent = 0; exponent < 512; ++exponent) {  // with both signs
    for (int i = 0; i < 200; ++i) {
      values.push_back(std::bit_cast<float>((exponent << 23) | mantissa(random)));
    }
    for (const uint32_t tie : {0x0U, 0x1000U, 0x3000U, 0x8000U, 0x18000U, 0x7FFFFFU}) {
      values.push_back(std::bit_cast<float>((exponent << 23) | tie));
    }
  }
  return values;
}

/// Unscales by `inv_scale`, and returns whether a product is inf or NaN.
bool unscaled_with_inf(const std::vector<torch::Tensor>& gradients, float inv_scale) {
  auto found = torch::zeros({});
  mezzo::detail::unscale_and_check_(gradients, found, torch::full({}, inv_scale));
  return found.item<float>() != 0;
}

TEST(FloatFormat, RoundsToFloat16LikeC10) {
  expect_rounding_of_c10<c10::Half>(floats_of_every_exponent());
}

TEST(FloatFormat, RoundsToBfloat16LikeC10) {
  expect_rounding_of_c10<c10::BFloat16>(floats_of_every_exponent());
}

template <class Element>
void expect_exact_conversion() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    float converted = 0;
    mezzo::detail::FloatFormat<Element>::to_opmath(bits, converted);
    const auto expected = static_cast<float>(std::bit_cast<Element>(static_cast<uint16_t>(bits)));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(converted)) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(converted), std::bit_cast<uint32_t>(expected)) << bits;
    }
  }
}

TEST(FloatFormat, ConvertsEveryFloat16) { expect_exact_conversion<c10::Half>(); }

TEST(FloatFormat, ConvertsEveryBfloat16) { expect_exact_conversion<c10::BFloat16>(); }

std::vector<torch::Tensor> mixed_gradients() {
  torch::manual_seed(4);
  return {torch::randn({70000}),
          torch::randn({0}),
          torch::randn({33, 5}, torch::kDouble),
          torch::randn({40001}).to(torch::kBFloat16),
          torch::randn({7}).to(torch::kHalf),
          torch::randn({1, 3, 1}),
          torch::randn({90001})};
}

TEST(UnscaleCpu, UnscalesMixedDtypesWithAnyThreads) {
  for (const int threads : {1, 2, 5}) {
    const int before = torch::get_num_threads();
    torch::set_num_threads(threads);
    auto gradients = mixed_gradients();
    const auto originals = mixed_gradients();
    EXPECT_FALSE(unscaled_with_inf(gradients, 0.25F));
    torch::set_num_threads(before);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(torch::equal(gradients[i], originals[i] * 0.25)) << threads << " " << i;
    }
  }
}

bool any_nonfinite(const std::vector<torch::Tensor>& gradients) {
  at::Tensor found = torch::zeros({});
  mezzo::detail::update_found_inf_(gradients, found);
  return found.item<float>() != 0;
}

TEST(UnscaleCpu, FindsNonfiniteElementInAnyTensor) {
  for (const std::size_t tensor : {std::size_t{0}, std::size_t{3}, std::size_t{6}}) {
    for (const bool at_end : {false, true}) {
      auto gradients = mixed_gradients();
      EXPECT_FALSE(any_nonfinite(gradients));
      gradients[tensor][at_end ? -1 : 0] = kInfinity;
      EXPECT_TRUE(any_nonfinite(gradients)) << tensor;
      EXPECT_TRUE(unscaled_with_inf(gradients, 0.25F)) << tensor;
    }
  }
}

TEST(ParallelDynamic, RunsWithoutFopenmp) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(4);
  std::vector<std::pair<int, std::thread::id>> items(4);
  std::atomic<int> waiting{4};
  mezzo::detail::parallel_dynamic(4, [&](int64_t i) {
    auto& item = items[static_cast<std::size_t>(i)];
    ++item.first;
    item.second = std::this_thread::get_id();
    --waiting;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (waiting.load() > 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  torch::set_num_threads(before);
  std::set<std::thread::id> threads;
  for (const auto& [calls, thread] : items) {
    EXPECT_EQ(calls, 1);
    threads.insert(thread);
  }
  EXPECT_EQ(threads.size(), 4U);
}

TEST(WorkChunks, CoverEachElementOnce) {
  const std::vector<int64_t> counts{1, 0, 700, 299};
  mezzo::detail::WorkChunks chunks(/*size=*/100, /*batch=*/300);
  for (std::size_t i = 0; i < counts.size(); ++i) chunks.add(i, counts[i]);
  ASSERT_EQ(chunks.size(), 1U + 7U + 3U);
  const int before = torch::get_num_threads();
  for (const int threads : {1, 3}) {
    torch::set_num_threads(threads);
    std::vector<std::vector<char>> visits;
    for (const int64_t count : counts) visits.emplace_back(static_cast<std::size_t>(count));
    EXPECT_TRUE(chunks.any([&](const auto& chunk) {
      EXPECT_EQ(chunk.begin % 100, 0);
      EXPECT_EQ(chunk.numel, std::min<int64_t>(100, counts[chunk.tensor_index] - chunk.begin));
      for (int64_t i = 0; i < chunk.numel; ++i) ++visits[chunk.tensor_index][chunk.begin + i];
      return chunk.tensor_index == 3 && chunk.begin == 200;
    }));
    EXPECT_FALSE(chunks.any([](const auto&) { return false; }));
    for (const auto& item : visits) EXPECT_EQ(item, std::vector<char>(item.size(), 1));
  }
  torch::set_num_threads(before);
}

TEST(UnscaleCpu, UnscalesTransposedTensorInPlace) {
  auto base = torch::randn({5, 7});
  const auto expected = base.clone() * 0.5;
  EXPECT_FALSE(unscaled_with_inf({base.t()}, 0.5F));
  EXPECT_TRUE(torch::equal(base, expected));
}

TEST(UnscaleCpu, PreservesGapsOfStridedTensor) {
  auto base = torch::ones({6, 8});
  const auto strided = base.slice(1, 0, 8, 2);
  EXPECT_FALSE(unscaled_with_inf({strided}, 0.5F));
  EXPECT_TRUE(torch::equal(strided, torch::full({6, 4}, 0.5)));
  EXPECT_TRUE(torch::equal(base.slice(1, 1, 8, 2), torch::ones({6, 4})));
  base[3][2] = kNan;
  EXPECT_TRUE(any_nonfinite({strided}));
  base[3][2] = 1;
  base[3][3] = kNan;
  EXPECT_FALSE(any_nonfinite({strided}));
}

TEST(UnscaleCpu, UnscalesTensorWithNegativeBit) {
  const auto complex = torch::randn({4}, torch::kComplexFloat);
  const auto imaginary = torch::imag(complex.conj());
  ASSERT_TRUE(imaginary.is_neg());
  const auto expected = imaginary.clone() * 0.5;
  EXPECT_FALSE(unscaled_with_inf({imaginary}, 0.5F));
  EXPECT_TRUE(torch::equal(imaginary, expected));
}

// Two threads that multiplied the same memory lost products.
TEST(UnscaleCpu, MultipliesOverlappingGradientsSequentially) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(2);
  for (int round = 0; round < 200; ++round) {
    const auto base = torch::full({40000}, 16.0F);
    EXPECT_FALSE(unscaled_with_inf({base, base.detach(), base.slice(0, 0, 40000, 2)}, 0.5F));
    ASSERT_TRUE(torch::equal(base.slice(0, 0, 40000, 2), torch::full({20000}, 2.0F))) << round;
    ASSERT_TRUE(torch::equal(base.slice(0, 1, 40000, 2), torch::full({20000}, 4.0F))) << round;
  }
  torch::set_num_threads(before);
}

TEST(UnscaleCpu, BumpsVersionOfWrittenGradient) {
  const auto gradient = torch::ones({3});
  const auto before = gradient._version();
  unscaled_with_inf({gradient}, 0.5F);
  EXPECT_GT(gradient._version(), before);
}

TEST(UnscaleCpu, SkipsWriteForInvScaleOne) {
  const auto gradient = torch::ones({3});
  const auto before = gradient._version();
  at::Tensor found = torch::zeros({});
  mezzo::detail::unscale_and_check_({gradient}, found, torch::ones({}));
  EXPECT_EQ(found.item<float>(), 0);
  EXPECT_EQ(gradient._version(), before);
}

}  // namespace
