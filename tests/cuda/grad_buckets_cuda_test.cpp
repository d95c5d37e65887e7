// GradStats, GradBuckets and dropped micro-batches on a GPU against the CPU, with mezzo's kernels
// if the program links mezzo::cuda, otherwise ATen's.

#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/scaling/finite_grad_accumulator.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "../support/special_values.h"
#include "cuda_test.h"

namespace {

using cuda_test::ForbidSyncGuard;
using cuda_test::kGpu;
using cuda_test::mixed_gradients;
using mezzo::GradBuckets;
using torch::Tensor;

class GradBucketsCuda : public cuda_test::CudaTest {};

std::vector<Tensor> on_cpu(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.cpu());
  return copies;
}

void expect_same(const mezzo::GradStats& gpu, const mezzo::GradStats& cpu) {
  EXPECT_EQ(gpu.found_inf.item<float>(), cpu.found_inf.item<float>());
  if (cpu.found_inf.item<float>() == 0) {
    const double expected = cpu.norm_sq.item<double>();
    EXPECT_NEAR(gpu.norm_sq.item<double>(), expected, 2e-6 * expected);
  } else {
    EXPECT_FALSE(std::isfinite(gpu.norm_sq.item<double>()) &&
                 std::isfinite(gpu.max_abs.item<double>()));
  }
  EXPECT_TRUE(torch::allclose(gpu.max_abs.cpu(), cpu.max_abs, 1e-6, 0, /*equal_nan=*/true));
}

TEST_F(GradBucketsCuda, GradStatsMatchCpu) {
  auto gradients = mixed_gradients();
  for (const float bad : {0.5F, 0.0F, kNan, std::numeric_limits<float>::infinity()}) {
    for (const float inv_scale : {1.0F, 1.0F / 65536, 3e30F}) {
      gradients[10][999] = bad;
      const auto scale = torch::full({}, inv_scale);
      expect_same(mezzo::detail::compute_grad_stats(gradients, scale.to(kGpu)),
                  mezzo::detail::compute_grad_stats(on_cpu(gradients), scale));
    }
  }
}

TEST_F(GradBucketsCuda, GradStatsAreDeterministicWithoutSync) {
  const auto gradients = mixed_gradients();
  const auto inv_scale = torch::full({}, 0.3F).to(kGpu);
  std::vector<Tensor> sums;
  {
    const ForbidSyncGuard forbid;
    for (int i = 0; i < 5; ++i) {
      sums.push_back(mezzo::detail::compute_grad_stats(gradients, inv_scale).norm_sq);
    }
  }
  for (const auto& sum : sums) {
    EXPECT_EQ(std::bit_cast<uint64_t>(sum.item<double>()),
              std::bit_cast<uint64_t>(sums.front().item<double>()));
  }
}

TEST_F(GradBucketsCuda, DropsNonfiniteMicroBatchWithoutSync) {
  const auto a = torch::ones({1000}, kGpu).requires_grad_();
  const auto b = torch::ones({10}, kGpu).requires_grad_();
  for (const bool in_buckets : {false, true}) {
    std::optional<GradBuckets> buckets;
    if (in_buckets) buckets.emplace(std::vector<Tensor>{a, b});
    a.mutable_grad().reset();
    b.mutable_grad().reset();
    mezzo::FiniteGradAccumulator accumulator({a, b});
    std::vector<bool> added;
    for (const float weight : {kNan, 1.0F, 2.0F, kNan, 4.0F}) {
      added.push_back(accumulator.add([&] { ((a.sum() + b.sum()) * weight).backward(); }));
    }
    EXPECT_EQ(added, (std::vector<bool>{false, true, true, false, true}));
    EXPECT_TRUE(torch::equal(a.grad(), torch::full_like(a, 7)));
    EXPECT_TRUE(torch::equal(b.grad(), torch::full_like(b, 7)));
  }
}

TEST_F(GradBucketsCuda, SupportTwoDevices) {
  const auto on_host = torch::ones({3}).requires_grad_();
  const auto on_gpu = torch::ones({4}, kGpu).requires_grad_();
  GradBuckets buckets({on_host, on_gpu});
  EXPECT_EQ(buckets.buckets().size(), 2U);
  (on_host.sum() + on_gpu.sum().cpu() * 2).backward();
  buckets.copy_grads_to_buckets();
  for (const auto& bucket : buckets.buckets()) {
    const double each = bucket.device.is_cpu() ? 3 : 8;
    EXPECT_EQ(bucket.buffer.sum().item<double>(), each);
  }
  EXPECT_FALSE(mezzo::FiniteGradAccumulator({on_host, on_gpu}).add([&] {
    (on_host.sum() + on_gpu.sum().cpu() * kNan).backward();
  }));
  EXPECT_TRUE(torch::equal(on_host.grad(), torch::ones({3})));
}

}  // namespace
