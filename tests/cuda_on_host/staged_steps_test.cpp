// Steps whose moments lie in blocks of 8 bits, or in float beside weights of 16 bits: the kernels
// on the device that the host plays, against the CPU's loops. The same bits, but where LAMB's trust
// ratio depends on the order of a sum.

#include <mezzo/kernels/block8_cpu.h>
#include <mezzo/kernels/cuda_launch.h>
#include <mezzo/kernels/lamb_step_cpu.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/optim/adamw.h>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "host_device.h"
#include "memory.h"
#include "step_case.h"

namespace {

using namespace cuda_on_host;
using mezzo::detail::CpuIsa;
using mezzo::detail::kMaxMoments;
using mezzo::detail::StepTask;

struct Format {
  at::ScalarType parameter;  ///< of what is trained
  at::ScalarType gradient;
  WeightStorage weights;
  bool is_in_blocks;
};

std::vector<Format> formats() {
  std::vector<Format> all;
  for (const at::ScalarType gradient : {at::kFloat, at::kBFloat16, at::kHalf}) {
    all.push_back({at::kFloat, gradient, WeightStorage::plain, true});
  }
  for (const bool is_in_blocks : {true, false}) {
    for (const at::ScalarType gradient : {at::kFloat, at::kBFloat16}) {
      all.push_back({at::kBFloat16, gradient, WeightStorage::plain, is_in_blocks});
      all.push_back({at::kBFloat16, gradient, WeightStorage::stochastic, is_in_blocks});
      if (is_in_blocks) all.push_back({at::kBFloat16, gradient, WeightStorage::split_master, true});
    }
    all.push_back({at::kHalf, at::kHalf, WeightStorage::plain, is_in_blocks});
    all.push_back({at::kHalf, at::kFloat, WeightStorage::plain, is_in_blocks});
  }
  return all;
}

/// A parameter with its streams. Every second one is one element off what a pack needs.
struct Member {
  std::vector<at::Tensor> streams;  // parameter, gradient, moments, low half or copy, scales
  float count;
};

Member make_member(const Format& format, const StepCase& step, int64_t size, int64_t offset) {
  const auto make = [&](const at::Tensor& values) {
    const at::Tensor memory = at::zeros({size + offset}, values.options());
    return memory.narrow(0, offset, size).copy_(values);
  };
  const auto random = [&](double spread) { return at::randn({size}).mul(spread); };
  Member member{{make(random(1).to(format.parameter)), make(random(2).to(format.gradient))},
                static_cast<float>(size % 7)};
  std::vector<at::Tensor> scales;
  for (int k = 0; k < kMaxMoments; ++k) {
    const at::Tensor values = k == 0 ? random(0.1) : random(0.1).square();
    const at::Tensor codes = at::empty({size}, at::kByte);
    scales.push_back(at::empty({mezzo::detail::blocks8_of(size)}));
    mezzo::detail::narrow_block8(k == 0, values.data_ptr<float>(), codes.data_ptr<uint8_t>(),
                                 scales.back().data_ptr<float>(), size);
    member.streams.push_back(make(format.is_in_blocks ? codes : values));
  }
  const bool has_low_half = format.weights == WeightStorage::split_master ||
                            (step.publishes && format.parameter == at::kFloat);
  member.streams.push_back(has_low_half ? make(random(1e4).to(at::kShort)) : at::Tensor());
  if (format.is_in_blocks) {
    member.streams.insert(member.streams.end(), scales.begin(), scales.end());
  }
  return member;
}

Member copy_of_member(const Member& member) {
  Member copy{{}, member.count};
  for (const at::Tensor& stream : member.streams) {
    copy.streams.push_back(stream.defined() ? copy_of(stream) : stream);
  }
  return copy;
}

template <class Rule>
mezzo::detail::StepSpan span_of(const Member& member) {
  mezzo::detail::StepSpan span{
      member.streams[0].data_ptr(),
      member.streams[1].data_ptr(),
      {},
      member.streams[0].numel(),
      member.streams[5].defined() ? member.streams[5].data_ptr() : nullptr};
  for (unsigned k = 0; k < Rule::kMoments; ++k) span.moments[k] = member.streams[2 + k].data_ptr();
  return span;
}

template <class Rule>
float* scales_of(const Member& member, unsigned k) {
  if (member.streams.size() < 9 || k >= Rule::kMoments) return nullptr;
  return member.streams[6 + k].data_ptr<float>();
}

constexpr double kRate = 0.01;
constexpr uint64_t kSeed = 77;

template <class Rule>
void step_on_cpu(std::vector<Member>& members, const Format& format, const StepCase& step,
                 const typename Rule::Constants& constants) {
  const bool is_bare =
      format.parameter != at::kFloat && format.weights != WeightStorage::split_master;
  const auto storage = is_bare ? WeightStorage::plain : format.weights;
  const auto kept = is_bare ? at::kFloat : format.parameter;
  std::vector<StepTask> tasks;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Member& member = members[i];
    if (step.is_skipped) {
      if (step.clear) member.streams[1].zero_();
      continue;
    }
    StepTask& task = tasks.emplace_back();
    if constexpr (std::is_same_v<Rule, LambRule>) {
      task.loop = mezzo::detail::lamb_loop(storage, kept, mezzo::detail::best_isa());
    } else {
      task.loop = mezzo::detail::step_loop<Rule>(storage, kept, mezzo::detail::best_isa());
    }
    task.span = span_of<Rule>(member);
    task.sizes = {.parameter = static_cast<int64_t>(c10::elementSize(format.parameter)),
                  .gradient = static_cast<int64_t>(c10::elementSize(format.gradient)),
                  .moment = format.is_in_blocks ? 1 : 4};
    task.gradient_dtype = format.gradient;
    task.widens = format.gradient != at::kFloat;
    task.clears = step.clear;
    task.is_staged = true;
    if (is_bare) task.parameter_dtype = format.parameter;
    task.is_stochastic = format.weights == WeightStorage::stochastic;
    for (unsigned k = 0; k < kMaxMoments; ++k) task.scales[k] = scales_of<Rule>(member, k);
    task.use = {.factor = step.scale == 0 ? 1.0 : static_cast<double>(step.scale),
                .copies_half = step.copies_half,
                .seed = kSeed,
                .step = static_cast<uint64_t>(member.count) + 1,
                .parameter = 1000 + i};
    task.coefficients = constants.at(kRate, static_cast<int64_t>(task.use.step));
  }
  if constexpr (std::is_same_v<Rule, LambRule>) {
    mezzo::detail::run_lamb_cpu(tasks);
  } else {
    mezzo::detail::run_step_cpu(tasks);
  }
}

