// Pinned copies are shared by threads; copies of a region are those of its thread.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using mezzo::WeightCache;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int kThreads = 8;
constexpr int64_t kEdge = 6;

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&work, i] {
      at::set_num_threads(1);
      work(i);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

std::vector<Tensor> weights(int64_t count) {
  std::vector<Tensor> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(torch::randn({kEdge, kEdge}));
  }
  return all;
}

TEST(WeightCacheThreads, ShareOneCopyOfEachWeight) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto all = weights(5);
  cache.pin(all);
  std::atomic<int> wrong = 0;
  in_threads([&](int) {
    const Autocast<kCPU> autocast({.cache = cache});
    for (const auto& weight : all) {
      wrong += !torch::equal(what_linear_reads(weight), weight.to(kBFloat16));
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(cache.statistics().casts, 5);
  EXPECT_EQ(cache.statistics().hits, 5 * (kThreads - 1));
}

TEST(WeightCacheThreads, HaveTheirOwnCopiesOfTrainableWeights) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = weights(1)[0].requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  what_linear_reads(weight);
  std::atomic<int> misses = 0;
  in_threads(mezzo::with_current_autocast([&](int) {
    misses += !cache.holds(weight, kBFloat16);
    what_linear_reads(weight);
    what_linear_reads(weight);
    misses += cache.holds(weight, kBFloat16) ? 0 : 100;
  }));
  EXPECT_EQ(misses, kThreads);
  EXPECT_EQ(cache.statistics().casts, 1 + kThreads);
  EXPECT_EQ(cache.statistics().copies_held, 1);
  EXPECT_TRUE(cache.holds(weight, kBFloat16));
}

TEST(WeightCacheThreads, ReceiveASharedCacheWithTheAutocastState) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = weights(1)[0];
  cache.pin({weight});
  const Autocast<kCPU> autocast({.cache = cache});
  what_linear_reads(weight);
  const auto state = mezzo::AutocastState::capture();
  std::thread([&] {
    const mezzo::AutocastState::Scope scope(state);
    EXPECT_TRUE(cache.holds(weight, kBFloat16));
    what_linear_reads(weight);
  }).join();
  EXPECT_EQ(cache.statistics().casts, 1);
  EXPECT_EQ(cache.statistics().hits, 1);
}

TEST(WeightCacheThreads, LeaveTheirStateBehindWithTheScope) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = weights(1)[0];
  cache.pin({weight});
  const auto state = [&] {
    const Autocast<kCPU> autocast({.cache = cache});
    return mezzo::AutocastState::capture();
  }();
  { const mezzo::AutocastState::Scope scope(state); }
  const Autocast<kCPU> autocast;
  what_linear_reads(weight);
  EXPECT_EQ(cache.statistics().casts, 0);
}

// Views come and go, and graphs lead to the same weights, in all threads at once.
TEST(WeightCacheThreads, ComputeWithViewsOfTheSameWeights) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto frozen = torch::randn({kEdge, kEdge});
  const auto trained = torch::randn({kEdge, kEdge}).requires_grad_();
  cache.pin({frozen});
  std::atomic<int> wrong = 0;
  in_threads([&](int) {
    const auto input = torch::eye(kEdge);
    for (int round = 0; round < 50; ++round) {
      const Autocast<kCPU> autocast({.cache = cache});
      const auto read_frozen = torch::matmul(input, frozen.t());
      const auto read_trained = torch::matmul(input, trained.t());
      wrong += !torch::equal(read_frozen, frozen.t().to(kBFloat16));
      wrong += !torch::equal(read_trained, trained.t().to(kBFloat16));
      const auto gradient = torch::autograd::grad({read_trained.sum()}, {trained})[0];
      wrong += gradient.sum().item<float>() != static_cast<float>(kEdge * kEdge);
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(cache.holds(frozen, kBFloat16));
}

// Forward and backward in all threads at once, weights that come, change and go, pins, questions
// and orders in between.
void stress(const WeightCache& cache, bool publish) {
  const auto shared = weights(4);
  cache.pin(shared);
  std::atomic<int> wrong = 0;
  in_threads([&](int thread) {
    const auto own = torch::randn({kEdge, kEdge}).requires_grad_();
    for (int round = 0; round < 60; ++round) {
      {
        const Autocast<kCPU> autocast({.cache = cache});
        for (const auto& weight : shared) {
          wrong += !torch::equal(what_linear_reads(weight), weight.to(kBFloat16));
        }
        const auto y = what_linear_reads(own);
        wrong += !torch::equal(y, own.to(kBFloat16));
        y.sum().backward();
        wrong += own.grad().sum().item<float>() != static_cast<float>(kEdge * kEdge);
        own.mutable_grad().reset();
        const auto brief = torch::randn({kEdge, kEdge});
        cache.pin({brief});
        wrong += !torch::equal(what_mm_reads(brief), brief.to(kBFloat16));
        wrong += !torch::equal(what_mm_reads(brief), brief.to(kBFloat16));
      }
      const torch::NoGradGuard no_grad;
      own.add_(1);
      if (publish) {
        const auto buffer = cache.buffer_for(own, kBFloat16);
        own.mul_(0.5);
        buffer.copy_(own);
        cache.publish(own, buffer);
      }
      if (round % 16 == thread) {
        cache.clear();
        cache.unpin({shared[0]});
        cache.pin({shared[0]});
        wrong += cache.statistics().bytes_held < 0;
      }
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(WeightCacheThreads, StandAStress) {
  stress(mezzo::install_op_overrides(WeightCache()), false);
}

TEST(WeightCacheThreads, StandAStressWithPublishedWeights) {
  stress(mezzo::install_op_overrides(WeightCache()), true);
}

}  // namespace
