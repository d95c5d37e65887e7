/// \file
/// DivergenceWatch, a writer for a Telemetry, says when a run is lost, and why:
///
///     mezzo::Telemetry telemetry;
///     telemetry.write_to(mezzo::DivergenceWatch(*model, {.policy = mezzo::DivergencePolicy::stop}));
///     ...
///     telemetry.record(result, loss);                // each step, after scaler.update()
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/host_numbers.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What was not finite first, or its cause where the evidence decides.
enum class DivergenceCause : std::uint8_t {
  weights_not_finite,  ///< a parameter holds inf or NaN, and no loss before it did
  updates_too_large,   ///< loss and weights grew together, or the weights alone beyond measure
  loss_not_finite,     ///< the loss, computed from finite weights; the message names the suspects
  unknown,             ///< gradients, from a finite loss; the message names what decides
};

/// A run that is lost, or about to be.
struct Divergence {
  TelemetryRecord record = {};                       ///< of the step that showed it
  std::int64_t skips = 0;                            ///< in a row, that step included
  std::optional<int> rank = std::nullopt;            ///< of DivergenceOptions
  DivergenceCause cause = DivergenceCause::unknown;  ///< what was not finite first
  std::string evidence = {};                         ///< what was seen: names and numbers
  std::string remedy = {};  ///< what to do, or what to try next where the cause is not known

  /// What happened, the evidence, and what to do, in one line.
  std::string message() const;
};

/// What happens after a diagnosis.
enum class DivergencePolicy : std::uint8_t {
  keep_going,
  stop,  ///< c10::Error with the diagnosis, from `Telemetry::record` or `flush`
};

/// What a DivergenceWatch takes for a sign, and what follows.
struct DivergenceOptions {
  std::int64_t skips_in_a_row = 10;  ///< so many are a sign
  double min_scale = 0.5;            ///< a step that is skipped at or below this scale is a sign
  /// The dtype that autocast lowers to. Unset: float16 in a run that scales its loss or holds
  /// parameters of float16, and otherwise none whose range matters.
  std::optional<at::ScalarType> low_precision = std::nullopt;
  DivergencePolicy policy = DivergencePolicy::keep_going;  ///< what follows a diagnosis
  /// Called with the diagnosis, in place of std::cerr, before a `stop`.
  std::function<void(const Divergence&)> callback = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

/// Watches for skips in a row, for a skip at a scale of `min_scale` or less, and for a loss that is
/// inf or NaN. After such a sign it reads weights, buffers and gradients, which waits for the
/// device, and reports what it found, at most once in 1000 steps. A step whose loss is above all
/// before costs a norm of the weights, for which nothing waits; other steps cost a few comparisons
/// on the host.
///
/// A record comes after its step. A step that was not skipped has written an inf or NaN of its loss
/// into the weights by then, so the watch compares with the step before to tell which came first.
/// The watch names a cause only where the evidence excludes the others, and otherwise what to try:
/// most often an AnomalyTrace of the step, which names the op.
///
/// If a record's step is not above the last one's of its name, the run was rolled back to a
/// checkpoint that holds the Telemetry. The watch then forgets skips and losses, and may report
/// again at once.
///
/// Gradients are read as find_overflow does, and are a later step's where a device decides. In a
/// job of several each rank watches its own loss; one that stops alone leaves the others waiting.
class DivergenceWatch {
 public:
  /// Keeps the parameters and buffers, not the model. Reads the weights once, which
  /// waits for the device.
  /// \throws c10::Error unless skips_in_a_row is positive
  explicit DivergenceWatch(const torch::nn::Module& model, DivergenceOptions options = {});

  /// Looks at the record of a step.
  void operator()(const TelemetryRecord& record);

 private:
  void forget_run();
  void note_loss(double loss);
  void diagnose(Divergence& divergence) const;
  bool weights_are_bad(Divergence& divergence) const;
  bool updates_are_large(Divergence& divergence) const;
  void blame_loss(Divergence& divergence) const;
  bool uses_half() const;
  std::string bad_weight() const;
  std::string beyond_half() const;

