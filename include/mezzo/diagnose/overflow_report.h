/// \file
/// What gradients and weights show of a run: OverflowReport, why was that step skipped;
/// UnderflowReport, would these numbers survive in a low type; DivergenceWatch, is the run lost.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/summarize.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One parameter whose gradient is not finite, with the gradient's summary.
struct OverflowedParameter : TensorSummary {
  std::vector<std::int64_t> first = {};  ///< index of the first that is inf or NaN
  double value = 0;                      ///< which it is: inf, -inf or NaN
  /// Whether the gradient is finite, and inf after division by a loss scale below 1. False where
  /// `unscale_` has divided already.
  bool by_unscaling = false;
};

namespace detail {

/// Returns the name of the first tensor that holds inf or NaN; empty if there is none. Waits for
/// the device.
inline std::string name_of_nonfinite(const TensorsByName& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (is_readable(tensor) && !ordered_values(tensor).isfinite().all().item<bool>()) return name;
  }
  return {};
}

inline std::string bad_buffer_reason(const std::string& name) {
  return "the buffer " + name +
         " holds inf or NaN: a forward pass wrote it, whose step may have been skipped, and no "
         "later "
         "step repairs it: load it from a checkpoint, or reset it";
}

}  // namespace detail

/// What the gradients of a skipped step look like.
struct Overflow {
  SkippedStep step = {};  ///< what the GradScaler told of the step
  /// The one that the model registers last comes first. A backward pass comes from there, so that
  /// it is most often where the inf or NaN was first.
  std::vector<OverflowedParameter> parameters = {};
  std::int64_t layers = 0;             ///< how many modules have gradients of their own
  std::int64_t overflowed_layers = 0;  ///< how many of them are those of `parameters`
  std::string bad_buffer = {};  ///< name of the model's first buffer with inf or NaN; empty: none

  /// Returns one line without an end; also where there is nothing to be seen any more, and why.
  std::string cause() const {
    using std::to_string;
    if (!bad_buffer.empty()) return detail::bad_buffer_reason(bad_buffer);
    if (parameters.empty()) {
      return "no gradient is inf or NaN now: they were set to zero with the step, or are a later "
             "step's, as on a device; call find_overflow after the step, before they are cleared";
    }
    const OverflowedParameter& first = parameters.front();
    const std::size_t others = parameters.size() - 1;
    std::string bad = first.infs > 0 ? to_string(first.infs) + " inf" : "";
    if (first.nans > 0) bad += (bad.empty() ? "" : " and ") + to_string(first.nans) + " NaN";
    return first.name + (others > 0 ? " and " + to_string(others) + " more" : "") + ", in " +
           to_string(overflowed_layers) + " of " + to_string(layers) + " layers: " + first.name +
           " has " + bad + " in " + to_string(first.count) + " gradients, the first, " +
           detail::number_text(first.value) + ", at index " + detail::sizes_text(first.first) +
           ", " +
           (first.by_unscaling ? "made by dividing by a loss scale below 1"
                               : "found after the backward pass");
  }
};

