// Where a cache is in force, and how it goes with what else a region consists of.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using mezzo::AutocastGuard;
using mezzo::OpPolicy;
using mezzo::WeightCache;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::kHalf;
using torch::Tensor;

constexpr int64_t kRows = 6;

Tensor trainable_square() { return torch::randn({kRows, kRows}).requires_grad_(); }

std::pair<int64_t, int64_t> casts_and_hits(const WeightCache& cache) {
  const auto statistics = cache.statistics();
  return {statistics.casts, statistics.hits};
}

using Counts = std::pair<int64_t, int64_t>;

TEST(WeightCacheRegions, UseNoCacheThatTheyWereNotGiven) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  {
    const Autocast<kCPU> autocast;
    what_linear_reads(weight);
  }
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(cache), Counts(0, 0));
}

TEST(WeightCacheRegions, InheritTheCacheAroundThem) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> outer({.cache = cache});
  what_linear_reads(weight);
  {
    const Autocast<kCPU> inner;
    what_linear_reads(weight);
  }
  {
    const Autocast<kCPU> inner({.cache = false});
    what_linear_reads(weight);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  {
    const Autocast<kCPU> exact({.enabled = false});
    EXPECT_EQ(what_linear_reads(weight).scalar_type(), kFloat);
  }
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(cache), Counts(1, 2));
}

TEST(WeightCacheRegions, MayHaveDifferentCaches) {
  const WeightCache first = mezzo::install_op_overrides(WeightCache());
  const WeightCache second = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> outer({.cache = first});
  what_linear_reads(weight);
  {
    const Autocast<kCPU> inner({.cache = second});
    what_linear_reads(weight);
    what_linear_reads(weight);
  }
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(first), Counts(1, 1));
  EXPECT_EQ(casts_and_hits(second), Counts(1, 1));
}

TEST(WeightCacheRegions, OfDifferentDtypesReadTheirOwnCopies) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> outer({.cache = cache});
  for (int use = 0; use < 2; ++use) {
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
    const Autocast<kCPU, kHalf> inner;
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kHalf)));
    const Autocast<kCPU> innermost;
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  }
  EXPECT_EQ(casts_and_hits(cache), Counts(2, 4));
}

TEST(WeightCacheRegions, CastOnceAlsoAfterSomethingWasForgotten) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  cache.clear();
  const Autocast<kCPU> region({.cache = cache});
  what_linear_reads(weight);
  EXPECT_TRUE(cache.holds(weight, kBFloat16));
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(cache), Counts(1, 1));
}

TEST(WeightCacheRegions, OfTwoDevicesAtOnceHoldTheirOwnCopies) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<torch::kCUDA> elsewhere({.cache = cache});
  const Autocast<kCPU> here({.cache = cache});
  what_linear_reads(weight);
  EXPECT_TRUE(cache.holds(weight, kBFloat16));
  EXPECT_EQ(cache.statistics().copies_held, 1);
}

TEST(WeightCacheRegions, LowerHalfWeightsToo) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square().detach().to(kHalf).requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  what_linear_reads(weight);
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  EXPECT_EQ(casts_and_hits(cache), Counts(1, 1));
}

TEST(WeightCacheRegions, LeaveDoubleAlone) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto y =
      torch::linear(torch::ones({2, 2}, torch::kDouble), torch::ones({2, 2}, torch::kDouble));
  EXPECT_EQ(y.scalar_type(), torch::kDouble);
  EXPECT_EQ(casts_and_hits(cache), Counts(0, 0));
}

TEST(WeightCacheRegions, PutLibtorchsCacheBackAsItWas) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  for (const bool enabled : {true, false}) {
    at::autocast::set_autocast_cache_enabled(enabled);
    {
      const Autocast<kCPU> autocast({.cache = cache});
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
      const Autocast<kCPU> inner;
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    }
    EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), enabled);
  }
  at::autocast::set_autocast_cache_enabled(true);
}

// libtorch has one switch for all devices.
TEST(WeightCacheRegions, KeepLibtorchsCacheOffInRegionsOfAnotherDevice) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  const Autocast<torch::kCUDA> inner;
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
}

