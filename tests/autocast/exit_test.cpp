// What outlives main: the main thread's thread_locals are gone when static objects are destroyed.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>

namespace {

using mezzo::AutocastSetting;
using mezzo::AutocastState;
using mezzo::WeightCache;
using Guard = mezzo::Autocast<torch::kCPU>;

AutocastSetting policy_and_cache() {
  return {.cache = mezzo::install_op_overrides(WeightCache()),
          .policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("mm"))};
}

void run_ops() {
  const auto x = torch::ones({4, 4});
  for (int weight = 0; weight < 100; ++weight) {
    torch::linear(x, torch::randn({4, 4}).requires_grad_());
    torch::linear(x, torch::randn({4, 4}));
  }
}

/// Each in a process of its own, where mezzo and libtorch have made nothing yet.
class Exit : public testing::Test {
 protected:
  static void SetUpTestSuite() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

/// Ends the process as the end of main does. What is used after it was freed is not what it was.
template <class Begin>
[[noreturn]] void exit_after(const Begin& begin) {
  mallopt(M_PERTURB, 0x5a);
  begin();
  std::exit(0);
}

#define EXPECT_CLEAN_EXIT(...) \
  EXPECT_EXIT(exit_after([] __VA_ARGS__), testing::ExitedWithCode(0), "")

TEST_F(Exit, MayComeBeforeTheEndOfAStaticGuard) {
  EXPECT_CLEAN_EXIT({
    static const Guard guard;
    run_ops();
  });
  EXPECT_CLEAN_EXIT({
    static const Guard guard(policy_and_cache());
    run_ops();
  });
  EXPECT_CLEAN_EXIT({
    run_ops();
    { const Guard before(policy_and_cache()); }
    static const Guard guard(policy_and_cache());
    run_ops();
  });
}

TEST_F(Exit, MayComeBeforeTheEndOfNestedStaticGuards) {
  EXPECT_CLEAN_EXIT({
    static const Guard outer(policy_and_cache());
    static const Guard inner(policy_and_cache());
    static const mezzo::Autocast<torch::kCPU, torch::kHalf> innermost;
    run_ops();
  });
}

// A static object is destroyed after all those that were made later, libtorch's own among them.
TEST_F(Exit, MayComeBeforeTheEndOfAGuardThatAnEarlierStaticObjectHolds) {
  EXPECT_CLEAN_EXIT({
    static std::optional<Guard> guard;
    guard.emplace(policy_and_cache());
    run_ops();
  });
}

TEST_F(Exit, MayComeBeforeTheEndOfAGuardOfAThread) {
  EXPECT_CLEAN_EXIT({
    std::thread([] {
      thread_local const Guard of_the_thread(policy_and_cache());
      static const Guard of_the_process;
      run_ops();
    }).join();
    thread_local const Guard of_main(policy_and_cache());
    run_ops();
  });
}

/// A pool as programs have it: its threads are told to end when static objects are destroyed.
class StaticPool {
 public:
  ~StaticPool() {
    ends_ = true;
    thread_.join();
  }

  void start() {
    thread_ = std::thread([this] {
      {
        const Guard guard;
        run_ops();
        runs_ = true;
        while (!ends_) std::this_thread::yield();
      }
      const Guard late(policy_and_cache());
    });
    while (!runs_) std::this_thread::yield();
  }

 private:
  std::atomic<bool> runs_ = false, ends_ = false;
  std::thread thread_;
};

TEST_F(Exit, MayComeBeforeTheEndOfARegionInAThreadThatOutlivesMain) {
  EXPECT_CLEAN_EXIT({
    static StaticPool pool;
    pool.start();
  });
}

TEST_F(Exit, MayComeBeforeTheEndOfStaticCachesPoliciesStatesAndCallables) {
  EXPECT_CLEAN_EXIT({
    static const WeightCache cache = mezzo::install_op_overrides(WeightCache());
    static const WeightCache another = mezzo::install_op_overrides(WeightCache());
    static const auto policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("mm"));
    static const auto callable =
        mezzo::autocast<torch::kCPU>(run_ops, {.cache = cache, .policy = policy});
    static mezzo::AutocastModule module(torch::nn::Linear(4, 4),
                                        {.device = torch::kCPU, .cache = cache, .policy = policy});
    callable();
    module(torch::ones({4, 4}));
    const Guard guard({.cache = another, .policy = policy});
    static const auto state = AutocastState::capture();
    static const auto with_state = mezzo::with_current_autocast(run_ops);
    with_state();
    static const AutocastState::Scope scope(state);
    run_ops();
  });
}

}  // namespace