template <class Rule>
void step_on_device(std::vector<Member>& members, const Format& format, const StepCase& step,
                    const typename Rule::Constants& constants) {
  const float found_inf = step.is_skipped ? 1.0F : 0.0F;
  mezzo::detail::StepInputs inputs{.found_inf = &found_inf, .clear = step.clear};
  if (step.scale != 0) inputs.inv_scale = &step.scale;
  std::vector<mezzo::detail::StepRow> rows;
  for (std::size_t i = 0; i < members.size(); ++i) {
    rows.push_back({span_of<Rule>(members[i]), &members[i].count, 0, 1000 + static_cast<int>(i),
                    kIsVariant<Rule>, step.copies_half, format.weights, format.parameter,
                    format.gradient});
    for (unsigned k = 0; k < kMaxMoments; ++k) {
      rows.back().scales[k] = scales_of<Rule>(members[i], k);
    }
    rows.back().is_staged = true;
  }
  mezzo::detail::TableMemory memory;
  mezzo::detail::cuda::begin_step_(at::kCPU, memory);
  mezzo::detail::cuda::step_(at::kCPU, Rule::kCudaRule, rows, {{constants, kRate, kSeed}}, inputs,
                             memory);
}

/// The first stream that differs, in words. `is_near`: weights may, by a trust ratio's last bits.
std::string difference(const Member& actual, const Member& expected, bool is_near) {
  for (std::size_t k = 0; k < actual.streams.size(); ++k) {
    const at::Tensor& own = actual.streams[k];
    if (!own.defined() || same_bits(own, expected.streams[k])) continue;
    const bool is_weight = k == 0 || k == 5;
    const double most = own.scalar_type() == at::kFloat ? 1e-6 : 0.02;
    if (is_near && k == 5) continue;  // the bits below a weight that is near
    if (is_near && is_weight &&
        at::allclose(own.to(at::kFloat), expected.streams[k].to(at::kFloat), most, most * 0.1)) {
      continue;
    }
    return "stream " + std::to_string(k) + " of " + std::to_string(own.numel()) + " elements";
  }
  return "";
}