/// Reads the gradients that `parameters` have now; waits for the device. Writes nothing.
/// \param loss_scale  that the gradients carry, or carried
inline Overflow find_overflow(const TensorsByName& parameters, double loss_scale = 1) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;  // of a sparse gradient its rows
  for (const auto& [name, parameter] : parameters) {
    at::Tensor gradient = parameter.grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.coalesce();
    all.push_back(detail::is_readable(gradient) ? detail::ordered_values(gradient) : at::Tensor());
  }
  std::vector<TensorSummary> summaries = summarize(all);
  const bool by_unscaling = loss_scale < 1 && detail::all_finite(summaries);
  if (by_unscaling) {
    for (at::Tensor& values : all) {
      if (!values.defined()) continue;
      const auto wide = c10::promoteTypes(values.scalar_type(), at::kFloat);
      values = values.to(at::kDouble).div(loss_scale).to(wide);
    }
    summaries = summarize(all);
  }
  Overflow overflow;
  std::set<std::string> layers, overflowed;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const auto& [name, parameter] = parameters[i];
    TensorSummary& summary = summaries[i];
    if (summary.count == 0) continue;
    layers.insert(detail::layer_name(name));
    if (summary.is_finite()) continue;
    overflowed.insert(detail::layer_name(name));
    summary.name = name;
    summary.sizes = parameter.grad().sizes().vec();
    const at::Tensor is_bad = all[i].isfinite().logical_not();
    at::Tensor first = is_bad.nonzero()[0].cpu().contiguous();
    if (parameter.grad().is_sparse()) {  // from the row among those that there are
      const at::Tensor rows = parameter.grad().coalesce().indices().cpu();
      first = at::cat({rows.select(1, first[0].item<int64_t>()), first.slice(0, 1)});
    }
    const auto* const index = first.const_data_ptr<int64_t>();
    overflow.parameters.push_back({summary,
                                   {index, index + first.numel()},
                                   all[i].masked_select(is_bad)[0].item<double>(),
                                   by_unscaling});
  }
  overflow.layers = static_cast<std::int64_t>(layers.size());
  overflow.overflowed_layers = static_cast<std::int64_t>(overflowed.size());
  return overflow;
}

/// Options of an OverflowReport: who is told.
struct OverflowReportOptions {
  std::ostream* stream = &std::cerr;  ///< gets two lines; null: none. Lives as long as the report
  std::function<void(const Overflow&)> callback = {};  ///< called with each skip that is told
};

/// For `GradScaler::on_skip`. One report takes all models that a scaler serves, and names their
/// parameters "generator.0.weight": two reports would write each skip twice.
///
///     scaler.on_skip(mezzo::OverflowReport(*model));
///     scaler.on_skip(mezzo::OverflowReport({{"generator", *g}, {"discriminator", *d}}));
///
/// Prints as often as the scaler alone does: for each of the first ten skips in a row, for the
/// eleventh with advice, and then for every 1000th; at min_scale for the first and every 1000th.
/// If a buffer of a model holds inf or NaN, such as the running mean of a batch norm, the report
/// names that buffer instead of gradients: no step repairs it.
///
/// A report sees what `.grad` holds when the scaler tells of the skip, at `update`: zero with
/// StepOptions::zero_grad, and a later step's on a device. docs/diagnosis.md ("Why was that step
/// skipped?") has a loop that asks at the very step. Ranks that average their gradients all have
/// the same ones: let one write, with `{.stream = rank == 0 ? &std::cerr : nullptr}`.
class OverflowReport {
 public:
  /// Keeps the parameters, not the model. Parameters that are registered later are not seen.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {})
      : parameters_(name_parameters(model)),
        buffers_(named_float_buffers(model)),
        options_(std::move(options)) {}
  /// Keeps the parameters of several models, under the models' names.
  explicit OverflowReport(const std::vector<NamedModel>& models, OverflowReportOptions options = {})
      : parameters_(name_parameters(models)),
        buffers_(named_float_buffers(models)),
        options_(std::move(options)) {}

  /// Reads the gradients of a skipped step; for GradScaler::on_skip.
  void operator()(const SkippedStep& step) {
    const std::string message = detail::limited_skip_message(step);
    if (message.empty() || (options_.stream == nullptr && !options_.callback)) return;
    Overflow overflow = find_overflow(parameters_, step.scale);
    overflow.step = step;
    overflow.bad_buffer = detail::name_of_nonfinite(buffers_);
    if (options_.stream != nullptr)
      *options_.stream << message + "\n  " + overflow.cause() + "\n" << std::flush;
    if (options_.callback) options_.callback(overflow);
  }

 private:
  TensorsByName parameters_;
  TensorsByName buffers_;
  OverflowReportOptions options_;
};