  DivergenceOptions options_;
  NamedTensors parameters_, buffers_;
  double first_norm_;                               // of all weights, when the watch was made
  std::vector<std::string> first_beyond_half_;      // names, when the watch was made
  double elements_ = 0;                             // of all weights
  std::map<std::string, std::int64_t> last_steps_;  // of each name
  std::optional<TelemetryRecord> before_;           // the record before this one
  std::optional<double> first_loss_, last_loss_;    // that were finite
  double highest_loss_ = 0;                         // of all that were finite
  double loss_before_rise_ = 0;                     // the highest before the rise that goes on now
  std::int64_t rises_ = 0;  // finite losses in a row that are each above all before
  std::vector<at::Tensor> rise_began_, rise_ended_;  // norms of the weights at two of these
  bool scales_loss_ = false;                         // whether a loss scale other than 1 was seen
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;  // a step
};

#if !defined(MEZZO_LEFT_TO_LIBRARY) || defined(MEZZO_IN_LIBRARY_OF_DIAGNOSE)
namespace detail {

/// The 2-norms, each on its device.
inline std::vector<at::Tensor> norms_of(const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& [name, tensor] : tensors) norms.push_back(norm_of(tensor));
  return norms;
}

/// The 2-norm of all tensors of these norms, as one vector.
inline double norm_of_all(std::vector<at::Tensor> norms) {
  return norms.empty() ? 0 : stacked_on_host(std::move(norms)).norm().item<double>();
}

/// A finite value of `tensor` that float16 makes inf; none if there is none.
inline std::optional<double> value_beyond_half(const at::Tensor& tensor) {
  constexpr double kHalfOverflow = 65520;  // the least magnitude that rounds to inf
  const at::Tensor is_bad = tensor.abs().ge(kHalfOverflow).logical_and(tensor.isfinite());
  if (tensor.numel() == 0 || !is_bad.any().item<bool>()) return std::nullopt;
  return tensor.masked_select(is_bad)[0].item<double>();
}

/// Whether a loss was recorded that is inf or NaN.
inline bool lost_its_loss(const TelemetryRecord& record) {
  return record.loss && nonfinite_bits(*record.loss);
}

}  // namespace detail

MEZZO_INLINE std::string Divergence::message() const {
  const std::string where = rank ? c10::str("rank ", *rank, ", ") : std::string();
  std::string what = c10::str("Training diverges (", where, "step ", record.step, "; ", skips,
                              " skipped in a row; loss scale ", detail::number_text(record.scale));
  if (record.loss) what += "; loss " + detail::digits(*record.loss, 4);
  return what + "): " + evidence + "; " + remedy;
}

MEZZO_INLINE DivergenceWatch::DivergenceWatch(const torch::nn::Module& model,
                                              DivergenceOptions options)
    : options_(std::move(options)),
      parameters_(name_parameters(model)),
      buffers_(detail::NamedOnce().floating(model.named_buffers())),
      first_norm_(detail::norm_of_all(detail::norms_of(parameters_))) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : parameters_) {
    elements_ += static_cast<double>(parameter.numel());
  }
  for (const NamedTensors* tensors : {&parameters_, &buffers_}) {
    for (const auto& [name, tensor] : *tensors) {
      if (detail::value_beyond_half(tensor)) first_beyond_half_.push_back(name);
    }
  }
  TORCH_CHECK(options_.skips_in_a_row > 0, "DivergenceWatch: skips_in_a_row is ",
              options_.skips_in_a_row, "; it should be positive");
}

/// Forgets everything but the weights that were seen when the watch was made. Losses of a run that
/// was given up would hide the next rise, and its diagnosis would silence the next one.
MEZZO_INLINE void DivergenceWatch::forget_run() {
  last_steps_.clear();
  before_.reset();
  first_loss_.reset();
  last_loss_.reset();
  rises_ = 0;
  skips_ = 0;
  quiet_until_ = 0;
}

MEZZO_INLINE void DivergenceWatch::note_loss(double loss) {
  if (!first_loss_) {
    first_loss_ = loss;
    highest_loss_ = loss_before_rise_ = loss;
  } else if (loss > highest_loss_) {
    highest_loss_ = loss;
    rise_ended_ = detail::norms_of(parameters_);
    if (++rises_ == 1) rise_began_ = rise_ended_;
  } else if (loss < highest_loss_) {  // an equal one is that of a skipped step, repeated
    loss_before_rise_ = highest_loss_;
    rises_ = 0;
  }
  last_loss_ = loss;
}

