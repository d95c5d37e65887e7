// What a cache holds: copies of three kinds, and nothing for the dead.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kSize = 8;
constexpr int64_t kCopyBytes = kSize * kSize * 2;

Tensor frozen() { return torch::randn({kSize, kSize}); }

TEST(WeightCacheMemory, CountsCastsHitsAndBytes) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = frozen().requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  for (int use = 0; use < 4; ++use) {
    what_linear_reads(weight);
  }
  const auto statistics = cache.statistics();
  EXPECT_EQ(statistics.casts, 1);
  EXPECT_EQ(statistics.hits, 3);
  EXPECT_EQ(statistics.bytes_cast, kSize * kSize * 6);  // four bytes read and two written
  EXPECT_EQ(statistics.bytes_saved, 3 * kSize * kSize * 6);
  EXPECT_EQ(statistics.bytes_held, kCopyBytes);
  EXPECT_EQ(statistics.copies_held, 1);
  std::ostringstream text;
  text << statistics;
  EXPECT_NE(text.str().find("3 hits, 1 casts"), std::string::npos) << text.str();
  cache.reset_statistics();
  EXPECT_EQ(cache.statistics().casts, 0);
  EXPECT_EQ(cache.statistics().bytes_held, kCopyBytes);
}

TEST(WeightCacheMemory, LetsGoOfACopyWhenItsWeightDies) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  auto weight = frozen();
  cache.pin({weight});
  {
    const Autocast<kCPU> autocast({.cache = cache});
    what_linear_reads(weight);
  }
  EXPECT_EQ(cache.statistics().bytes_held, kCopyBytes);
  const c10::weak_intrusive_ptr<c10::StorageImpl> memory(weight.storage().getWeakStorageImpl());
  weight.reset();
  EXPECT_TRUE(memory.expired());  // the cache does not keep the weight
  EXPECT_EQ(cache.statistics().bytes_held, 0);
  EXPECT_EQ(cache.statistics().copies_held, 0);
}

TEST(WeightCacheMemory, LetsGoOfDeadWeightsWhileARegionRuns) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> copies;
  for (int i = 0; i < 100; ++i) {
    const auto weight = frozen();
    copies.emplace_back(cache.buffer_for(weight, kBFloat16).storage().getWeakStorageImpl());
  }
  const auto alive =
      std::count_if(copies.begin(), copies.end(), [](const auto& each) { return !each.expired(); });
  EXPECT_LE(alive, 35);
}

TEST(WeightCacheMemory, LetsGoOfDeadWeightsAsOthersAreUsed) {
  constexpr int kHeld = 64;
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto living = frozen();
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> copies;
  {
    const Autocast<kCPU> autocast({.cache = cache});
    std::vector<Tensor> dying;
    for (int i = 0; i < kHeld; ++i) {
      dying.push_back(frozen());
      copies.emplace_back(cache.buffer_for(dying.back(), kBFloat16).storage().getWeakStorageImpl());
    }
  }
  for (int use = 0; use < kHeld; ++use) {
    const Autocast<kCPU> autocast({.cache = cache});
    what_linear_reads(living);
  }
  EXPECT_TRUE(
      std::all_of(copies.begin(), copies.end(), [](const auto& each) { return each.expired(); }));
}

double seconds_of(const std::function<void()>& work) {
  double least = std::numeric_limits<double>::max();
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    least = std::min(least, taken.count());
  }
  return least;
}

// The ratio of a cost that grows with the number of weights would be 32.
TEST(WeightCacheMemory, CostsTheSameAWeightHoweverManyItHolds) {
  const auto publish = [](int count) {
    const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
    std::vector<Tensor> weights;
    for (int i = 0; i < count; ++i) weights.push_back(torch::zeros({1}));
    return seconds_of([&] {
             for (const auto& weight : weights) {
               cache.publish(weight, cache.buffer_for(weight, kBFloat16));
             }
           }) /
           count;
  };
  EXPECT_LT(publish(16000) / publish(500), 8);
}

TEST(WeightCacheMemory, LetsGoOfTrainableWeightsAtTheEndOfTheRegion) {
  const auto weight = frozen().requires_grad_();
  for (const bool pin : {false, true}) {
    const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
    if (pin) cache.pin({weight});
    {
      const Autocast<kCPU> autocast({.cache = cache});
      {
        const Autocast<kCPU> inner;
        what_linear_reads(weight);
      }
      EXPECT_TRUE(cache.holds(weight, kBFloat16));
    }
    EXPECT_EQ(cache.statistics().bytes_held, pin ? kCopyBytes : 0);
    EXPECT_EQ(cache.holds(weight, kBFloat16), pin);
  }
}

TEST(WeightCacheMemory, HoldsNoFrozenWeightThatIsNotPinned) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = frozen();
  const Autocast<kCPU> autocast({.cache = cache});
  for (int use = 0; use < 3; ++use) {
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
    EXPECT_TRUE(torch::equal(what_mm_reads(weight), weight.to(kBFloat16)));
  }
  EXPECT_FALSE(cache.holds(weight, kBFloat16));
  EXPECT_EQ(cache.statistics().copies_held, 0);
}