TEST(WeightCacheRegions, ServeInnerRegionsAlsoWhereLibtorchsCacheIsOff) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> uncached({.cache = false});
  const Autocast<kCPU> outer({.cache = cache});
  what_linear_reads(weight);
  const Autocast<kCPU> inner;
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(cache), Counts(1, 1));
}

TEST(WeightCacheRegions, LeaveNoCacheToRegionsInsideOneThatDisabledIt) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> outer({.cache = cache});
  const Autocast<kCPU> uncached({.cache = false});
  const Autocast<kCPU> inner;
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  what_linear_reads(weight);
  EXPECT_EQ(casts_and_hits(cache), Counts(0, 0));
}

TEST(WeightCacheRegions, KeepLibtorchsCacheOffThoughItIsSwitchedOnByHandInside) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const Autocast<kCPU> outer({.cache = cache});
  at::autocast::set_autocast_cache_enabled(true);
  const Autocast<kCPU> inner;
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
}

TEST(WeightCacheRegions, EndByExceptionAsTheyShould) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  try {
    const Autocast<kCPU> autocast({.cache = cache});
    what_linear_reads(weight);
    torch::linear(torch::ones({2, 3}), weight);  // shapes that do not fit
    ADD_FAILURE();
  } catch (const c10::Error&) {
  }
  EXPECT_EQ(cache.statistics().copies_held, 0);
  const auto before = casts_and_hits(cache);
  {
    const Autocast<kCPU> autocast;
    what_linear_reads(weight);
  }
  EXPECT_EQ(casts_and_hits(cache), before);
}

TEST(WeightCacheRegions, ComeInEveryKindOfGuard) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  cache.pin({weight});
  const auto use = [&] { return what_linear_reads(weight); };
  const mezzo::AutocastSetting setting{.device = kCPU, .dtype = kBFloat16, .cache = cache};
  {
    const Autocast<kCPU> a({.cache = cache});
    use();
  }
  {
    const AutocastGuard a(setting);
    use();
  }
  {
    const AutocastGuard a({.device = kCPU, .cache = cache, .policy = OpPolicy()});
    use();
  }
  {
    const AutocastGuard a({.device = kCPU, .dtype = kBFloat16, .cache = cache});
    use();
  }
  mezzo::autocast<kCPU>(use, {.cache = cache})();
  mezzo::autocast(use, setting)();
  EXPECT_EQ(casts_and_hits(cache), Counts(1, 5));
  torch::nn::Linear linear(kRows, kRows);
  cache.pin(linear->parameters());
  mezzo::AutocastModule module(linear, setting);
  for (int i = 0; i < 2; ++i) module(torch::ones({1, kRows}));
  EXPECT_TRUE(cache.holds(linear->weight, kBFloat16));
  const auto copy = std::dynamic_pointer_cast<decltype(module)::ContainedType>(module->clone());
  const auto before = cache.statistics().casts;
  copy->call(torch::ones({1, kRows}));
  EXPECT_EQ(cache.statistics().casts, before + 2);
}

TEST(WeightCachePolicies, ComeFirst) {
  // An op that policies and caches override has one kernel, whichever came first.
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto deny = mezzo::install_op_overrides(OpPolicy().deny("linear").deny("addmm"));
  const WeightCache later = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  for (const auto& each : {cache, later}) {
    each.pin({weight});
    {
      const Autocast<kCPU> autocast({.cache = each, .policy = deny});
      EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight));
      EXPECT_EQ(casts_and_hits(each), Counts(0, 0));
      {
        const Autocast<kCPU> inner(
            {.policy = mezzo::install_op_overrides(OpPolicy().allow("linear"))});
        EXPECT_EQ(what_linear_reads(weight).scalar_type(), kBFloat16);
      }
      const Autocast<kCPU> inner(
          {.policy = mezzo::install_op_overrides(OpPolicy().ignore("linear"))});
      EXPECT_EQ(what_linear_reads(weight).scalar_type(), kBFloat16);  // matmul's, inside
    }
    const Autocast<kCPU> autocast({.cache = each});
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
    EXPECT_EQ(each.statistics().casts, 1);
    EXPECT_GE(each.statistics().hits, 1);
  }
}

