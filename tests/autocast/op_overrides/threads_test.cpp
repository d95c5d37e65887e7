#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace {

using mezzo::AutocastGuard;
using mezzo::OpOverrides;
using torch::kCPU;

constexpr std::size_t kThreads = 8;

// Overrides of a thread, and the dtypes of mm on float32 and of softmax on bfloat16 under them.
struct Expectation {
  OpOverrides overrides;
  at::ScalarType mm;
  at::ScalarType softmax;
};

std::array<Expectation, 4> expectations() {
  std::array<Expectation, 4> all = {
      {{OpOverrides(), torch::kBFloat16, torch::kBFloat16},
       {OpOverrides().deny("mm"), torch::kFloat, torch::kBFloat16},
       {OpOverrides().deny("softmax.int"), torch::kBFloat16, torch::kFloat},
       {OpOverrides().ignore("mm").deny("softmax"), torch::kFloat, torch::kFloat}}};
  for (const Expectation& each : all) mezzo::install_op_overrides(each.overrides);
  return all;
}

// Returns how many results had another dtype than expected.
int run(const Expectation& expected, int rounds) {
  const torch::NoGradGuard no_grad;
  const auto a = torch::ones({4, 4});
  const auto b = torch::ones({4, 4}, torch::kBFloat16);
  int wrong = 0;
  for (int i = 0; i < rounds; ++i) {
    const AutocastGuard<kCPU> autocast({.op_overrides = expected.overrides});
    wrong += torch::mm(a, a).scalar_type() != expected.mm;
    wrong += torch::softmax(b, 1).scalar_type() != expected.softmax;
    try {
      const AutocastGuard<kCPU> inner({.op_overrides = OpOverrides(expected.overrides)});
      torch::mm(a, torch::ones({3, 3}));
      ++wrong;
    } catch (const c10::Error&) {  // mismatched shapes: the scope ends by exception
    }
    wrong += torch::mm(a, a).scalar_type() != expected.mm;
  }
  return wrong;
}

/// Runs `work` for each kind of thread in two concurrent threads, and returns the sum.
template <class Work>
int in_threads(const Work& work) {
  const auto kinds = expectations();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { wrong += work(kinds[i % kinds.size()]); });
  }
  for (auto& thread : threads) thread.join();
  return wrong;
}

TEST(OpOverridesThreads, AreThreadLocal) {
  EXPECT_EQ(in_threads([](const Expectation& kind) { return run(kind, 400); }), 0);
}

// Overrides and op lists may be constructed in any thread.
TEST(OpOverridesThreads, ConstructOverridesConcurrently) {
  EXPECT_EQ(in_threads([](Expectation kind) {
              int wrong = 0;
              for (int round = 0; round < 10; ++round) {
                kind.overrides = OpOverrides::parse(kind.overrides.to_string());
                wrong += run(kind, 2);
                wrong += mezzo::autocast_op_list(kCPU).cast_policy("aten::mm") !=
                         mezzo::CastPolicy::lower_precision_fp;
              }
              return wrong;
            }),
            0);
}

}  // namespace
