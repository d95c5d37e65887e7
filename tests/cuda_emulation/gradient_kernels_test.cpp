// Gradient and loss scale kernels on the emulated device against the CPU: bitwise where nothing is
// summed, and within the error bound of a sum's order otherwise.

#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/cuda/gradients.cuh>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../support/special_values.h"
#include "cuda_emulation.h"
#include "test_tensors.h"

namespace {

using cuda_emulation_test::BitwiseEqual;
using cuda_emulation_test::clone_all;
using cuda_emulation_test::kDtypes;
using mezzo::GradStats;

class GradientKernels : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(1); }
  void TearDown() override { cuda_emulation::set_seed(1); }
};

TEST(AlignedChunk, VectorizesAtAnyAlignment) {
  const at::Tensor memory = at::zeros({200}, at::kShort);
  for (int64_t offset = 0; offset < 8; ++offset) {
    for (int64_t count = 0; count < 100; ++count) {
      const mezzo::detail::cuda::AlignedChunk<uint16_t> chunk(memory.data_ptr(), offset,
                                                              offset + count);
      EXPECT_EQ(chunk.num_vectors * 8 + chunk.num_scalars, count);
      EXPECT_LT(chunk.num_scalars, 15);
      if (chunk.num_vectors == 0) continue;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(chunk.vectors()) % 16, 0U);
    }
  }
}

/// Gradients of every dtype, tail, layout and alignment.
std::vector<at::Tensor> mixed_gradients(double spread) {
  std::vector<at::Tensor> all;
  for (const at::ScalarType dtype : kDtypes) {
    const auto random = [&](at::IntArrayRef sizes) {
      return at::randn(sizes, at::kDouble).mul(spread).to(dtype);
    };
    for (const int64_t size : {0, 1, 3, 7, 8, 31, 1000, 16384, 40003}) {
      all.push_back(random({size}));
    }
    for (int64_t offset = 1; offset < 9; ++offset) {
      all.push_back(random({500}).narrow(0, offset, 483));  // not aligned
    }
    all.push_back(random({40, 30}).t());
    all.push_back(random({20, 8}).slice(1, 0, 8, 2));  // with gaps
    all.push_back(random({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
    all.push_back(random({7}).expand({3, 7}).clone());
    // In one buffer, as in GradBuckets: adjacent in either direction, and with a gap.
    const at::Tensor buffer = random({40000});
    for (const auto& [begin, size] :
         {std::pair{30000, 9999}, {13, 29987}, {0, 13}, {39999, 1}, {20000, 16}}) {
      all.push_back(buffer.narrow(0, begin, size));
    }
  }
  return all;
}

int64_t launches_of(const std::string& kernel) {
  int64_t all = 0;
  for (const auto& [name, count] : cuda_emulation::launches()) {
    if (name.find(kernel) != std::string::npos) all += count;
  }
  return all;
}

/// Small gradients of all dtypes.
std::vector<at::Tensor> many_gradients(int count) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < count; ++i) {
    all.push_back(at::randn({i % 23}, at::kDouble).to(kDtypes[static_cast<std::size_t>(i) % 4]));
  }
  return all;
}

at::Tensor scalar(double value) { return at::full({}, value, at::kFloat); }

// Bound of the relative difference of the device's and the CPU's sum of `count` squares. The CPU
// sums in float64: in any order with an error below gamma(count, 2^-53), gamma(n, u) = n u / (1 - n
// u). The device sums up to 32 squares in float32, gamma(32, 2^-24), and these sums in float64. Two
// multiplications by inv_scale round twice on either side.
double gamma(double n, double u) { return n * u / (1 - n * u); }

double sum_bound(int64_t count) {
  const double float64_error = gamma(static_cast<double>(count + 2), 0x1p-53);
  const double float32_error = gamma(mezzo::detail::cuda::kMaxFloat32Squares, 0x1p-24);
  return float64_error + (1 + float32_error) * (1 + float64_error) - 1;
}

int64_t elements_of(const std::vector<at::Tensor>& gradients) {
  int64_t count = 0;
  for (const at::Tensor& gradient : gradients) count += gradient.numel();
  return count;
}

void expect_same(const GradStats& device, const GradStats& cpu, int64_t count) {
  EXPECT_THAT(device.found_inf, BitwiseEqual(cpu.found_inf));
  EXPECT_THAT(device.max_abs, BitwiseEqual(cpu.max_abs));
  const double sum = device.norm_sq.item<double>();
  const double expected = cpu.norm_sq.item<double>();
  if (std::isfinite(expected)) {
    EXPECT_LE(std::abs(sum - expected), sum_bound(count) * expected);
  } else {
    EXPECT_THAT(device.norm_sq, BitwiseEqual(cpu.norm_sq));
  }
}

void expect_same_grad_stats(const std::vector<at::Tensor>& gradients, float inv_scale) {
  const GradStats cpu = mezzo::detail::compute_grad_stats(gradients, scalar(inv_scale));
  const cuda_emulation::CpuDeviceGuard guard;
  expect_same(mezzo::detail::compute_grad_stats(gradients, scalar(inv_scale)), cpu,
              elements_of(gradients));
}

void expect_same_unscale(const std::vector<at::Tensor>& gradients, float inv_scale) {
  const std::vector<at::Tensor> expected = clone_all(gradients);
  const std::vector<at::Tensor> actual = clone_all(gradients);
  at::Tensor expected_found = scalar(0);
  at::Tensor found = scalar(0);
  mezzo::detail::unscale_and_check_(expected, expected_found, scalar(inv_scale));
  {
    const cuda_emulation::CpuDeviceGuard guard;
    mezzo::detail::unscale_and_check_(actual, found, scalar(inv_scale));
  }
  EXPECT_TRUE(at::equal(found, expected_found));
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_THAT(actual[i], BitwiseEqual(expected[i])) << i << " times " << inv_scale;
  }
}