// Who is short of memory may clear the cache from within a cast: an observer of the allocator, say.
TEST(WeightCacheMemory, MayBeClearedWhileACastRuns) {
  static const mezzo::WeightCache* to_clear = nullptr;
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  to_clear = &cache;
  const auto clear = [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
    if (std::string(op.name()) == "aten::_to_copy") to_clear->clear();
    return nullptr;
  };
  for (const bool pinned : {true, false}) {
    const auto weight = frozen().requires_grad_();
    if (pinned) cache.pin({weight});
    const Autocast<kCPU> autocast({.cache = cache});
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(clear));
    const auto read = torch::linear(torch::eye(kSize, kBFloat16), weight).t();  // one cast
    at::removeCallback(handle);
    EXPECT_TRUE(torch::equal(read, weight.to(kBFloat16)));
    EXPECT_FALSE(cache.holds(weight, kBFloat16));
    what_linear_reads(weight);
    EXPECT_TRUE(cache.holds(weight, kBFloat16));
  }
  to_clear = nullptr;
}

TEST(WeightCacheMemory, LeavesAStaleCopyToTheGraphThatReadsIt) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = frozen();
  cache.pin({weight});
  const auto x = torch::randn({3, kSize}).requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  const auto y = torch::linear(x, weight);
  const auto before = weight.to(kBFloat16);
  weight.add_(1);
  torch::linear(x, weight);
  const auto gradient = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_TRUE(torch::equal(gradient, torch::ones_like(y).mm(before).to(torch::kFloat)));
}

// torch::nn::Linear computes with weight.t(), a new view each time.
TEST(WeightCacheMemory, HoldsTheWeightsOfLinearModulesOnce) {
  for (const bool trainable : {true, false}) {
    const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
    torch::nn::Linear linear(kSize, kSize);
    for (auto& each : linear->parameters()) each.set_requires_grad(trainable);
    if (!trainable) cache.pin(linear->parameters());
    const Autocast<kCPU> autocast({.cache = cache});
    std::vector<Tensor> graph;
    for (int use = 0; use < 4; ++use) {
      graph.push_back(linear(torch::randn({3, kSize})));     // addmm
      graph.push_back(linear(torch::randn({2, 3, kSize})));  // matmul
    }
    EXPECT_TRUE(cache.holds(linear->weight, kBFloat16));
    EXPECT_TRUE(cache.holds(linear->bias, kBFloat16));
    EXPECT_EQ(cache.statistics().casts, 2);
    EXPECT_EQ(cache.statistics().hits, 7 + 3);
    EXPECT_EQ(cache.statistics().copies_held, 2);
  }
}

// A weight that is part of something, or repeats itself, has a dense copy.
TEST(WeightCacheMemory, HoldsWeightsThatAreNotDense) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto part = torch::randn({kSize, 2 * kSize}).narrow(1, 2, kSize);
  const auto repeated = torch::randn({1, kSize}).expand({kSize, kSize});
  cache.pin({part, repeated});
  const Autocast<kCPU> autocast({.cache = cache});
  for (int use = 0; use < 4; ++use) {
    EXPECT_TRUE(torch::equal(what_linear_reads(part), part.to(kBFloat16)));
    EXPECT_TRUE(torch::equal(what_linear_reads(repeated), repeated.to(kBFloat16)));
    EXPECT_TRUE(torch::equal(what_mm_reads(part.t()), part.t().to(kBFloat16)));
  }
  EXPECT_TRUE(cache.holds(part, kBFloat16));
  EXPECT_TRUE(cache.holds(repeated, kBFloat16));
}

TEST(WeightCacheMemory, HoldsNoInputOfALinear) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto x = torch::randn({3, kSize});
  const auto weight = frozen();
  cache.pin({weight});
  const Autocast<kCPU> autocast({.cache = cache});
  torch::nn::Linear module(kSize, kSize);
  for (int use = 0; use < 4; ++use) {
    torch::linear(x, weight);
    module(x);
  }
  EXPECT_FALSE(cache.holds(x, kBFloat16));
  EXPECT_EQ(cache.statistics().copies_held, 3);
}

// They have no version: who could tell that they changed?
TEST(WeightCacheMemory, HoldsNothingOfInferenceMode) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const c10::InferenceMode inference;
  const auto weight = frozen();
  const Autocast<kCPU> autocast({.cache = cache});
  for (int use = 0; use < 3; ++use) {
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
    weight.add_(1);
  }
  EXPECT_FALSE(cache.holds(weight, kBFloat16));
  EXPECT_EQ(cache.statistics().copies_held, 0);
}

TEST(WeightCacheMemory, HoldsNothingWithAGraphBehindIt) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto leaf = frozen().requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  for (int use = 0; use < 2; ++use) {
    const auto y = torch::linear(torch::eye(kSize), leaf * 2);
    y.sum().backward();
  }
  EXPECT_EQ(cache.statistics().copies_held, 0);
  EXPECT_EQ(leaf.grad().max().item<float>(), 4.F);
}

TEST(WeightCacheMemory, IsThatOfItsHandlesAndRegions) {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory(
      torch::empty({1}).storage().getWeakStorageImpl());
  const auto weight = frozen();
  {
    std::optional cache = mezzo::install_op_overrides(mezzo::WeightCache());
    const Autocast<kCPU> autocast({.cache = *cache});
    memory = cache->buffer_for(weight, kBFloat16).storage().getWeakStorageImpl();
    cache.reset();
    EXPECT_FALSE(memory.expired());
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  }
  EXPECT_TRUE(memory.expired());
}

}  // namespace
