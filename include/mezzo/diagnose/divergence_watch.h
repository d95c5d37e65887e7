/// \file
/// DivergenceWatch says when a run is lost, and what was not finite.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>
#include <mezzo/diagnose/names.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What happens after a diagnosis.
enum class DivergencePolicy : std::uint8_t {
  keep_going,
  stop,  ///< c10::Error with the diagnosis, from `Telemetry::record` or `flush`
};

/// What a DivergenceWatch takes for a sign, and what follows.
struct DivergenceOptions {
  std::int64_t skips_in_a_row = 10;  ///< so many are a sign
  double min_scale = 0.5;            ///< a step that is skipped at or below this scale is a sign
  DivergencePolicy policy = DivergencePolicy::keep_going;  ///< what follows a diagnosis
  /// Called with the diagnosis, in place of std::cerr, before a `stop`.
  std::function<void(const Finding&)> callback = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

/// A writer for a Telemetry. Watches for skips in a row, for a skip at a scale of `min_scale` or
/// less, and for a loss that is inf or NaN. After such a sign it reads weights and gradients, which
/// waits for the device, and tells what is not finite, at most once in 1000 steps. Other steps cost
/// a few comparisons.
///
/// The watch names what it saw and what to try next. It claims a cause only of a weight that was
/// inf or NaN from the start: a record comes after its step, and a step that was not skipped has
/// carried an inf or NaN of its loss into the weights by then. An AnomalyTrace of the step names
/// the op.
///
/// A record whose step is not above the last one's is that of a run that went back to a checkpoint:
/// the watch may report again at once. Gradients are read as find_overflow does, and are a later
/// step's where a device decides. In a job of several each rank watches its own loss; one that
/// stops alone leaves the others waiting.
class DivergenceWatch {
 public:
  /// Keeps the parameters, not the model. Reads the weights once, which waits for the device.
  /// \throws c10::Error unless skips_in_a_row is positive
  explicit DivergenceWatch(const torch::nn::Module& model, DivergenceOptions options = {})
      : options_(std::move(options)),
        parameters_(name_parameters(model)),
        began_bad_(!bad_weight().empty()) {
    TORCH_CHECK(options_.skips_in_a_row > 0, "DivergenceWatch: skips_in_a_row is ",
                options_.skips_in_a_row, "; it should be positive");
  }

  /// Looks at the record of a step.
  void operator()(const TelemetryRecord& record) {
    constexpr std::int64_t kRarely = 1000;
    if (std::exchange(last_step_, record.step) >= record.step) skips_ = quiet_until_ = 0;
    skips_ = record.skipped ? skips_ + 1 : 0;
    const bool is_sign = is_lost(record) || skips_ >= options_.skips_in_a_row ||
                         (record.skipped && record.scale <= options_.min_scale);
    if (!is_sign || record.step < quiet_until_) return;
    quiet_until_ = record.step + kRarely;
    const Finding finding = diagnose(record);
    const bool stops = options_.policy == DivergencePolicy::stop;
    if (options_.callback) {
      options_.callback(finding);
    } else if (!stops) {
      std::cerr << finding.message() + "\n";
    }
    TORCH_CHECK(!stops, finding.message());
  }

 private:
  static bool is_lost(const TelemetryRecord& record) {
    return record.loss && detail::nonfinite_bits(*record.loss);
  }

  /// Returns the name of the first parameter that holds inf or NaN; empty if there is none.
  std::string bad_weight() const {
    for (const auto& [name, parameter] : parameters_) {
      if (!parameter.isfinite().all().item<bool>()) return name;
    }
    return {};
  }

  Finding diagnose(const TelemetryRecord& record) const {
    Finding finding{.severity = FindingSeverity::error, .topic = "divergence"};
    finding.where = "Training diverges (" +
                    (options_.rank ? "rank " + std::to_string(*options_.rank) + ", " : "") +
                    "step " + std::to_string(record.step) + "; " + std::to_string(skips_) +
                    " skipped in a row; loss scale " + detail::number_text(record.scale) +
                    (record.loss ? "; loss " + detail::digits(*record.loss, 4) : "") + ")";
    const std::string bad = bad_weight();
    if (!bad.empty() && began_bad_) {
      finding.reason = bad + " holds inf or NaN, and the weights did when the watch was made";
      finding.remedy = "no step repairs it: initialise or load it again";
    } else if (!bad.empty() && is_lost(record) && !record.skipped) {
      finding.reason = bad +
                       " holds inf or NaN and so is the loss, whose step was applied; which was "
                       "first is not known";
      finding.remedy =
          "load a checkpoint from before, and step through a GradScaler, which skips a step whose "
          "gradients are inf or NaN (in bfloat16 with an init_scale of 1): if the weights stay "
          "finite, look at this batch, and for a log or a division of 0; if not, look at the "
          "learning rate and eps";
    } else if (!bad.empty()) {
      finding.reason = bad + " holds inf or NaN; what wrote it is not known";
      finding.remedy =
          "no step repairs it: load a checkpoint from before, and look at the learning rate, eps, "
          "the range of the weights' dtype, and writes by hand";
    } else {
      finding.reason = is_lost(record) ? "the loss is inf or NaN, computed from finite weights"
                                       : "the weights are finite; " +
                                             find_overflow(parameters_, record.scale).cause();
      finding.remedy =
          is_lost(record)
              ? "why is not known: look at this batch, for a log or a division of 0, and in half "
                "for a number beyond its range, which is so if the batch has a finite loss in "
                "float32: then use bfloat16; an AnomalyTrace around this batch names the op"
              : "why is not known: an AnomalyWatch traces a step and names the op, and whether a "
                "wider type holds its result";
      finding.remedy +=
          "; if the loss or the weights grew before, divide the learning rate by 10 until the loss "
          "falls, lengthen the warm-up, or take a momentum below 1, less weight decay, or inputs "
          "of about 1";
    }
    return finding;
  }

  DivergenceOptions options_;
  NamedTensors parameters_;
  bool began_bad_;
  std::int64_t last_step_ = 0;
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;  // a step
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
