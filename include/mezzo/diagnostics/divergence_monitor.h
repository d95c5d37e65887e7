/// \file
/// DivergenceMonitor: reports a training run that no longer recovers, and what is not finite.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/named_parameters.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/diagnostics/step_metrics.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a DivergenceMonitor does with a finding.
enum class DivergenceAction : std::uint8_t {
  report,            ///< prints it, or calls the callback
  report_and_throw,  ///< `MetricsLogger::record` or `flush` throws c10::Error with it, after a
                     ///< pending trace of a TraceOnSkips in the same MetricsLogger
};

/// Options of a DivergenceMonitor.
struct DivergenceMonitorOptions {
  std::int64_t consecutive_skips = 10;  ///< number of skipped steps that triggers a finding
  double scale_threshold = 0.5;         ///< a skipped step at this loss scale or less triggers one
  DivergenceAction action = DivergenceAction::report;  ///< for each finding
  std::function<void(const Finding&)> callback =
      {};                                  ///< called with a finding, instead of std::cerr
  std::optional<int> rank = std::nullopt;  ///< of this process, printed with each finding
};

/// A MetricsLogger callback that reports divergence: consecutive skipped steps, a skipped step at
/// `scale_threshold` or less, or a loss that is inf or NaN. Then reads weights, buffers and
/// gradients, which synchronizes with the device, and reports what is not finite and what to try.
/// States a cause only for weights that were inf or NaN at construction: docs/debugging.md ("My
/// loss scale collapses") lists the findings. Reports at most once in 1000 steps.
///
/// If the step does not increase, the run was resumed from a checkpoint, and the next divergence is
/// reported at once. Gradients are read as by find_overflow, and on a GPU may be a later step's.
/// Each rank of a multi-process run monitors its own loss; a rank that throws alone leaves the
/// others waiting in their collectives.
class DivergenceMonitor {
 public:
  /// Keeps references to the parameters and buffers, not to `model`. Reads the weights once, which
  /// synchronizes with the device.
  /// \throws c10::Error unless consecutive_skips is positive
  explicit DivergenceMonitor(const torch::nn::Module& model, DivergenceMonitorOptions options = {})
      : options_(std::move(options)),
        parameters_(named_float_parameters(model)),
        buffers_(named_float_buffers(model)),
        was_nonfinite_(!detail::find_nonfinite(parameters_).empty()) {
    TORCH_CHECK(options_.consecutive_skips > 0,
                "DivergenceMonitor: consecutive_skips must be positive, but got ",
                options_.consecutive_skips);
  }

  /// Checks the metrics of a step; called by MetricsLogger.
  void operator()(const StepMetrics& metrics) {
    constexpr std::int64_t kMinStepsBetweenFindings = 1000;
    if (std::exchange(last_step_, metrics.step) >= metrics.step) skips_ = next_finding_step_ = 0;
    skips_ = metrics.skipped ? skips_ + 1 : 0;
    const bool diverges = has_nonfinite_loss(metrics) || skips_ >= options_.consecutive_skips ||
                          (metrics.skipped && metrics.scale <= options_.scale_threshold);
    if (!diverges || metrics.step < next_finding_step_) return;
    next_finding_step_ = metrics.step + kMinStepsBetweenFindings;
    const Finding finding = make_finding(metrics);
    const bool throws = options_.action == DivergenceAction::report_and_throw;
    if (options_.callback) {
      options_.callback(finding);
    } else if (!throws) {
      std::cerr << finding.message() + "\n";
    }
    TORCH_CHECK(!throws, finding.message());
  }

 private:
  static bool has_nonfinite_loss(const StepMetrics& metrics) {
    return metrics.loss && detail::is_nonfinite(*metrics.loss);
  }

  Finding make_finding(const StepMetrics& metrics) const {
    Finding finding{.severity = FindingSeverity::error, .check = "divergence"};
    finding.location =
        "Training diverges (" +
        (options_.rank ? "rank " + std::to_string(*options_.rank) + ", " : "") + "step " +
        std::to_string(metrics.step) + ", " + std::to_string(skips_) +
        (skips_ == 1 ? " skipped step" : " consecutive skipped steps") + ", loss scale " +
        detail::format_number(metrics.scale) +
        (metrics.loss ? ", loss " + detail::format_significant(*metrics.loss, 4) : "") + ")";
    const bool is_loss_nonfinite = has_nonfinite_loss(metrics);
    if (const std::string weight = detail::find_nonfinite(parameters_); !weight.empty()) {
      fill_weight_finding(finding, weight, is_loss_nonfinite && !metrics.skipped);
    } else if (const std::string buffer = detail::find_nonfinite(buffers_); !buffer.empty()) {
      finding.description = detail::describe_nonfinite_buffer(buffer);
    } else {
      finding.description =
          is_loss_nonfinite
              ? "the loss is inf or NaN, but all weights are finite"
              : "all weights are finite; " + find_overflow(parameters_, metrics.scale).message();
      finding.remedy =
          std::string(is_loss_nonfinite
                          ? "the cause is unknown: check this batch for log(0) and division by 0; "
                            "if its loss is finite in float32, use bfloat16; run it under an "
                            "AnomalyTrace, which reports the op"
                          : "the cause is unknown: use TraceOnSkips, which traces a step and "
                            "reports the op") +
          ". If the loss or the weights were growing, divide the learning rate by 10 until the "
          "loss decreases, or use a longer warmup, a momentum below 1, less weight decay or "
          "normalized inputs";
    }
    return finding;
  }

  void fill_weight_finding(Finding& finding, const std::string& weight,
                           bool applied_nonfinite_loss) const {
    finding.description = weight + " contains inf or NaN";
    if (was_nonfinite_) {
      finding.description += ", as the weights did when the DivergenceMonitor was constructed";
      finding.remedy = "later steps cannot restore it: initialize or load the weights again";
    } else if (applied_nonfinite_loss) {
      finding.description +=
          ", and so does the loss, whose step was applied; which came first is unknown";
      finding.remedy =
          "load an earlier checkpoint. Use a GradScaler, which skips steps with inf or NaN "
          "gradients (for bfloat16 with an init_scale of 1). If the weights then stay finite, "
          "check this batch for log(0) and division by 0; if not, check the learning rate and eps";
    } else {
      finding.description += "; what wrote it is unknown";
      finding.remedy =
          "later steps cannot restore it: load an earlier checkpoint. Check the learning rate, "
          "eps, the range of the weights' dtype, and direct writes to the weights";
    }
  }

  DivergenceMonitorOptions options_;
  TensorsByName parameters_;
  TensorsByName buffers_;
  bool was_nonfinite_;  // some weight, at construction
  std::int64_t last_step_ = 0;
  std::int64_t skips_ = 0;
  std::int64_t next_finding_step_ = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
