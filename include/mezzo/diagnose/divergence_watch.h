/// \file
/// Is this run lost, and why? A writer for a Telemetry:
///
///     mezzo::Telemetry telemetry;
///     telemetry.write_to(mezzo::DivergenceWatch(*model, {.policy = mezzo::DivergencePolicy::stop}));
///     ...
///     telemetry.record(result, loss);                // each step, after scaler.update()
#pragma once

#include <mezzo/base/detail/dtype_names.h>
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
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What is most likely wrong, in the order in which it is asked.
enum class DivergenceCause : std::uint8_t {
  weights_not_finite,     ///< a parameter holds inf or NaN
  learning_rate,          ///< the loss doubled, or the weights' norm grew tenfold, since the start
  constant_out_of_range,  ///< a buffer holds what is not NaN or inf, and is in low_precision
  loss_not_finite,        ///< the loss itself, with weights and buffers that are fine
  one_layer,              ///< gradients are inf or NaN in one layer alone
  unknown,
};

/// That a run is lost, or about to be.
struct Divergence {
  TelemetryRecord record = {};  ///< of the step that showed it
  std::int64_t skips = 0;       ///< in a row, that step included
  std::optional<int> rank = std::nullopt;
  DivergenceCause cause = DivergenceCause::unknown;
  std::string evidence = {};  ///< what was seen: names and numbers

  /// What happened, the evidence, and what to do, in one line.
  std::string message() const;
};

/// What happens after a diagnosis.
enum class DivergencePolicy : std::uint8_t {
  keep_going,
  stop,  ///< c10::Error with the diagnosis, from `Telemetry::record` or `flush`
};

struct DivergenceOptions {
  std::int64_t skips_in_a_row = 10;  ///< so many are a sign
  double min_scale = 0.5;            ///< a step that is skipped at or below this scale is a sign
  at::ScalarType low_precision = at::kHalf;  ///< whose range buffers are held against
  DivergencePolicy policy = DivergencePolicy::keep_going;
  /// Hears the diagnosis in place of std::cerr, before a `stop`.
  std::function<void(const Divergence&)> callback = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

/// Watches for skips in a row, for a skip at a scale of `min_scale` or less, and for a loss that is
/// inf or NaN. Then it looks at weights, buffers and gradients, which waits for the device, and
/// tells what it found; in 1000 steps once at most. Until then a step costs a few comparisons on
/// the host.
///
/// Gradients are looked at as find_overflow does, and are a later step's where a device decides. A
/// constant that is no buffer, such as an eps or a mask made in `forward`, is not seen. In a job of
/// several each rank watches its own loss; one that stops alone leaves the others waiting.
class DivergenceWatch {
 public:
  /// Keeps the parameters and buffers, not the model. Reads the weights once, which
  /// waits for the device.
  /// \throws c10::Error unless skips_in_a_row is positive
  explicit DivergenceWatch(const torch::nn::Module& model, DivergenceOptions options = {});

  void operator()(const TelemetryRecord& record);

 private:
  void diagnose(Divergence& divergence) const;
  bool weights_are_bad(Divergence& divergence) const;
  bool rate_is_high(Divergence& divergence) const;
  bool constant_is_bad(Divergence& divergence) const;