void expect_same_check(const std::vector<at::Tensor>& gradients) {
  const std::vector<at::Tensor> before = clone_all(gradients);
  at::Tensor expected = scalar(0);
  at::Tensor found = scalar(0);
  mezzo::detail::update_found_inf_(gradients, expected);
  const cuda_emulation::CpuDeviceGuard guard;
  mezzo::detail::update_found_inf_(gradients, found);
  EXPECT_TRUE(at::equal(found, expected));
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_THAT(gradients[i], BitwiseEqual(before[i])) << "a check must not write";
  }
}

// Documented in docs/cuda.md.
TEST_F(GradientKernels, ReadGradBucketsInOneLaunch) {
  std::vector<at::Tensor> parameters(301);
  for (at::Tensor& parameter : parameters) parameter = at::zeros({4, 16}).set_requires_grad(true);
  mezzo::GradBuckets buckets(parameters);
  std::vector<at::Tensor> gradients, apart;
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad() = at::randn({4, 16});
    apart.push_back(parameter.grad().clone());
  }
  buckets.copy_grads_to_buckets();
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  const cuda_emulation::CpuDeviceGuard guard;
  const auto expect_launches = [](const std::vector<at::Tensor>& of, int64_t launches) {
    const int64_t reads_before = launches_of("::grad_stats_kernel");
    const int64_t unscales_before = launches_of("unscale_kernel");
    (void)mezzo::detail::compute_grad_stats(of, scalar(0.5));
    at::Tensor found = scalar(0);
    mezzo::detail::unscale_and_check_(of, found, scalar(0.5));
    EXPECT_EQ(launches_of("::grad_stats_kernel") - reads_before, launches);
    EXPECT_EQ(launches_of("unscale_kernel") - unscales_before, launches);
  };
  expect_launches(apart, 2);
  expect_launches(gradients, 1);
  for (std::size_t i = 0; i < apart.size(); ++i) EXPECT_THAT(gradients[i], BitwiseEqual(apart[i]));
}

TEST_F(GradientKernels, UnscaleMatchesCpuForEveryLayout) {
  const auto gradients = mixed_gradients(100);
  for (const float inv_scale : {1.0F, 0.3F, 1.0F / 65536})
    expect_same_unscale(gradients, inv_scale);
  expect_same_check(gradients);
}

TEST_F(GradientKernels, UnscaleMatchesCpuForSeveralLaunches) {
  const auto gradients = many_gradients(1300);
  expect_same_unscale(gradients, 0.7F);
  expect_same_check(gradients);
}

TEST_F(GradientKernels, FindNonfiniteElementAnywhere) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t index : {0, 8191, 20000}) {
      for (const float nonfinite : {kNan, -kInfinity}) {
        auto gradients = std::vector<at::Tensor>{at::ones({5}, dtype), at::ones({20001}, dtype)};
        gradients[1][index] = nonfinite;
        expect_same_check(gradients);
        expect_same_unscale(gradients, 0.5F);
        expect_same_grad_stats(gradients, 0.5F);
      }
    }
  }
}

TEST_F(GradientKernels, FindOverflowingProduct) {
  for (const at::ScalarType dtype : kDtypes) {
    const double largest = dtype == at::kHalf ? 6e4 : dtype == at::kDouble ? 1e308 : 3e38;
    const std::vector<at::Tensor> gradients{at::full({9000}, largest, at::kDouble).to(dtype)};
    for (const float inv_scale : {1.0F, 2.0F, 100.0F, kInfinity, kNan}) {
      expect_same_unscale(gradients, inv_scale);
      expect_same_grad_stats(gradients, inv_scale);
    }
  }
}

