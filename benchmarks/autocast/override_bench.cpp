// What op policies cost, in nanoseconds a call on one thread, and against the limits:
//   an op that is not installed    nothing
//   an op that is                  outside every policy: stated
//                                  inside one: 1 us more than libtorch's own cast of the same
//                                  inputs
// Medians of interleaved rounds. Overrides stay once registered, so what has none is measured
// first.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace {

using mezzo::Autocast;
using mezzo::OpPolicy;

constexpr int kRounds = 31;
constexpr int kCalls = 2000;

struct Case {
  std::string name;
  std::function<void()> call;
  double nanoseconds = std::numeric_limits<double>::infinity();
};

double time_calls(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) {
    call();
  }
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / kCalls;
}

std::vector<double> fastest(std::vector<Case> cases) {
  for (auto& each : cases) {
    time_calls(each.call);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (auto& each : cases) {
      each.nanoseconds = std::min(each.nanoseconds, time_calls(each.call));
    }
  }
  std::vector<double> results;
  for (auto& each : cases) {
    results.push_back(each.nanoseconds);
    std::printf("%-44s %8.0f ns\n", each.name.c_str(), results.back());
  }
  return results;
}

void run() {
  const auto big = at::ones({64, 64});
  const auto a = at::ones({4, 4});
  const auto lower = a.to(at::kBFloat16);
  const auto mm = [&] { at::mm(big, big); };
  const auto add = [&] { at::add(big, big); };
  const auto small_mm = [&] { at::mm(lower, lower); };
  const Autocast<at::kCPU> autocast;

  std::puts("nothing was installed");
  const auto before =
      fastest({{"mm 64x64", mm}, {"add 64x64", add}, {"mm 4x4 bfloat16", small_mm}});

  const auto other =
      mezzo::install_op_overrides(OpPolicy().deny("relu").allow("softmax.int").deny("addmm"));
  std::vector<double> unnamed;
  {
    std::puts("inside a policy that names other ops");
    const Autocast<at::kCPU> region({.policy = other});
    unnamed = fastest({{"mm 64x64", mm}, {"add 64x64", add}});
  }

  std::puts("mm overridden, outside every policy");
  const auto deny = mezzo::install_op_overrides(OpPolicy().deny("mm"));
  const auto outside = fastest({{"mm 64x64", mm}, {"mm 4x4 bfloat16", small_mm}});

  std::puts("mm denied: both inputs cast to float32");
  const auto by_policy = [&] {
    const Autocast<at::kCPU> region({.policy = deny});
    small_mm();
  };
  const auto by_hand = [&] {
    const Autocast<at::kCPU> region({.enabled = false});
    at::mm(lower.to(at::kFloat), lower.to(at::kFloat));
  };
  const auto by_libtorch = [&] {
    const Autocast<at::kCPU> region;
    at::mm(a, a);
  };
  const auto inside = fastest({{"mm 4x4 bfloat16, by the policy", by_policy},
                               {"mm 4x4 bfloat16, cast by hand", by_hand},
                               {"mm 4x4 float32, libtorch's own cast down", by_libtorch}});

  std::puts("");
  std::printf("an op that no policy names:  mm %.3f, add %.3f of before\n", unnamed[0] / before[0],
              unnamed[1] / before[1]);
  std::printf("an override costs outside:   %+.0f ns a call (mm 64x64 %.3f of before)\n",
              outside[1] - before[2], outside[0] / before[0]);
  std::printf("an override costs inside:    %+.0f ns over a cast by hand (limit 1000)\n",
              inside[0] - inside[1]);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  run();
}