  DivergenceOptions options_;
  NamedTensors parameters_, buffers_;
  double first_norm_;                             // of all weights, when the watch was made
  std::optional<double> first_loss_, last_loss_;  // that were finite
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;  // a step
};

#if !defined(MEZZO_LEFT_TO_LIBRARY) || defined(MEZZO_IN_LIBRARY_OF_DIAGNOSE)
namespace detail {

/// The 2-norm of all as one vector.
inline double norm_of_all(const NamedTensors& tensors) {
  std::vector<at::Tensor> norms;
  for (const auto& [name, tensor] : tensors) norms.push_back(norm_of(tensor.detach()));
  return norms.empty() ? 0 : stacked_on_host(std::move(norms)).norm().item<double>();
}

/// What to do, by cause.
inline constexpr std::array<const char*, 6> kRemedies = {
    "no step repairs it: load a checkpoint from before",
    "the learning rate is too high: load a checkpoint from before, try a tenth of the rate or a "
    "longer warmup",
    "make it -inf (a mask) or a number that the type holds, or run its op in float32",
    "weights and buffers are fine: look for a log of 0, a division by 0 or bad data",
    "run it in float32, inside an AutocastGuard with enabled = false",
    "compare_precisions says which ops are to blame; bfloat16 needs no loss scale"};

}  // namespace detail

MEZZO_INLINE std::string Divergence::message() const {
  const std::string where = rank ? c10::str("rank ", *rank, ", ") : std::string();
  std::string what = c10::str("Training diverges (", where, "step ", record.step, "; ", skips,
                              " skipped in a row; loss scale ", detail::number_text(record.scale));
  if (record.loss) what += "; loss " + detail::digits(*record.loss, 4);
  return what + "): " + evidence + "; " + detail::kRemedies.at(static_cast<std::size_t>(cause));
}

MEZZO_INLINE DivergenceWatch::DivergenceWatch(const torch::nn::Module& model,
                                              DivergenceOptions options)
    : options_(std::move(options)),
      parameters_(name_parameters(model)),
      buffers_(detail::NamedOnce().floating(model.named_buffers())),
      first_norm_(detail::norm_of_all(parameters_)) {
  TORCH_CHECK(options_.skips_in_a_row > 0, "DivergenceWatch: skips_in_a_row is ",
              options_.skips_in_a_row, "; it should be positive");
}

MEZZO_INLINE void DivergenceWatch::operator()(const TelemetryRecord& record) {
  constexpr std::int64_t kRarely = 1000;
  const bool is_lost = record.loss && detail::nonfinite_bits(*record.loss);
  skips_ = record.skipped ? skips_ + 1 : 0;
  if (record.loss && !is_lost) {
    if (!first_loss_) first_loss_ = record.loss;
    last_loss_ = record.loss;
  }
  const bool is_sign = is_lost || skips_ >= options_.skips_in_a_row ||
                       (record.skipped && record.scale <= options_.min_scale);
  if (!is_sign || record.step < quiet_until_) return;
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

MEZZO_INLINE void DivergenceWatch::diagnose(Divergence& divergence) const {
  const at::NoGradGuard no_grad;
  if (weights_are_bad(divergence) || rate_is_high(divergence) || constant_is_bad(divergence))
    return;
  if (divergence.record.loss && detail::nonfinite_bits(*divergence.record.loss)) {
    divergence.cause = DivergenceCause::loss_not_finite;
    divergence.evidence = "the loss itself is inf or NaN";
    return;
  }
  const Overflow overflow = find_overflow(parameters_, divergence.record.scale);
  const bool is_alone = overflow.overflowed_layers().size() == 1 && overflow.layers.size() > 1;
  if (is_alone) divergence.cause = DivergenceCause::one_layer;
  divergence.evidence = overflow.cause();
  if (options_.rank) {  // what ranks average has an inf on all of them
    divergence.evidence +=
        "; with OverflowReportOptions::own_gradients each rank says whether it "
        "was its own";
  }
}

MEZZO_INLINE bool DivergenceWatch::weights_are_bad(Divergence& divergence) const {
  const auto bad = std::find_if(parameters_.begin(), parameters_.end(), [](const auto& named) {
    return !named.second.isfinite().all().template item<bool>();
  });
  if (bad == parameters_.end()) return false;
  divergence.cause = DivergenceCause::weights_not_finite;
  divergence.evidence = bad->first + " holds inf or NaN";
  return true;
}

MEZZO_INLINE bool DivergenceWatch::rate_is_high(Divergence& divergence) const {
  const double now = detail::norm_of_all(parameters_);
  const bool loss_rose = first_loss_ && *last_loss_ > 2 * std::abs(*first_loss_);
  if (!loss_rose && !(now > 10 * first_norm_)) return false;
  divergence.cause = DivergenceCause::learning_rate;
  divergence.evidence = c10::str("since the start the norm of all weights went from ",
                                 detail::digits(first_norm_), " to ", detail::digits(now));
  if (first_loss_) {
    divergence.evidence +=
        c10::str(" and the loss, while it was finite, from ", detail::digits(*first_loss_), " to ",
                 detail::digits(*last_loss_));
  }
  return true;
}

MEZZO_INLINE bool DivergenceWatch::constant_is_bad(Divergence& divergence) const {
  for (const auto& [name, buffer] : buffers_) {
    const at::Tensor lowered = buffer.to(options_.low_precision);
    const at::Tensor is_bad = lowered.isfinite().logical_not().logical_and(buffer.isfinite());
    if (!is_bad.any().item<bool>()) continue;
    const double value = buffer.masked_select(is_bad)[0].item<double>();
    divergence.cause = DivergenceCause::constant_out_of_range;
    divergence.evidence =
        c10::str("the buffer ", name, " holds ", detail::digits(value), ", which is beyond ",
                 detail::dtype_name(options_.low_precision));
    return true;
  }
  return false;
}
#endif

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