TEST_F(GradientKernels, GradStatsMatchCpuForEveryLayout) {
  for (const double spread : {1e-7, 1.0, 1e3}) {
    const auto gradients = mixed_gradients(spread);
    for (const float inv_scale : {1.0F, 0.3F, 1e-30F}) {
      expect_same_grad_stats(gradients, inv_scale);
    }
  }
  expect_same_grad_stats({}, 1.0F);
  expect_same_grad_stats({at::empty({0})}, 1.0F);
}

// Squares that overflow or underflow in float32 next to others: each vector selects its dtype.
TEST_F(GradientKernels, GradStatsMatchCpuForExtremeValues) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double largest = dtype == at::kHalf ? 6e4 : 3e38;
    const double smallest = dtype == at::kHalf ? 6e-8 : 1e-38;
    for (const double magnitude :
         {largest, 1e18, 1e-15, 1e-19, 1e-23, smallest, smallest / 64, 0.0}) {
      if (magnitude > largest) continue;
      const at::Tensor alone = at::randn({20003}, at::kDouble).clamp(-1, 1).mul(magnitude);
      at::Tensor mixed = alone.clone();
      mixed.slice(0, 0, 20003, 37).fill_(1e-3);
      expect_same_grad_stats({alone.to(dtype), mixed.to(dtype)}, 1.0F);
      expect_same_grad_stats({alone.to(dtype)}, 1.0F);
    }
  }
}

TEST_F(GradientKernels, GradStatsMatchCpuForSeveralLaunches) {
  std::vector<at::Tensor> floats;
  for (int i = 0; i < 905; ++i) floats.push_back(at::randn({i % 23}));
  for (const auto& gradients : {many_gradients(110 * 4), floats}) {
    expect_same_grad_stats(gradients, 0.5F);
  }
}

struct ScaleCase {
  mezzo::GradScalerOptions options;
  float scale;
};

TEST_F(GradientKernels, ScaleUpdateMatchesCpu) {
  const std::vector<ScaleCase> cases{
      {mezzo::GradScalerOptions::dynamic({.growth_interval = 3}), 65536.0F},
      {mezzo::GradScalerOptions::dynamic(
           {.growth_factor = 3, .growth_interval = 1, .hysteresis = 2}),
       7.0F},
      {mezzo::GradScalerOptions::dynamic(
           {.init_scale = 4, .growth_interval = 2, .min_scale = 0.5, .max_scale = 8}),
       4.0F}};
  for (const ScaleCase& scale_case : cases) {
    const auto make_tensors = [&] {
      return mezzo::detail::ScaleTensors{at::full({}, scale_case.scale, at::kFloat),
                                         at::full({}, 1 / scale_case.scale, at::kFloat),
                                         at::zeros({}, at::kInt),
                                         at::full({}, scale_case.options.hysteresis, at::kInt)};
    };
    const auto cpu = make_tensors();
    const auto device = make_tensors();
    for (const int found : {0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0}) {
      mezzo::detail::update_scale_(scale_case.options, cpu, scalar(found));
      const cuda_emulation::CpuDeviceGuard guard;
      mezzo::detail::update_scale_(scale_case.options, device, scalar(found));
      EXPECT_THAT(device.scale, BitwiseEqual(cpu.scale));
      EXPECT_THAT(device.inv_scale, BitwiseEqual(cpu.inv_scale));
      EXPECT_TRUE(at::equal(device.growth_tracker, cpu.growth_tracker));
      EXPECT_TRUE(at::equal(device.hysteresis_tracker, cpu.hysteresis_tracker));
    }
  }
}

TEST_F(GradientKernels, BitwiseIdenticalInAnyOrder) {
  std::vector<at::Tensor> gradients;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    gradients.push_back(at::randn({9001}, at::kDouble).to(dtype));
  }
  gradients.push_back(at::randn({77}, at::kDouble).to(at::kHalf).narrow(0, 1, 70));
  gradients[1][9000] = kNan;
  const cuda_emulation::CpuDeviceGuard guard;
  const GradStats first = mezzo::detail::compute_grad_stats(gradients, scalar(0.25));
  for (uint64_t seed = 0; seed < 100; ++seed) {
    cuda_emulation::set_seed(seed);
    const GradStats again = mezzo::detail::compute_grad_stats(gradients, scalar(0.25));
    EXPECT_THAT(again.max_abs, BitwiseEqual(first.max_abs));
    EXPECT_THAT(again.norm_sq, BitwiseEqual(first.norm_sq));
    at::Tensor found = scalar(0);
    mezzo::detail::unscale_and_check_(clone_all(gradients), found, scalar(0.25));
    EXPECT_EQ(found.item<float>(), 1.0F);
  }
}

}  // namespace
