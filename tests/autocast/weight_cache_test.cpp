#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_state.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>
#include <vector>

namespace {

using mezzo::AutocastGuard;
using testing::Each;
using torch::Tensor;

Tensor weight() { return torch::rand({4, 4}).requires_grad_(); }

/// Returns the low-precision copy that an op of this region would read, cached or new.
Tensor cast(const Tensor& tensor, torch::ScalarType dtype = torch::kBFloat16) {
  return at::autocast::cached_cast(dtype, tensor, torch::kCPU);
}

TEST(AutocastWeightCache, CastsWeightOncePerRegion) {
  const Tensor w = weight();
  const AutocastGuard<torch::kCPU> caching;
  EXPECT_TRUE(cast(w).is_same(cast(w)));
  const AutocastGuard<torch::kCPU> autocast({.cache_enabled = false});
  EXPECT_FALSE(cast(w).is_same(cast(w)));
}

TEST(AutocastWeightCache, ClearedAtOutermostExit) {
  const Tensor w = weight();
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> copy;
  {
    const AutocastGuard<torch::kCPU> outer;
    {
      const AutocastGuard<torch::kCPU> inner;
      copy.emplace(cast(w).getIntrusivePtr());
    }
    EXPECT_FALSE(copy->expired());
  }
  EXPECT_TRUE(copy->expired());
}

TEST(AutocastWeightCache, OutlivesInnerRegionOfSameDtype) {
  const Tensor w = weight();
  const AutocastGuard<torch::kCPU> outer;
  const Tensor before = cast(w);
  { const AutocastGuard<torch::kCPU> inner; }
  { const AutocastGuard<torch::kCPU> exact({.enabled = false}); }
  { const AutocastGuard<torch::kCUDA> elsewhere; }
  EXPECT_TRUE(cast(w).is_same(before));
}

/// Every way to run `call` in a region of `dtype`.
std::vector<std::function<void(torch::ScalarType, const std::function<void()>&)>> regions() {
  using torch::kCPU;
  const auto state_of = [](torch::ScalarType dtype) {
    const AutocastGuard autocast(kCPU, dtype);
    return mezzo::AutocastState::current();
  };
  return {
      [](auto dtype, auto& call) {
        const AutocastGuard autocast(kCPU, dtype);
        call();
      },
      [](auto dtype, auto& call) { mezzo::autocast({.device_type = kCPU, .dtype = dtype}, call); },
      [](auto dtype, auto& call) {
        mezzo::autocast_wrap({.device_type = kCPU, .dtype = dtype}, call)();
      },
      [=](auto dtype, auto& call) {
        const mezzo::AutocastStateGuard scope(state_of(dtype));
        call();
      },
      [](auto dtype, auto& call) {
        std::function<void()> carried;
        {
          const AutocastGuard autocast(kCPU, dtype);
          carried = mezzo::propagate_autocast_state(call);
        }
        carried();
      }};
}

TEST(AutocastWeightCache, SeparateForRegionOfOtherDtype) {
  const Tensor w = weight();
  const Tensor x = torch::rand({4, 4});
  const auto expect_dtype = [&](torch::ScalarType dtype) {
    EXPECT_EQ(torch::mm(x, w).scalar_type(), dtype);
  };
  for (const auto& outer : regions()) {
    for (const auto& inner : regions()) {
      const AutocastGuard<torch::kCPU> outermost;
      expect_dtype(torch::kBFloat16);
      outer(torch::kHalf, [&] {
        expect_dtype(torch::kHalf);
        inner(torch::kBFloat16, [&] { expect_dtype(torch::kBFloat16); });
        expect_dtype(torch::kHalf);
      });
      expect_dtype(torch::kBFloat16);
    }
  }
}

TEST(AutocastWeightCache, StaysDisabledInNestedRegions) {
  const Tensor w = torch::ones({2, 2}).requires_grad_();
  const Tensor x = torch::ones({2, 2});
  const AutocastGuard<torch::kCPU> outer({.cache_enabled = false});
  const auto product = [&] {
    const AutocastGuard<torch::kCPU> inner;
    return torch::mm(x, w).sum().item<float>();
  };
  EXPECT_EQ(product(), 8.0F);
  {
    const torch::NoGradGuard no_grad;
    w.mul_(2);
  }
  EXPECT_EQ(product(), 16.0F);
}

/// Returns whether libtorch's cache is enabled in each kind of region without cache_enabled.
std::vector<bool> read_inherited_cache_flags() {
  std::vector<bool> found;
  const auto record = [&] { found.push_back(at::autocast::is_autocast_cache_enabled()); };
  {
    const AutocastGuard<torch::kCPU> guard;
    record();
  }
  mezzo::autocast({.device_type = torch::kCPU, .dtype = torch::kHalf}, record);
  std::thread(mezzo::propagate_autocast_state([&] {
    mezzo::autocast_wrap<torch::kCPU>(record)();
  })).join();
  return found;
}

TEST(AutocastWeightCache, FlagInheritedByDefault) {
  EXPECT_THAT(read_inherited_cache_flags(), Each(true));
  {
    const AutocastGuard<torch::kCPU> outer({.cache_enabled = false});
    EXPECT_THAT(read_inherited_cache_flags(), Each(false));
    const AutocastGuard<torch::kCUDA> inner({.cache_enabled = true});
    EXPECT_THAT(read_inherited_cache_flags(), Each(true));
  }
  at::autocast::set_autocast_cache_enabled(false);
  EXPECT_THAT(read_inherited_cache_flags(), Each(false)) << "set by hand";
  at::autocast::set_autocast_cache_enabled(true);
}

// A cast made without grad mode is not used with it.
TEST(AutocastWeightCache, IgnoresNoGradAndInferenceCasts) {
  torch::nn::Linear model(2, 2);
  const Tensor x = torch::randn({8, 2});
  Tensor loss;
  {
    const AutocastGuard<torch::kCPU> autocast;
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(model(x).requires_grad());
    }
    {
      const c10::InferenceMode inference;
      EXPECT_EQ(model(x).scalar_type(), torch::kBFloat16);
    }
    loss = model(x).mean() + model(x).mean();
  }
  loss.backward();
  EXPECT_TRUE(model->weight.grad().defined());
}

}  // namespace