TEST(WeightCachePolicies, ThatPromoteLeaveTheCacheAside) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto promote = mezzo::install_op_overrides(OpPolicy().promote("mm"));
  const auto weight = trainable_square();
  const Autocast<kCPU> autocast({.cache = cache, .policy = promote});
  EXPECT_TRUE(torch::equal(what_mm_reads(weight), weight));
  EXPECT_EQ(torch::mm(weight.to(kBFloat16), weight).scalar_type(), kFloat);
  EXPECT_EQ(casts_and_hits(cache), Counts(0, 0));
}

// mv is on no list of the CPU's.
TEST(WeightCachePolicies, ThatAllowAnOpMakeItAskTheCache) {
  const auto allow = mezzo::install_op_overrides(OpPolicy().allow("mv"));
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const Autocast<kCPU> autocast({.cache = cache, .policy = allow});
  for (int use = 0; use < 3; ++use) {
    const auto y = torch::mv(weight, torch::ones({kRows}));
    EXPECT_EQ(y.scalar_type(), kBFloat16);
    EXPECT_TRUE(
        torch::equal(torch::autograd::grad({y.sum()}, {weight})[0], torch::ones({kRows, kRows})));
    torch::mv(weight, torch::ones({kRows}));  // a hit: no gradient has gone through this one
  }
  EXPECT_EQ(cache.statistics().casts, 4);
}

mezzo::CastRecord record_of(const mezzo::CastTrace& trace, const std::string& op) {
  const auto records = trace.records();
  const auto found = std::find_if(records.begin(), records.end(),
                                  [&](const auto& record) { return record.op == op; });
  if (found == records.end()) throw std::runtime_error("no record of " + op);
  return *found;
}

TEST(WeightCacheTrace, TellsCastsFromCacheHits) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  const auto x = torch::ones({2, kRows});
  const Autocast<kCPU> autocast({.cache = cache});
  const mezzo::CastTrace trace;
  for (int use = 0; use < 3; ++use) {
    torch::linear(x, weight);
  }
  auto record = record_of(trace, "aten::linear");
  EXPECT_EQ(record.calls, 3);
  EXPECT_EQ(record.casts, 4);  // the input three times, the weight once
  EXPECT_EQ(record.bytes, 3 * 2 * kRows * 6 + kRows * kRows * 6);
  EXPECT_EQ(record.cache_hits, 2);
  weight.detach().add_(1);
  torch::linear(x, weight);
  record = record_of(trace, "aten::linear");
  EXPECT_EQ(record.casts, 6);
  EXPECT_EQ(record.bytes, 4 * 2 * kRows * 6 + 2 * kRows * kRows * 6);
  EXPECT_EQ(record.cache_hits, 2);
}

TEST(WeightCacheTrace, CountsNoCastOfAPublishedCopy) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto weight = trainable_square();
  cache.publish(weight, cache.buffer_for(weight, kBFloat16));
  const auto x = torch::ones({2, kRows}, kBFloat16);
  const Autocast<kCPU> autocast({.cache = cache});
  const mezzo::CastTrace trace;
  torch::linear(x, weight);
  const auto record = record_of(trace, "aten::linear");
  EXPECT_EQ(record.casts, 0);
  EXPECT_EQ(record.bytes, 0);
  EXPECT_EQ(record.cache_hits, 1);
}

/// In a process of its own, where no test has installed anything.
TEST(WeightCacheInstallation, IsWhatARegionAsksFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto enter = [](const WeightCache& cache) {
    try {
      const Autocast<kCPU> autocast({.cache = cache});
    } catch (const c10::Error& error) {
      std::fputs(error.what_without_backtrace(), stderr);
      std::exit(1);
    }
    std::exit(0);
  };
  EXPECT_EXIT(enter(WeightCache()), testing::ExitedWithCode(1),
              "Call mezzo::install_op_overrides.cache. once");
  EXPECT_EXIT(enter(mezzo::install_op_overrides(WeightCache())), testing::ExitedWithCode(0), "");
}

}  // namespace