MEZZO_INLINE void DivergenceWatch::operator()(const TelemetryRecord& record) {
  constexpr std::int64_t kRarely = 1000;
  const bool is_lost = detail::lost_its_loss(record);
  if (before_ && before_->name != record.name) before_.reset();  // another model's
  const auto last = last_steps_.find(record.name);
  if (last != last_steps_.end() && record.step <= last->second) forget_run();
  last_steps_[record.name] = record.step;
  skips_ = record.skipped ? skips_ + 1 : 0;
  scales_loss_ = scales_loss_ || record.scale != 1;
  if (record.loss && !is_lost) note_loss(*record.loss);
  const bool is_sign = is_lost || skips_ >= options_.skips_in_a_row ||
                       (record.skipped && record.scale <= options_.min_scale);
  if (is_sign && record.step >= quiet_until_) {
    quiet_until_ = record.step + kRarely;
    Divergence divergence{.record = record, .skips = skips_, .rank = options_.rank};
    diagnose(divergence);
    if (options_.callback) {
      options_.callback(divergence);
    } else if (options_.policy == DivergencePolicy::keep_going) {
      std::cerr << divergence.message() + "\n";
    }
    TORCH_CHECK(options_.policy != DivergencePolicy::stop, divergence.message());
  }
  before_ = record;
}

MEZZO_INLINE void DivergenceWatch::diagnose(Divergence& divergence) const {
  const at::NoGradGuard no_grad;
  if (updates_are_large(divergence) || weights_are_bad(divergence)) return;
  if (detail::lost_its_loss(divergence.record)) {
    blame_loss(divergence);
    return;
  }
  divergence.evidence =
      "the weights are finite; " + find_overflow(parameters_, divergence.record.scale).cause();
  if (uses_half()) divergence.evidence += beyond_half();
  if (options_.rank) {  // what ranks average has an inf on all of them
    divergence.evidence +=
        "; with OverflowReportOptions::own_gradients each rank says whether it was its own";
  }
  divergence.remedy =
      "why is not known: an AnomalyWatch traces a step and names the op, and whether a wider type "
      "holds its result";
}

/// The name of the first parameter that holds inf or NaN; empty if there is none.
MEZZO_INLINE std::string DivergenceWatch::bad_weight() const {
  for (const auto& [name, parameter] : parameters_) {
    if (!parameter.isfinite().all().item<bool>()) return name;
  }
  return {};
}

/// Compares with the step before. A step that was applied in spite of an inf or NaN in its loss has
/// carried it into the weights, or the weights had it before and gave it to the loss.
MEZZO_INLINE bool DivergenceWatch::weights_are_bad(Divergence& divergence) const {
  const std::string bad = bad_weight();
  if (bad.empty()) return false;
  const bool were_bad = detail::nonfinite_bits(first_norm_);
  const bool lost_before = before_ && detail::lost_its_loss(*before_);
  const bool ran_before = before_ && !before_->skipped;
  const bool broke_before =
      ran_before && before_->grad_norm && detail::nonfinite_bits(*before_->grad_norm);
  // A GradScaler skips a step whose gradients are not finite.
  const bool was_fine = ran_before && !lost_before && (before_->grad_norm || scales_loss_);
  const TelemetryRecord& record = divergence.record;
  divergence.evidence = bad + " holds inf or NaN";
  if (!were_bad && !record.skipped && !lost_before && !broke_before &&
      detail::lost_its_loss(record)) {
    divergence.evidence +=
        " and so is the loss, whose step was applied; which was first is not known";
    divergence.remedy =
        "load a checkpoint from before, and step through a GradScaler, which skips a step whose "
        "gradients are inf or NaN (in bfloat16 with an init_scale of 1): if the weights stay "
        "finite, look at this batch, and for a log or a division of 0; if not, look at the "
        "learning rate and eps";
    return true;
  }
  divergence.cause = DivergenceCause::weights_not_finite;
  divergence.remedy = were_bad ? "no step repairs it: initialise or load it again"
                               : "no step repairs it: load a checkpoint from before";
  if (were_bad) {
    divergence.evidence += "; the weights were not finite when the watch was made";
  } else if (broke_before) {
    divergence.evidence += c10::str("; the gradients of step ", before_->step,
                                    " were not finite, and that step was applied");
  } else if (was_fine) {
    divergence.evidence += c10::str("; the gradients of step ", before_->step,
                                    " were finite: an update made them, or a write by hand");
    divergence.remedy +=
        ", and look at the learning rate, eps, and the range of the weights' dtype";
  }
  return true;
}