/// One layer's sampled values; shares are of all of them, from 0 to 1.
struct LayerExponents {
  std::string layer;         ///< its name, as given to `add`
  std::int64_t sampled = 0;  ///< how many values were counted
  double zero = 0;           ///< zero already
  double lost = 0;           ///< not zero, but nearer to zero than to the smallest subnormal number
  double subnormal = 0;      ///< held with fewer bits than others
  double overflow = 0;       ///< finite, but inf in the type
  double non_finite = 0;     ///< inf or NaN already
  /// The exponent e, 2^e <= |value| < 2^(e + 1), of the smallest finite value that is not zero.
  std::optional<int> smallest = std::nullopt;
  std::optional<int> largest = std::nullopt;  ///< that of the largest
};

/// What an UnderflowReport samples.
struct UnderflowOptions {
  double loss_scale = 1;        ///< that the values carry; only suggest_loss_scale wants to know
  std::int64_t samples = 8192;  ///< at most so many values of a tensor, evenly spread
};

/// Counts sampled values by exponent, layer by layer, against the range of a low type. Values may
/// be of any floating dtype. Values that were in the low type before, as gradients of float32
/// weights under autocast were, have lost what it does not hold already, and count as zero.
///
///     mezzo::UnderflowReport gradients(torch::kHalf, {.loss_scale = scaler.get_scale()});
///     gradients.add_gradients(*model);                  // after backward, before the step
///     std::cout << gradients << mezzo::suggest_loss_scale(gradients);
class UnderflowReport {
 public:
  /// \throws c10::Error for a dtype without an ExponentRange, or options that are not positive
  explicit UnderflowReport(at::ScalarType dtype, const UnderflowOptions& options = {})
      : dtype_(dtype), options_(options), range_(ExponentRange::of(dtype)) {
    TORCH_CHECK(options.samples > 0, "UnderflowReport: samples is ", options.samples,
                "; it should be positive");
    TORCH_CHECK(detail::is_above(options.loss_scale, 0), "UnderflowReport: loss_scale is ",
                options.loss_scale, "; it should be positive, as scaler.get_scale() is");
  }

  /// Counts some of `values`: an activation, a gradient. Calls for the same layer add up. Waits for
  /// the device.
  void add(const std::string& layer, const at::Tensor& values) {
    if (!values.defined() || values.numel() == 0) return;
    TORCH_CHECK(values.is_floating_point(), "UnderflowReport::add: ", layer, " is ",
                detail::describe(values), "; give it values of a floating dtype");
    const at::NoGradGuard no_grad;
    const at::Tensor dense = values.is_sparse() ? values.detach().to_dense() : values.detach();
    const at::Tensor flat = dense.reshape({-1});
    // An odd stride, so that it does not walk down one column of a matrix.
    const std::int64_t stride = ((flat.numel() + options_.samples - 1) / options_.samples) | 1;
    const at::Tensor some =
        flat.slice(0, 0, flat.numel(), stride).cpu().to(at::kDouble).contiguous();
    auto sums = std::find_if(counts_.begin(), counts_.end(),
                             [&](const LayerExponents& known) { return known.layer == layer; });
    if (sums == counts_.end()) sums = counts_.insert(sums, LayerExponents{.layer = layer});
    for (std::int64_t i = 0; i < some.numel(); ++i) {
      for (LayerExponents* const counts : {&*sums, &all_}) {
        count(*counts, some.const_data_ptr<double>()[i]);
      }
    }
  }

  /// Counts the gradients of all parameters that have one; a layer is a module with parameters of
  /// its own.
  void add_gradients(const torch::nn::Module& model) {
    for (const auto& entry : model.named_parameters()) {
      add(detail::layer_name(entry.key()), entry.value().grad());
    }
  }

  /// Returns the layers, in the order in which they were added.
  std::vector<LayerExponents> layers() const {
    std::vector<LayerExponents> layers;
    for (const LayerExponents& counts : counts_) layers.push_back(shares_of(counts));
    return layers;
  }

  /// Returns all layers as one, called "all layers".
  LayerExponents total() const { return shares_of(all_); }

  /// Returns the dtype that the report is about.
  at::ScalarType dtype() const noexcept { return dtype_; }
  /// Returns the options that the report was made with.
  const UnderflowOptions& options() const noexcept { return options_; }

