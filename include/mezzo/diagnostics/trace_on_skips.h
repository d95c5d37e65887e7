/// \file
/// TraceOnSkips: runs an AnomalyTrace after consecutive skipped steps.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/step_metrics.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of TraceOnSkips.
struct TraceOnSkipsOptions {
  std::int64_t consecutive_skips = 3;  ///< number that starts a trace
  AnomalyTraceOptions trace = {};      ///< of the trace
  std::ostream* stream = &std::cerr;   ///< receives the trace; null for none; must outlive this
  std::function<void(const AnomalyTrace&)> callback = {};  ///< called with the finished trace
};

/// A MetricsLogger callback that traces the step after `consecutive_skips` skipped steps with an
/// AnomalyTrace, and prints the trace, also if no op produced inf or NaN. The trace ends with the
/// first metrics that arrive after a backward pass. Traces at most one step in 1000. A process with
/// a nonzero `trace.rank` prints only if an anomaly was found. Several may trace the same step.
class TraceOnSkips {
 public:
  /// `model` must outlive this.
  /// \throws c10::Error unless consecutive_skips is positive
  explicit TraceOnSkips(const torch::nn::Module& model, TraceOnSkipsOptions options = {})
      : model_(&model), options_(std::move(options)) {
    TORCH_CHECK(options_.consecutive_skips > 0,
                "TraceOnSkips: consecutive_skips must be positive, but got ",
                options_.consecutive_skips);
  }

  /// Starts or finishes a trace; called by MetricsLogger after each step.
  void operator()(const StepMetrics& metrics) {
    constexpr std::int64_t kMinStepsBetweenTraces = 1000;
    skips_ = metrics.skipped ? skips_ + 1 : 0;
    last_step_ = metrics.step;
    if (trace_ == nullptr) {
      if (skips_ < options_.consecutive_skips || metrics.step < next_trace_step_) return;
      trace_ = std::make_shared<AnomalyTrace>(*model_, options_.trace);
      return;
    }
    if (!trace_->has_run_backward()) return;  // metrics of an earlier step, delivered late
    const std::shared_ptr<AnomalyTrace> finished = std::exchange(trace_, nullptr);
    next_trace_step_ = metrics.step + kMinStepsBetweenTraces;
    const bool is_rank_0 = options_.trace.rank.value_or(0) == 0;
    if (options_.stream != nullptr && (is_rank_0 || !finished->anomalies().empty())) {
      *options_.stream << "Traced a step after " + std::to_string(options_.consecutive_skips) +
                              " consecutive skipped steps: "
                       << *finished << std::flush;
    }
    if (options_.callback) options_.callback(*finished);
  }

  /// Returns whether a trace is in progress, or will start if the next steps are skipped too.
  bool is_pending() const {
    return trace_ != nullptr ||
           (skips_ > 0 && skips_ < options_.consecutive_skips && last_step_ >= next_trace_step_);
  }

 private:
  const torch::nn::Module* model_;
  TraceOnSkipsOptions options_;
  std::int64_t skips_ = 0;
  std::int64_t last_step_ = 0;
  std::int64_t next_trace_step_ = 0;
  std::shared_ptr<AnomalyTrace> trace_;  // in progress
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
