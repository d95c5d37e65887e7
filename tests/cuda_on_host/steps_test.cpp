// The optimizers' kernels on the device that the host plays, against the CPU's loops: every rule,
// every pair of dtypes and way of keeping weights, odd tails, any alignment, and all that a step
// does beside the update. The same bits.

#include <mezzo/kernels/cuda_launch.h>
#include <mezzo/kernels/optimizer_step_cpu.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "host_device.h"
#include "memory.h"
#include "step_case.h"

namespace {

using namespace cuda_on_host;

class StepsOnHost : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(2); }
  void TearDown() override { host_device::set_seed(1); }
};

/// Sizes around a thread's pack, a stride and a block of the kernel.
const std::vector<int64_t> kSizes{0,    1,     3,    4,    1023, 1026, 8192,
                                  8195, 20001, 8193, 1030, 77,   1031, 78};

template <class Rule>
void expect_step_of_every_storage(const StepCase& step, const typename Rule::Constants& constants) {
  const auto expect = [&]<class Parameter, class Gradient, class Weights>(Storage storage) {
    StepParameters parameters(storage, step, kSizes);
    const StepParameters before = parameters.clone();
    StepParameters expected = parameters.clone();
    step_on_cpu<Parameter, Rule, Weights>(expected, step, constants);
    step_on_device<Rule>({&parameters}, step, constants);
    EXPECT_EQ(parameters.difference(expected), "") << storage.name;
    if (!step.is_skipped) {
      EXPECT_NE(parameters.difference(before), "") << storage.name;
    }
  };
  for_each_storage(expect);
}

template <class Rule>
void expect_steps(const typename Rule::Constants& constants) {
  for (const StepCase& step : step_cases()) {
    SCOPED_TRACE(step.name);
    expect_step_of_every_storage<Rule>(step, constants);
  }
}

TEST_F(StepsOnHost, AdamWAndAdam) {
  expect_steps<mezzo::detail::AdamRule<false>>(adam_constants(/*is_decoupled=*/true));
  expect_steps<mezzo::detail::AdamRule<false>>(adam_constants(/*is_decoupled=*/false));
}

TEST_F(StepsOnHost, Amsgrad) {
  expect_steps<mezzo::detail::AdamRule<true>>(adam_constants(/*is_decoupled=*/true));
}

TEST_F(StepsOnHost, SgdWithAndWithoutMomentum) {
  expect_steps<mezzo::detail::SgdRule<false>>({.weight_decay = 0.02});
  expect_steps<mezzo::detail::SgdRule<true>>(sgd_constants());
}

TEST_F(StepsOnHost, Lion) {
  expect_steps<mezzo::detail::LionRule>({.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
}

/// Parameters of several groups, of every storage, in one call.
template <class Rule>
void expect_one_call(const typename Rule::Constants& constants) {
  const StepCase step{.name = "one call", .scale = 0.5F, .clear = true};
  std::vector<StepParameters> all;
  std::vector<StepParameters> expected;
  for_each_storage([&]<class Parameter, class Gradient, class Weights>(Storage storage) {
    all.emplace_back(storage, step, std::vector<int64_t>{5, 9000});
    expected.push_back(all.back().clone());
    step_on_cpu<Parameter, Rule, Weights>(expected.back(), step, constants);
  });
  std::vector<StepParameters*> pointers;
  for (StepParameters& one : all) pointers.push_back(&one);
  step_on_device<Rule>(pointers, step, constants);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].difference(expected[i]), "") << i;
  }
}

TEST_F(StepsOnHost, EveryStorageInOneCall) {
  expect_one_call<mezzo::detail::AdamRule<true>>(adam_constants(true));
  expect_one_call<mezzo::detail::SgdRule<true>>(sgd_constants());
}

/// More parameters and groups than a table holds: more launches.
void expect_many(int count, int parameters_of_a_group) {
  using Rule = mezzo::detail::AdamRule<false>;
  const StepCase step{.name = "many", .parameters_of_a_group = parameters_of_a_group};
  std::vector<int64_t> sizes;
  for (int i = 0; i < count; ++i) sizes.push_back(i % 41);
  sizes[static_cast<std::size_t>(count) / 2] = 20001;
  StepParameters parameters({"float", at::kFloat, at::kFloat, at::kFloat}, step, sizes);
  StepParameters expected = parameters.clone();
  step_on_cpu<float, Rule, mezzo::detail::PlainWeights<float>>(expected, step,
                                                               adam_constants(true));
  step_on_device<Rule>({&parameters}, step, adam_constants(true));
  EXPECT_EQ(parameters.difference(expected), "") << count;
}

TEST_F(StepsOnHost, MoreParametersAndGroupsThanATableHolds) {
  for (const int count : {300, 301, 5000}) expect_many(count, 50);
  expect_many(30, 1);
}

TEST_F(StepsOnHost, StepsAreCountedUnlessSkipped) {
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{480}, std::size_t{700}, std::size_t{1000}}) {
    for (const float found : {-1.0F, 0.0F, 1.0F, 2.0F}) {  // -1: nobody asks; 2: of two devices
      std::vector<float> counts(size, 7.0F);
      std::vector<float*> counters;
      for (float& count : counts) counters.push_back(&count);
      mezzo::detail::cuda::count_steps_(at::kCPU, counters, found < 0 ? nullptr : &found);
      EXPECT_EQ(counts, std::vector<float>(size, found > 0 ? 7.0F : 8.0F));
    }
  }
}

/// A hundred orders, of which each storage has its share.
template <class Rule>
void expect_the_same_in_every_order(const typename Rule::Constants& constants) {
  const StepCase step{.name = "orders", .scale = 0.5F, .max_norm = 1};
  uint64_t seed = 0;
  for_each_storage([&]<class Parameter, class Gradient, class Weights>(Storage storage) {
    const StepParameters before(storage, step, {3, 1030});
    StepParameters first = before.clone();
    step_on_device<Rule>({&first}, step, constants);
    for (const uint64_t end = seed + 12; seed < end; ++seed) {
      host_device::set_seed(seed);
      StepParameters again = before.clone();
      step_on_device<Rule>({&again}, step, constants);
      ASSERT_EQ(again.difference(first), "") << storage.name << " with the seed " << seed;
    }
  });
}

TEST_F(StepsOnHost, GiveTheSameBitsInAHundredOrders) {
  expect_the_same_in_every_order<mezzo::detail::AdamRule<false>>(adam_constants(true));
  expect_the_same_in_every_order<mezzo::detail::AdamRule<true>>(adam_constants(true));
  expect_the_same_in_every_order<mezzo::detail::SgdRule<false>>({});
  expect_the_same_in_every_order<mezzo::detail::SgdRule<true>>(sgd_constants());
  expect_the_same_in_every_order<mezzo::detail::LionRule>({.beta1 = 0.9, .beta2 = 0.99});
}

}  // namespace