 private:
  void count(LayerExponents& counts, double value) const {
    ++counts.sampled;
    if (value == 0) return static_cast<void>(++counts.zero);
    if (detail::is_nonfinite(value)) return static_cast<void>(++counts.non_finite);
    const int exponent = std::ilogb(value);
    counts.smallest = std::min(counts.smallest.value_or(exponent), exponent);
    counts.largest = std::max(counts.largest.value_or(exponent), exponent);
    if (exponent < range_.smallest - 1) {
      ++counts.lost;  // above half of the smallest number rounding goes up
    } else if (exponent < range_.normal) {
      ++counts.subnormal;
    } else if (exponent > range_.largest) {
      ++counts.overflow;
    }
  }

  static LayerExponents shares_of(LayerExponents counts) {
    const auto sampled = static_cast<double>(std::max<std::int64_t>(counts.sampled, 1));
    for (double* const share :
         {&counts.zero, &counts.lost, &counts.subnormal, &counts.overflow, &counts.non_finite}) {
      *share /= sampled;
    }
    return counts;
  }

  at::ScalarType dtype_;
  UnderflowOptions options_;
  ExponentRange range_;
  std::vector<LayerExponents> counts_;  // of values, in place of their shares
  LayerExponents all_{.layer = "all layers"};
};

/// Returns the largest power of two up to 2^24 (Apex's ceiling) under which the largest value seen
/// stays `margin` doublings below the type's largest number; half of the present scale at most
/// where a value overflowed. For a fixed scale, or as init_scale. Waits for the device.
///
/// Where every value is 0, the suggestion is what values of half the type's smallest number allow.
/// \throws c10::Error where no value was seen
inline double suggest_loss_scale(const UnderflowReport& gradients, int margin = 3) {
  const LayerExponents all = gradients.total();
  TORCH_CHECK(all.sampled > 0,
              "suggest_loss_scale: this report has no values; add gradients after backward()");
  const double scale = gradients.options().loss_scale;
  const ExponentRange range = ExponentRange::of(gradients.dtype());
  const bool has_overflowed = all.non_finite > 0 || all.overflow > 0;
  // A value that became 0 was at most half of the smallest number.
  const int largest = all.largest.value_or(has_overflowed ? range.largest : range.smallest - 1);
  double exponent = std::floor(std::log2(scale)) + range.largest - margin - largest;
  if (has_overflowed) exponent = std::min(exponent, std::floor(std::log2(scale)) - 1);
  return std::exp2(std::min(exponent, 24.0));
}

/// Writes a table with a line a layer, and by how much the loss scale could move.
inline std::ostream& operator<<(std::ostream& stream, const UnderflowReport& report) {
  using detail::digits;
  const auto power = [](std::optional<int> exponent) {
    return exponent ? "2^" + std::to_string(*exponent) : std::string("-");
  };
  const std::vector<int> widths = {-36, 10, 12, 12, 12, 12, 12, 10, 10};
  const ExponentRange range = ExponentRange::of(report.dtype());
  std::string text = "values in " + std::string(detail::dtype_name(report.dtype())) + ", " +
                     power(range.smallest) + " to " + power(range.largest) +
                     ", in percent of those sampled\n" +
                     detail::table_line(widths, {"layer", "sampled", "zero", "lost", "subnormal",
                                                 "overflow", "inf or NaN", "smallest", "largest"});
  const LayerExponents all = report.total();
  std::vector<LayerExponents> layers = report.layers();
  layers.push_back(all);
  for (const LayerExponents& one : layers) {
    text += detail::table_line(
        widths, {one.layer, std::to_string(one.sampled), digits(100 * one.zero),
                 digits(100 * one.lost), digits(100 * one.subnormal), digits(100 * one.overflow),
                 digits(100 * one.non_finite), power(one.smallest), power(one.largest)});
  }
  const std::string scale = digits(report.options().loss_scale, 6);
  if (all.zero == 1) {
    text += "every value is 0: with the loss scale " + scale + " they are at most " +
            power(range.smallest - 1) +
            ", or the loss does not depend on these weights; a loss scale of " +
            digits(suggest_loss_scale(report), 8) + " overflows no such value, and tells which\n";
  } else if (all.non_finite > 0 || all.overflow > 0) {
    text += "a value is beyond the type's largest number, or was: the loss scale, " + scale +
            ", should fall to " + digits(suggest_loss_scale(report), 6) + " or less\n";
  } else if (all.largest) {
    text += "the loss scale, " + scale + ", could change by " +
            power(range.largest - *all.largest) + " before the largest value overflows\n";
  }
  return stream << text;
}