const std::vector<int64_t> kSizes{1, 7, 255, 256, 257, 2049, 8193};

template <class Rule>
void expect_steps(const typename Rule::Constants& constants, bool is_near = false) {
  const std::vector<StepCase> cases{
      {.name = "plain"},
      {.name = "scaled and cleared", .scale = 0.25F, .clear = true},
      {.name = "skipped", .is_skipped = true},
      {.name = "skipped and cleared", .is_skipped = true, .clear = true},
      {.name = "published", .publishes = true, .copies_half = true}};
  for (const StepCase& step : cases) {
    for (const Format& format : formats()) {
      SCOPED_TRACE(step.name + ", " + c10::toString(format.parameter) + " with " +
                   c10::toString(format.gradient) + ", storage " +
                   std::to_string(static_cast<int>(format.weights)) +
                   (format.is_in_blocks ? ", blocks" : ", floats"));
      std::vector<Member> actual;
      std::vector<Member> expected;
      for (std::size_t i = 0; i < kSizes.size(); ++i) {
        actual.push_back(make_member(format, step, kSizes[i], static_cast<int64_t>(i % 2)));
        expected.push_back(copy_of_member(actual.back()));
      }
      step_on_cpu<Rule>(expected, format, step, constants);
      step_on_device<Rule>(actual, format, step, constants);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(difference(actual[i], expected[i], is_near), "");
      }
    }
  }
}

class StagedStepsOnHost : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(3); }
  void TearDown() override { host_device::set_schedule({}); }
};

TEST_F(StagedStepsOnHost, AdamW) {
  expect_steps<mezzo::detail::AdamRule<false>>(adam_constants(/*is_decoupled=*/true));
}
TEST_F(StagedStepsOnHost, Amsgrad) {
  expect_steps<mezzo::detail::AdamRule<true>>(adam_constants(/*is_decoupled=*/true));
}
TEST_F(StagedStepsOnHost, SgdWithMomentum) {
  expect_steps<mezzo::detail::SgdRule<true>>(sgd_constants());
}
TEST_F(StagedStepsOnHost, Lion) {
  expect_steps<mezzo::detail::LionRule>({.beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1});
}
TEST_F(StagedStepsOnHost, Lamb) {
  expect_steps<LambRule>(lamb_constants(/*weight_decay=*/0));
  expect_steps<LambRule>(lamb_constants(/*weight_decay=*/0.1), /*is_near=*/true);
}

/// A block's scale is the warp's: it must not depend on the order in which lanes run.
TEST_F(StagedStepsOnHost, AreTheSameInAnyOrder) {
  const Format format{at::kBFloat16, at::kFloat, WeightStorage::stochastic, true};
  const StepCase step{.name = "any order", .clear = true};
  const Member before = make_member(format, step, 9000, 1);
  std::vector<Member> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    host_device::set_schedule({seed, seed % 2 == 0 ? 1 : 3});
    std::vector<Member> own{copy_of_member(before)};
    step_on_device<mezzo::detail::AdamRule<false>>(own, format, step, adam_constants(true));
    if (seed == 0)
      first = std::move(own);
    else
      EXPECT_EQ(difference(own[0], first[0], false), "") << "with the seed " << seed;
  }
}

/// More parameters than one table holds.
TEST_F(StagedStepsOnHost, PagesOfTables) {
  const Format format{at::kFloat, at::kFloat, WeightStorage::plain, true};
  const StepCase step{.name = "pages"};
  std::vector<Member> actual;
  std::vector<Member> expected;
  for (int i = 0; i < 500; ++i) {
    actual.push_back(make_member(format, step, 300, 0));
    expected.push_back(copy_of_member(actual.back()));
  }
  step_on_cpu<mezzo::detail::LionRule>(expected, format, step, {0.9, 0.99, 0.1});
  step_on_device<mezzo::detail::LionRule>(actual, format, step, {0.9, 0.99, 0.1});
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(difference(actual[i], expected[i], false), "") << i;
  }
}

}  // namespace