/// Growth of the loss alone may come from the batches, and growth of the weights alone from a small
/// initialisation. Weights that grew threefold, the root of the loss's rise, meanwhile, or weights
/// of a size that no training wants, show updates that are too large. What makes them so (mostly
/// the learning rate) the numbers do not show.
MEZZO_INLINE bool DivergenceWatch::updates_are_large(Divergence& divergence) const {
  constexpr std::int64_t kRise = 3;     // losses in a row, each above all before; tenfold in all
  constexpr double kLargeWeights = 10;  // root mean square
  if (detail::nonfinite_bits(first_norm_)) return false;
  // Inf where float cannot hold it; of no use where an inf or NaN of the loss has reached the
  // weights, by a step that was applied.
  const double now = detail::norm_of_all(detail::norms_of(parameters_));
  const bool is_known = bad_weight().empty();
  const double risen = is_known ? now : detail::norm_of_all(rise_ended_);
  const bool loss_rose = rises_ >= kRise && *last_loss_ > 10 * std::abs(loss_before_rise_) &&
                         risen > 3 * detail::norm_of_all(rise_began_);
  const bool loss_fell = first_loss_ && *last_loss_ < *first_loss_;
  const bool is_vast = is_known && now > 10 * first_norm_ && !loss_fell &&
                       now > kLargeWeights * std::sqrt(elements_);
  if (!is_vast && !loss_rose) return false;
  divergence.cause = DivergenceCause::updates_too_large;
  divergence.remedy =
      "the updates are too large: load a checkpoint from before, and divide the learning rate by "
      "10 until the loss falls, or lengthen the warmup; if no rate helps, it takes a momentum "
      "below 1, less weight decay, or inputs of about 1";
  if (is_known) {
    divergence.evidence = c10::str("since the start the norm of all weights went from ",
                                   detail::digits(first_norm_), " to ", detail::digits(now));
  }
  if (first_loss_) {
    divergence.evidence +=
        c10::str(is_known ? " and " : "", "the loss, while it was finite, went from ",
                 detail::digits(*first_loss_), " to ", detail::digits(*last_loss_));
    if (rises_ >= kRise) divergence.evidence += c10::str(", rising in ", rises_, " steps on end");
  }
  return true;
}

MEZZO_INLINE bool DivergenceWatch::uses_half() const {
  if (options_.low_precision) return *options_.low_precision == at::kHalf;
  return scales_loss_ || std::any_of(parameters_.begin(), parameters_.end(), [](const auto& named) {
           return named.second.scalar_type() == at::kHalf;
         });
}

/// Weights and buffers that float16 makes inf. Whether an op reads them in float16 is not known
/// here; but one that held such a value when the watch was made has let a loss be finite since.
MEZZO_INLINE std::string DivergenceWatch::beyond_half() const {
  std::string found;
  const auto look_at = [&](const char* kind, const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) {
      const bool was_there = std::find(first_beyond_half_.begin(), first_beyond_half_.end(),
                                       name) != first_beyond_half_.end();
      if (was_there && first_loss_) continue;
      const std::optional<double> value = detail::value_beyond_half(tensor);
      if (!value) continue;
      found += c10::str("; the ", kind, name, " holds ", detail::digits(*value),
                        ", which is inf where an op reads it in float16");
    }
  };
  look_at("weight ", parameters_);
  look_at("buffer ", buffers_);
  return found;
}

MEZZO_INLINE void DivergenceWatch::blame_loss(Divergence& divergence) const {
  divergence.cause = DivergenceCause::loss_not_finite;
  divergence.evidence = "the loss is inf or NaN, computed from finite weights";
  if (before_ && before_->loss && !detail::lost_its_loss(*before_)) {
    divergence.evidence += "; the loss of the step before was " + detail::digits(*before_->loss);
  }
  divergence.remedy = "why is not known: look at this batch, and for a log or a division of 0; ";
  if (uses_half()) {
    divergence.evidence += beyond_half();
    divergence.remedy +=
        "or a number is beyond float16 in the forward pass, which is so if the batch has a finite "
        "loss in float32: then use bfloat16, or float32 for that op; ";
  }
  divergence.remedy += "an AnomalyTrace around this batch names the op";
}

#endif
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