/// What happens after a diagnosis.
enum class DivergencePolicy : std::uint8_t {
  keep_going,
  stop,  ///< `Telemetry::record` or `flush` throws c10::Error with the diagnosis, after a pending
         ///< trace of an AnomalyWatch in the same Telemetry
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
/// waits for the device, and tells what is not finite, at most once in 1000 steps: it names what it
/// saw and what to try next, and claims a cause only of a weight that was inf or NaN from the
/// start: docs/diagnosis.md ("My loss scale collapses") has a table of it.
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
        buffers_(named_float_buffers(model)),
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
    return record.loss && detail::is_nonfinite(*record.loss);
  }

  std::string bad_weight() const { return detail::name_of_nonfinite(parameters_); }

  Finding diagnose(const TelemetryRecord& record) const {
    Finding finding{.severity = FindingSeverity::error, .topic = "divergence"};
    finding.where = "Training diverges (" +
                    (options_.rank ? "rank " + std::to_string(*options_.rank) + ", " : "") +
                    "step " + std::to_string(record.step) + "; " + std::to_string(skips_) +
                    " skipped in a row; loss scale " + detail::number_text(record.scale) +
                    (record.loss ? "; loss " + detail::digits(*record.loss, 4) : "") + ")";
    const std::string bad = bad_weight();
    const bool was_applied = is_lost(record) && !record.skipped;
    if (!bad.empty()) {
      finding.reason = bad + " holds inf or NaN" +
                       (began_bad_    ? ", and the weights did when the watch was made"
                        : was_applied ? " and so is the loss, whose step was applied; which was "
                                        "first is not known"
                                      : "; what wrote it is not known");
      finding.remedy =
          began_bad_ ? "no step repairs it: initialise or load it again"
          : was_applied
              ? "load a checkpoint from before. Step through a GradScaler, which skips a step "
                "whose "
                "gradients are inf or NaN (in bfloat16 with an init_scale of 1). If the weights "
                "then "
                "stay finite, look for a log or a division of 0 in this batch; if not, look at the "
                "learning rate and eps"
              : "no step repairs it: load a checkpoint from before. Look at the learning rate, at "
                "eps, at the range of the weights' dtype, and at writes by hand";
      return finding;
    }
    if (const std::string buffer = detail::name_of_nonfinite(buffers_); !buffer.empty()) {
      finding.reason = detail::bad_buffer_reason(buffer);
      return finding;
    }
    finding.reason = is_lost(record) ? "the loss is inf or NaN, computed from finite weights"
                                     : "the weights are finite; " +
                                           find_overflow(parameters_, record.scale).cause();
    finding.remedy =
        std::string(is_lost(record)
                        ? "why is not known. Look for a log or a division of 0 in this batch. If "
                          "its loss is "
                          "finite in float32, use bfloat16. An AnomalyTrace around it names the op"
                        : "why is not known. An AnomalyWatch traces a step, and names the op") +
        ". If the loss or the weights grew before, divide the learning rate by 10 until the loss "
        "falls, lengthen the warm-up, or take a momentum below 1, less weight decay, or inputs of "
        "about 1";
    return finding;
  }

  DivergenceOptions options_;
  TensorsByName parameters_;
  TensorsByName buffers_;
  bool began_bad_;
  std::int64_t last_step_ = 0;
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;  // a step
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
