// Compares what training steps compute on a GPU that the host plays, and what they ask of it, with
// tests/nets/golden_host_device.txt. The columns:
//
//   parameters ... applied            as in tests/nets/golden_bits.txt
//   launches, ops, copies_from_host,  what step 46, a clean one, asked of the device: launches of
//   copies_to_host, events, waits     mezzo's kernels, ATen's ops, copies, recorded events, and
//                                     waits of the host; from `scale` to the end of `update`
//   all_launches, all_ops, all_waits  what all 50 steps asked
//
// To record anew, as for tests/nets/golden_test.cpp:
//
//   MEZZO_RECORD_GOLDEN_HOST_DEVICE=tests/nets/golden_host_device.txt
//     build/test/tests/cuda_on_host/mezzo_cuda_on_host --gtest_filter='GoldenBits.*'

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../nets/golden_cases.h"
#include "host_gpu.h"

namespace {

using namespace golden;

host_gpu::Counts difference(const host_gpu::Counts& after, const host_gpu::Counts& before) {
  return {.launches = after.launches - before.launches,
          .ops = after.ops - before.ops,
          .copies_from_host = after.copies_from_host - before.copies_from_host,
          .copies_to_host = after.copies_to_host - before.copies_to_host,
          .events = after.events - before.events,
          .waits = after.waits - before.waits};
}

/// What the steps of a case ask of the device.
struct Meter {
  host_gpu::Counts at_begin;
  host_gpu::Counts clean_step;
  int64_t launches = 0;
  int64_t ops = 0;
  int64_t waits = 0;

  void begin_step() { at_begin = host_gpu::counts(); }
  void end_step(int step) {
    const host_gpu::Counts asked = difference(host_gpu::counts(), at_begin);
    if (step == kCleanStep) clean_step = asked;
    launches += asked.launches;
    ops += asked.ops;
    waits += asked.waits;
  }

  static constexpr int kCleanStep = 46;  ///< with a gradient for every parameter
};

Line measured_line(const NamedOptimizer& optimizer, Case of) {
  host_gpu::begin(/*seed=*/1);
  const auto meter = std::make_shared<Meter>();
  of.device = host_gpu::device();
  of.before_step = [meter](int) { meter->begin_step(); };
  of.after_step = [meter](int step) { meter->end_step(step); };
  Line line = optimizer.run(of);
  host_gpu::run_all();
  line.pop_back();  // nothing was loaded
  const host_gpu::Counts& clean = meter->clean_step;
  for (const int64_t count :
       {clean.launches, clean.ops, clean.copies_from_host, clean.copies_to_host, clean.events,
        clean.waits, meter->launches, meter->ops, meter->waits}) {
    line.push_back(std::to_string(count));
  }
  return line;
}

class DeviceCases {
 public:
  DeviceCases() {
    for (const char* weights : {"float", "double", "bfloat16", "bfloat16_master", "bfloat16_split",
                                "bfloat16_stochastic", "half_master", "mixed_master"}) {
      add("adamw", weights, Way::norm);
    }
    for (const Way way :
         {Way::step, Way::norm_zero, Way::disabled, Way::bare, Way::table, Way::zero}) {
      add("adamw", "float", way);
    }
    for (const Way way : {Way::step, Way::unscale, Way::unscale_norm_zero, Way::bare}) {
      add("adamw", "bfloat16_master", way);
    }
    for (const char* optimizer :
         {"amsgrad", "adam", "sgd", "sgd_nesterov", "sgd_dampening", "lion"}) {
      add(optimizer, "float", Way::norm);
      add(optimizer, "bfloat16_master", Way::norm_zero);
    }
    // The stand-in lacks an op that MasterWeights takes.
    add("torch_sgd", "float", Way::step);
  }
  const std::vector<NamedCase>& all() const { return all_; }

 private:
  void add(const std::string& optimizer, const std::string& weights, Way way) {
    const bool is_libtorchs = optimizer.starts_with("torch_");
    const NamedOptimizer& recipe = named(is_libtorchs ? libtorchs_ : mezzos_, optimizer);
    const Case of{.weights = weights_named(weights), .way = way};
    all_.push_back({name_of(recipe, of), [recipe, of] { return measured_line(recipe, of); }});
  }

  std::vector<NamedOptimizer> mezzos_ = mezzos();
  std::vector<NamedOptimizer> libtorchs_ = libtorchs();
  std::vector<NamedCase> all_;
};

TEST(GoldenBits, OfEveryStepOnADeviceAreThoseRecorded) {
  compare_or_record(DeviceCases().all(),
                    {"parameters", "state", "scales", "results", "gradients", "applied", "launches",
                     "ops", "copies_from_host", "copies_to_host", "events", "waits", "all_launches",
                     "all_ops", "all_waits"},
                    MEZZO_GOLDEN_HOST_DEVICE, "MEZZO_RECORD_GOLDEN_HOST_DEVICE");
}

}  // namespace
