// Guards in coroutines, which do not follow the call stack.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_state.h>
#include <mezzo/autocast/op_overrides.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <condition_variable>
#include <coroutine>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

#include "../autocast/get_product_dtype.h"

namespace {

using torch::Tensor;

/// A coroutine that runs to its next co_await at each `resume`.
class Coroutine {
 public:
  struct promise_type {
    Coroutine get_return_object() {
      return Coroutine(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() { std::terminate(); }
  };

  explicit Coroutine(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Coroutine(Coroutine&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  ~Coroutine() {
    if (handle_) handle_.destroy();
  }

  void resume() const { handle_.resume(); }

 private:
  std::coroutine_handle<promise_type> handle_;
};

/// A thread's autocast state on the CPU.
struct CpuState {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  torch::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool caches = at::autocast::is_autocast_cache_enabled();
  int nesting = at::autocast::increment_nesting() + at::autocast::decrement_nesting();

  bool operator==(const CpuState&) const = default;
};

/// Runs in a separate thread, whose autocast state ends with it.
void run_in_new_thread(const std::function<void()>& work) { std::thread(work).join(); }

/// A guard written with the functions of ATen/autocast_mode.h.
template <torch::ScalarType Dtype>
class LibtorchGuard {
 public:
  LibtorchGuard() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, Dtype);
    at::autocast::increment_nesting();
  }
  ~LibtorchGuard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, prev_.enabled);
    at::autocast::set_autocast_dtype(at::kCPU, prev_.dtype);
  }

 private:
  CpuState prev_;
};

/// A guard that lives across a suspension.
template <class Guard>
Coroutine hold_across_suspension() {
  const Guard guard;
  co_await std::suspend_always();
}

template <class Half, class Bfloat16>
CpuState run_overlapping_guards() {
  CpuState after;
  run_in_new_thread([&after] {
    const auto first = hold_across_suspension<Half>();
    const auto second = hold_across_suspension<Bfloat16>();
    for (const auto* coroutine : {&first, &second, &first, &second}) coroutine->resume();
    after = CpuState();
  });
  return after;
}

template <class Guard>
std::pair<CpuState, CpuState> end_guard_in_other_thread() {
  std::pair<CpuState, CpuState> after;
  run_in_new_thread([&after] {
    const auto coroutine = hold_across_suspension<Guard>();
    coroutine.resume();
    run_in_new_thread([&] {
      coroutine.resume();
      after.second = CpuState();
    });
    after.first = CpuState();
  });
  return after;
}

// Both guards restore the wrong state, as torch.autocast around an await does.
TEST(AutocastCoroutines, GuardAcrossSuspensionMatchesLibtorch) {
  using Half = mezzo::AutocastGuard<torch::kCPU, torch::kHalf>;
  using LibtorchHalf = LibtorchGuard<torch::kHalf>;
  EXPECT_EQ((run_overlapping_guards<Half, mezzo::AutocastGuard<torch::kCPU>>()),
            (run_overlapping_guards<LibtorchHalf, LibtorchGuard<torch::kBFloat16>>()));
  EXPECT_EQ(end_guard_in_other_thread<Half>(), end_guard_in_other_thread<LibtorchHalf>());
}

Coroutine compute_in(mezzo::AutocastState state, std::vector<torch::ScalarType>& dtypes) {
  for (int stretch = 0; stretch < 3; ++stretch) {
    {
      const mezzo::AutocastStateGuard scope(state);
      dtypes.push_back(get_product_dtype());
    }
    co_await std::suspend_always();
  }
}

TEST(AutocastCoroutines, StateGuardWorksInResumingThread) {
  const CpuState before;
  std::vector<torch::ScalarType> low, plain;
  std::optional<mezzo::AutocastState> half;
  {
    const mezzo::AutocastGuard<torch::kCPU, torch::kHalf> autocast;
    half = mezzo::AutocastState::current();
  }
  const auto first = compute_in(*half, low);
  const auto second = compute_in(mezzo::AutocastState::current(), plain);
  for (const auto* coroutine : {&first, &second}) coroutine->resume();
  run_in_new_thread([&] {
    const CpuState of_thread;
    for (const auto* coroutine : {&second, &first}) coroutine->resume();
    EXPECT_EQ(CpuState(), of_thread);
  });
  for (const auto* coroutine : {&first, &second}) coroutine->resume();
  EXPECT_EQ(low, std::vector(3, torch::kHalf));
  EXPECT_EQ(plain, std::vector(3, torch::kFloat));
  EXPECT_EQ(CpuState(), before);
}

}  // namespace
