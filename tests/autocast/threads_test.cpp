#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_state.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>

#include "get_product_dtype.h"

namespace {

using mezzo::AutocastState;
using mezzo::AutocastStateGuard;
using torch::Tensor;

void set_all_device_types() {
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    at::autocast::set_autocast_enabled(device, device != torch::kCPU);
    at::autocast::set_autocast_dtype(device, torch::kDouble);
  }
  at::autocast::set_autocast_cache_enabled(false);
}

void expect_every_device_type_as_set() {
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    EXPECT_EQ(at::autocast::is_autocast_enabled(device), device != torch::kCPU) << device;
    EXPECT_EQ(at::autocast::get_autocast_dtype(device), torch::kDouble) << device;
  }
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
}

TEST(AutocastState, StoresDeviceTypesAndCacheFlag) {
  std::thread([] {  // a thread, whose state ends with it
    set_all_device_types();
    std::thread(mezzo::propagate_autocast_state(expect_every_device_type_as_set)).join();
  })
      .join();
}

TEST(AutocastState, PreservesOtherDispatchState) {
  const AutocastState off = AutocastState::current();
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Tracer);
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  {
    const AutocastStateGuard scope(off);
    EXPECT_TRUE(c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer));
  }
  EXPECT_TRUE(c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer));
  EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
}

TEST(AutocastState, RestoredInPoolThreadBetweenTasks) {
  const AutocastState off = AutocastState::current();
  const mezzo::AutocastGuard<torch::kCPU> autocast({.cache_enabled = false});
  const AutocastState on = AutocastState::current();
  std::thread([&] {
    {
      const AutocastStateGuard scope(on);
      EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
      {
        const AutocastStateGuard inner(off);
        EXPECT_EQ(get_product_dtype(), torch::kFloat);
        EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      }
      EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
    }
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    EXPECT_EQ(at::autocast::increment_nesting(), 1);
    at::autocast::decrement_nesting();
  }).join();
}

TEST(AutocastState, PropagatesToThreads) {
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  const auto work = mezzo::propagate_autocast_state(
      [](const Tensor& x, std::unique_ptr<int> n) { return torch::mm(x, x) * *n; });
  auto result = std::async(std::launch::async, work, torch::ones({2, 2}), std::make_unique<int>(3));
  const Tensor product = result.get();
  EXPECT_EQ(product.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(product.sum().to(torch::kFloat).item<float>(), 24.0F);
}

}  // namespace
