// Compares what training steps compute with a recording, to the bit.
//
// golden_bits.txt has a line for each case: its name, which is optimizer/weights/way of stepping,
// and what 50 steps of it compute. The columns:
//
//   parameters   hash of the parameters after every step
//   state        hash of the moments, float masters and step counts after the last step
//   scales       hash of the loss scale after every step
//   results      hash of every StepResult
//   gradients    hash of `.grad` after every step; - for weights with masters after unscale_, where
//                `.grad` is a float tensor
//   applied      applied_steps() after the last step; - where the optimizer has no such count
//   loaded       hash of parameters and state three steps after torch::save and torch::load
//
// The bits are the same for every instruction set of mezzo's loops (tests/kernels compares these
// with each other), every number of threads, every compiler and every ATEN_CPU_CAPABILITY.
// Gradients are made by integer arithmetic, not by libtorch's kernels. Cases that step an optimizer
// of libtorch take rates, momenta and scales such that every product is exact, so that a fused
// multiply-add of ATen's changes no bit.
//
// A change that is meant to change bits records them anew, and says why in its commit:
//
//   MEZZO_RECORD_GOLDEN=tests/nets/golden_bits.txt
//     build/test/tests/mezzo_tests --gtest_filter='GoldenBits.*'

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "golden_cases.h"

namespace {

using namespace golden;

class Cases {
 public:
  Cases() : mezzos_(mezzos()), libtorchs_(libtorchs()) {
    every_pair_of_optimizer_weights_and_way();
    adamw_in_every_way();
    rare_cases();
    steps_of_libtorch();
  }
  const std::vector<NamedCase>& all() const { return all_; }

 private:
  void add(const NamedOptimizer& optimizer, const Case& of, const std::string& more = "") {
    const std::string name = name_of(optimizer, of) + more;
    for (const NamedCase& one : all_) {
      if (one.name == name) return;
    }
    all_.push_back({name, [run = optimizer.run, of] { return run(of); }});
  }

  void every_pair_of_optimizer_weights_and_way() {
    const auto weights = all_weights();
    constexpr std::size_t kWaysToPair = 9;
    for (std::size_t i = 0; i != mezzos_.size(); ++i) {
      for (std::size_t j = 0; j != weights.size(); ++j) {
        add(mezzos_[i], {weights[j], kWays[(i + j) % kWaysToPair].first});
      }
    }
    for (std::size_t j = 0; j != weights.size(); ++j) {  // some ways that are left
      if (j % 8 == mezzos_.size()) continue;
      add(mezzos_[j % 8], {weights[j], kWays[(8 + j) % kWaysToPair].first});
    }
  }

  void adamw_in_every_way() {
    for (const char* weights : {"float", "bfloat16_master", "bfloat16_split", "mixed_master"}) {
      for (const auto& [way, name] : kWays) add(mezzos_[0], {weights_named(weights), way});
    }
  }

  void rare_cases() {
    for (const char* weights : {"bfloat16_master", "bfloat16_split", "bfloat16_stochastic",
                                "half_master", "mixed_master"}) {
      Case written{weights_named(weights), Way::norm};
      written.writes_weights = true;
      add(mezzos_[0], written, "/written");
    }
    add(mezzos_[0], {weights_named("float"), Way::norm, 65536.0}, "/power_of_two");
    add(mezzos_[0], {weights_named("float"), Way::norm, 30000.0, 2}, "/hysteresis");
    add(named(mezzos_, "sgd_dampening"), {weights_named("bfloat16_master"), Way::zero});
  }

  void steps_of_libtorch() {
    for (const auto& [way, name] : kWays) {
      if (way == Way::bare) continue;
      if (way != Way::table) {
        add(named(libtorchs_, "torch_sgd"), {weights_named("float"), way});
        add(named(libtorchs_, "torch_sgd"), {weights_named("double"), way});
      }
      add(named(libtorchs_, "masters_sgd"), {with_masters("bfloat16"), way});
    }
    add(named(libtorchs_, "torch_sgd"), {weights_named("bfloat16"), Way::norm});
    add(named(libtorchs_, "torch_sgd_momentum"), {weights_named("float"), Way::norm_zero});
    for (const Way way : {Way::step, Way::norm, Way::unscale_norm, Way::norm_zero, Way::bare}) {
      add(named(libtorchs_, "masters_sgd"), {with_masters("half"), way});
      add(named(libtorchs_, "masters_sgd"), {with_masters("mixed_master"), way});
    }
    Case written{with_masters("bfloat16"), Way::norm};
    written.writes_weights = true;
    add(named(libtorchs_, "masters_sgd"), written, "/written");
  }

  std::vector<NamedOptimizer> mezzos_;
  std::vector<NamedOptimizer> libtorchs_;
  std::vector<NamedCase> all_;
};

TEST(GoldenBits, OfEveryStepAreThoseRecorded) {
  compare_or_record(Cases().all(),
                    {"parameters", "state", "scales", "results", "gradients", "applied", "loaded"},
                    MEZZO_GOLDEN_BITS, "MEZZO_RECORD_GOLDEN");
}

}  // namespace
