/// \file
/// What gradients and weights show of a run: OverflowReport, why was that step skipped;
/// UnderflowReport, would these numbers survive in a low type; DivergenceMonitor, is the run lost.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/tensor_summary.h>
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
  std::vector<std::int64_t> first_index = {};  ///< index of the first that is inf or NaN
  double first_value = 0;                      ///< which it is: inf, -inf or NaN
  /// Whether the gradient is finite, and inf after division by a loss scale below 1. False where
  /// `unscale_` has divided already.
  bool from_unscaling = false;
};

namespace detail {

/// Returns the name of the first tensor that holds inf or NaN; empty if there is none. Waits for
/// the device.
inline std::string find_nonfinite(const TensorsByName& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (is_readable(tensor) && !ordered_values(tensor).isfinite().all().item<bool>()) return name;
  }
  return {};
}

inline std::string describe_nonfinite_buffer(const std::string& name) {
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
  std::string nonfinite_buffer =
      {};  ///< name of the model's first buffer with inf or NaN; empty: none

  /// Returns one line without an end; also where there is nothing to be seen any more, and why.
  std::string message() const {
    using std::to_string;
    if (!nonfinite_buffer.empty()) return detail::describe_nonfinite_buffer(nonfinite_buffer);
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
           " has " + bad + " in " + to_string(first.numel) + " gradients, the first, " +
           detail::format_number(first.first_value) + ", at index " +
           detail::format_sizes(first.first_index) + ", " +
           (first.from_unscaling ? "made by dividing by a loss scale below 1"
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
  const bool from_unscaling = loss_scale < 1 && detail::all_finite(summaries);
  if (from_unscaling) {
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
    if (summary.numel == 0) continue;
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
                                   from_unscaling});
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
/// StepOptions::zero_grad, and a later step's on a device. docs/debugging.md ("Why was that step
/// skipped?") has a loop that asks at the very step. Ranks that average their gradients all have
/// the same ones: let one write, with `{.stream = rank == 0 ? &std::cerr : nullptr}`.
class OverflowReport {
 public:
  /// Keeps the parameters, not the model. Parameters that are registered later are not seen.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {})
      : parameters_(named_float_parameters(model)),
        buffers_(named_float_buffers(model)),
        options_(std::move(options)) {}
  /// Keeps the parameters of several models, under the models' names.
  explicit OverflowReport(const std::vector<NamedModel>& models, OverflowReportOptions options = {})
      : parameters_(named_float_parameters(models)),
        buffers_(named_float_buffers(models)),
        options_(std::move(options)) {}

  /// Reads the gradients of a skipped step; for GradScaler::on_skip.
  void operator()(const SkippedStep& step) {
    const std::string message = detail::limited_skip_message(step);
    if (message.empty() || (options_.stream == nullptr && !options_.callback)) return;
    Overflow overflow = find_overflow(parameters_, step.scale);
    overflow.step = step;
    overflow.nonfinite_buffer = detail::find_nonfinite(buffers_);
    if (options_.stream != nullptr)
      *options_.stream << message + "\n  " + overflow.message() + "\n" << std::flush;
    if (options_.callback) options_.callback(overflow);
  }

 private:
  TensorsByName parameters_;
  TensorsByName buffers_;
  OverflowReportOptions options_;
};

/// One layer's sampled values; shares are of all of them, from 0 to 1.
struct LayerRangeStats {
  std::string layer;         ///< its name, as given to `add`
  std::int64_t sampled = 0;  ///< how many values were counted
  double zero = 0;           ///< zero already
  double underflow = 0;      ///< not zero, but nearer to zero than to the smallest subnormal number
  double subnormal = 0;      ///< held with fewer bits than others
  double overflow = 0;       ///< finite, but inf in the type
  double nonfinite = 0;      ///< inf or NaN already
  /// The exponent e, 2^e <= |value| < 2^(e + 1), of the smallest finite value that is not zero.
  std::optional<int> min_exponent = std::nullopt;
  std::optional<int> max_exponent = std::nullopt;  ///< that of the largest
};

/// What an UnderflowReport samples.
struct UnderflowReportOptions {
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
  explicit UnderflowReport(at::ScalarType dtype, const UnderflowReportOptions& options = {})
      : dtype_(dtype), options_(options), range_(ExponentRange::from_dtype(dtype)) {
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
                             [&](const LayerRangeStats& known) { return known.layer == layer; });
    if (sums == counts_.end()) sums = counts_.insert(sums, LayerRangeStats{.layer = layer});
    for (std::int64_t i = 0; i < some.numel(); ++i) {
      for (LayerRangeStats* const counts : {&*sums, &all_}) {
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
  std::vector<LayerRangeStats> layers() const {
    std::vector<LayerRangeStats> layers;
    for (const LayerRangeStats& counts : counts_) layers.push_back(shares_of(counts));
    return layers;
  }

  /// Returns all layers as one, called "all layers".
  LayerRangeStats total() const { return shares_of(all_); }

  /// Returns the dtype that the report is about.
  at::ScalarType dtype() const noexcept { return dtype_; }
  /// Returns the options that the report was made with.
  const UnderflowReportOptions& options() const noexcept { return options_; }

 private:
  void count(LayerRangeStats& counts, double value) const {
    ++counts.sampled;
    if (value == 0) return static_cast<void>(++counts.zero);
    if (detail::is_nonfinite(value)) return static_cast<void>(++counts.nonfinite);
    const int exponent = std::ilogb(value);
    counts.min_exponent = std::min(counts.min_exponent.value_or(exponent), exponent);
    counts.max_exponent = std::max(counts.max_exponent.value_or(exponent), exponent);
    if (exponent < range_.min_subnormal - 1) {
      ++counts.underflow;  // above half of the smallest number rounding goes up
    } else if (exponent < range_.min_normal) {
      ++counts.subnormal;
    } else if (exponent > range_.max) {
      ++counts.overflow;
    }
  }

  static LayerRangeStats shares_of(LayerRangeStats counts) {
    const auto sampled = static_cast<double>(std::max<std::int64_t>(counts.sampled, 1));
    for (double* const share : {&counts.zero, &counts.underflow, &counts.subnormal,
                                &counts.overflow, &counts.nonfinite}) {
      *share /= sampled;
    }
    return counts;
  }

  at::ScalarType dtype_;
  UnderflowReportOptions options_;
  ExponentRange range_;
  std::vector<LayerRangeStats> counts_;  // of values, in place of their shares
  LayerRangeStats all_{.layer = "all layers"};
};

/// Returns the largest power of two up to 2^24 (Apex's ceiling) under which the largest value seen
/// stays `margin` doublings below the type's largest number; half of the present scale at most
/// where a value overflowed. For a fixed scale, or as init_scale. Waits for the device.
///
/// Where every value is 0, the suggestion is what values of half the type's smallest number allow.
/// \throws c10::Error where no value was seen
inline double suggest_loss_scale(const UnderflowReport& gradients, int margin = 3) {
  const LayerRangeStats all = gradients.total();
  TORCH_CHECK(all.sampled > 0,
              "suggest_loss_scale: this report has no values; add gradients after backward()");
  const double scale = gradients.options().loss_scale;
  const ExponentRange range = ExponentRange::from_dtype(gradients.dtype());
  const bool has_overflowed = all.nonfinite > 0 || all.overflow > 0;
  // A value that became 0 was at most half of the smallest number.
  const int largest =
      all.max_exponent.value_or(has_overflowed ? range.max : range.min_subnormal - 1);
  double exponent = std::floor(std::log2(scale)) + range.max - margin - largest;
  if (has_overflowed) exponent = std::min(exponent, std::floor(std::log2(scale)) - 1);
  return std::exp2(std::min(exponent, 24.0));
}

/// Writes a table with a line a layer, and by how much the loss scale could move.
inline std::ostream& operator<<(std::ostream& stream, const UnderflowReport& report) {
  using detail::format_significant;
  const auto power = [](std::optional<int> exponent) {
    return exponent ? "2^" + std::to_string(*exponent) : std::string("-");
  };
  const std::vector<int> widths = {-36, 10, 12, 12, 12, 12, 12, 10, 10};
  const ExponentRange range = ExponentRange::from_dtype(report.dtype());
  std::string text = "values in " + std::string(detail::dtype_name(report.dtype())) + ", " +
                     power(range.min_subnormal) + " to " + power(range.max) +
                     ", in percent of those sampled\n" +
                     detail::format_row(widths, {"layer", "sampled", "zero", "lost", "subnormal",
                                                 "overflow", "inf or NaN", "smallest", "largest"});
  const LayerRangeStats all = report.total();
  std::vector<LayerRangeStats> layers = report.layers();
  layers.push_back(all);
  for (const LayerRangeStats& one : layers) {
    text += detail::format_row(
        widths, {one.layer, std::to_string(one.sampled), format_significant(100 * one.zero),
                 format_significant(100 * one.underflow), format_significant(100 * one.subnormal),
                 format_significant(100 * one.overflow), format_significant(100 * one.nonfinite),
                 power(one.min_exponent), power(one.max_exponent)});
  }
  const std::string scale = format_significant(report.options().loss_scale, 6);
  if (all.zero == 1) {
    text += "every value is 0: with the loss scale " + scale + " they are at most " +
            power(range.min_subnormal - 1) +
            ", or the loss does not depend on these weights; a loss scale of " +
            format_significant(suggest_loss_scale(report), 8) +
            " overflows no such value, and tells which\n";
  } else if (all.nonfinite > 0 || all.overflow > 0) {
    text += "a value is beyond the type's largest number, or was: the loss scale, " + scale +
            ", should fall to " + format_significant(suggest_loss_scale(report), 6) + " or less\n";
  } else if (all.max_exponent) {
    text += "the loss scale, " + scale + ", could change by " +
            power(range.max - *all.max_exponent) + " before the largest value overflows\n";
  }
  return stream << text;
}

/// What happens after a report.
enum class DivergenceAction : std::uint8_t {
  report,
  report_and_throw,  ///< `MetricsLogger::record` or `flush` throws c10::Error with the report, after a pending
                     ///< trace of an TraceOnSkips in the same MetricsLogger
};

/// What a DivergenceMonitor takes for a sign, and what follows.
struct DivergenceMonitorOptions {
  std::int64_t consecutive_skips = 10;  ///< so many are a sign
  double min_scale = 0.5;               ///< a step that is skipped at or below this scale is a sign
  DivergenceAction action = DivergenceAction::report;  ///< what follows a report
  /// Called with the report, in place of std::cerr, before a `stop`.
  std::function<void(const Finding&)> callback = {};
  std::optional<int> rank = std::nullopt;  ///< of this process in a job of several: it is named
};

/// A writer for a MetricsLogger. Watches for skips in a row, for a skip at a scale of `min_scale`
/// or less, and for a loss that is inf or NaN. After such a sign it reads weights and gradients,
/// which waits for the device, and tells what is not finite, at most once in 1000 steps: it names
/// what it saw and what to try next, and claims a cause only of a weight that was inf or NaN from
/// the start: docs/debugging.md ("My loss scale collapses") has a table of it.
///
/// A record whose step is not above the last one's is that of a run that went back to a checkpoint:
/// the watch may report again at once. Gradients are read as find_overflow does, and are a later
/// step's where a device decides. In a job of several each rank watches its own loss; one that
/// stops alone leaves the others waiting.
class DivergenceMonitor {
 public:
  /// Keeps the parameters, not the model. Reads the weights once, which waits for the device.
  /// \throws c10::Error unless consecutive_skips is positive
  explicit DivergenceMonitor(const torch::nn::Module& model, DivergenceMonitorOptions options = {})
      : options_(std::move(options)),
        parameters_(named_float_parameters(model)),
        buffers_(named_float_buffers(model)),
        initially_nonfinite_(!find_nonfinite_weight().empty()) {
    TORCH_CHECK(options_.consecutive_skips > 0, "DivergenceMonitor: consecutive_skips is ",
                options_.consecutive_skips, "; it should be positive");
  }

  /// Looks at the record of a step.
  void operator()(const StepMetrics& record) {
    constexpr std::int64_t kRarely = 1000;
    if (std::exchange(last_step_, record.step) >= record.step) skips_ = quiet_until_ = 0;
    skips_ = record.skipped ? skips_ + 1 : 0;
    const bool is_sign = has_nonfinite_loss(record) || skips_ >= options_.consecutive_skips ||
                         (record.skipped && record.scale <= options_.min_scale);
    if (!is_sign || record.step < quiet_until_) return;
    quiet_until_ = record.step + kRarely;
    const Finding finding = make_finding(record);
    const bool stops = options_.action == DivergenceAction::report_and_throw;
    if (options_.callback) {
      options_.callback(finding);
    } else if (!stops) {
      std::cerr << finding.message() + "\n";
    }
    TORCH_CHECK(!stops, finding.message());
  }

 private:
  static bool has_nonfinite_loss(const StepMetrics& record) {
    return record.loss && detail::is_nonfinite(*record.loss);
  }

  std::string find_nonfinite_weight() const { return detail::find_nonfinite(parameters_); }

  Finding make_finding(const StepMetrics& record) const {
    Finding finding{.severity = FindingSeverity::error, .check = "divergence"};
    finding.where = "Training diverges (" +
                    (options_.rank ? "rank " + std::to_string(*options_.rank) + ", " : "") +
                    "step " + std::to_string(record.step) + "; " + std::to_string(skips_) +
                    " skipped in a row; loss scale " + detail::format_number(record.scale) +
                    (record.loss ? "; loss " + detail::format_significant(*record.loss, 4) : "") +
                    ")";
    const std::string bad = find_nonfinite_weight();
    const bool was_applied = has_nonfinite_loss(record) && !record.skipped;
    if (!bad.empty()) {
      finding.reason = bad + " holds inf or NaN" +
                       (initially_nonfinite_ ? ", and the weights did when the watch was made"
                        : was_applied ? " and so is the loss, whose step was applied; which was "
                                        "first is not known"
                                      : "; what wrote it is not known");
      finding.remedy =
          initially_nonfinite_ ? "no step repairs it: initialise or load it again"
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
    if (const std::string buffer = detail::find_nonfinite(buffers_); !buffer.empty()) {
      finding.reason = detail::describe_nonfinite_buffer(buffer);
      return finding;
    }
    finding.reason =
        has_nonfinite_loss(record)
            ? "the loss is inf or NaN, computed from finite weights"
            : "the weights are finite; " + find_overflow(parameters_, record.scale).message();
    finding.remedy =
        std::string(has_nonfinite_loss(record)
                        ? "why is not known. Look for a log or a division of 0 in this batch. If "
                          "its loss is "
                          "finite in float32, use bfloat16. An AnomalyTrace around it names the op"
                        : "why is not known. An TraceOnSkips traces a step, and names the op") +
        ". If the loss or the weights grew before, divide the learning rate by 10 until the loss "
        "falls, lengthen the warm-up, or take a momentum below 1, less weight decay, or inputs of "
        "about 1";
    return finding;
  }

  DivergenceMonitorOptions options_;
  TensorsByName parameters_;
  TensorsByName buffers_;
  bool initially_nonfinite_;
  std::int64_t last_step_ = 0;
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;  // a step
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
