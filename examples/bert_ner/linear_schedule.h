/// \file
/// The learning rate of BERT's fine-tuning: up in a straight line, then down to 0.
#pragma once

#include <mezzo/step_result.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace bert_ner {

/// Multiplies each group's initial learning rate by a function of the steps that were applied: a
/// step that the scaler skipped does not count, so a rate is never spent on nothing. A GPU decides
/// by itself whether to step and tells later; until then the step counts, and nobody waits.
class LinearSchedule {
 public:
  struct Options {
    int64_t warmup_steps = 0;  ///< the rate rises over these, from 1 / (warmup_steps + 1) of it
    int64_t total_steps = 0;   ///< and reaches 0 after these
  };

  /// Sets the rate of the first step. The optimizer must outlive the schedule.
  LinearSchedule(torch::optim::Optimizer& optimizer, Options options)
      : optimizer_(optimizer), options_(options) {
    TORCH_CHECK(options.warmup_steps >= 0 && options.warmup_steps <= options.total_steps,
                "warmup_steps must be from 0 to total_steps (", options.total_steps, "), got ",
                options.warmup_steps);
    for (auto& group : optimizer.param_groups()) {
      initial_rates_.push_back(group.options().get_lr());
    }
    set_applied_steps(0);
  }

  /// To be called after each optimizer step, with what became of it. Never waits.
  void step(mezzo::StepResult result) {
    under_way_.push_back(std::move(result));
    ++counted_steps_;
    while (!under_way_.empty() && under_way_.front().ready()) {
      if (!under_way_.front().ran()) --counted_steps_;
      under_way_.pop_front();
    }
    set_rates();
  }

  /// The steps that were applied. Waits for those under way.
  int64_t applied_steps() const {
    return counted_steps_ - std::count_if(under_way_.begin(), under_way_.end(),
                                          [](const auto& result) { return !result.ran(); });
  }

  /// The steps that were applied or are under way. Never waits.
  int64_t counted_steps() const { return counted_steps_; }

  /// Moves to where `steps` applied steps lead, as when a run is resumed.
  void set_applied_steps(int64_t steps) {
    under_way_.clear();
    counted_steps_ = steps;
    set_rates();
  }

 private:
  void set_rates() {
    auto& groups = optimizer_.param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      groups[i].options().set_lr(initial_rates_[i] * factor());
    }
  }

  double factor() const {
    const auto [warmup, total] = options_;
    if (counted_steps_ < warmup) {
      return static_cast<double>(counted_steps_ + 1) / static_cast<double>(warmup + 1);
    }
    return static_cast<double>(std::max<int64_t>(total - counted_steps_, 0)) /
           static_cast<double>(std::max<int64_t>(total - warmup, 1));
  }

  torch::optim::Optimizer& optimizer_;
  Options options_;
  std::vector<double> initial_rates_;
  int64_t counted_steps_ = 0;
  std::deque<mezzo::StepResult> under_way_;  ///< in their order; counted, and perhaps skipped
};

}  // namespace bert_ner
