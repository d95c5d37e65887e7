/// \file
/// UnderflowReport: how many values a low-precision dtype would lose, by layer.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/named_parameters.h>
#include <mezzo/diagnostics/tensor_summary.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Statistics of one layer's sampled values. All double members are fractions of `num_samples`.
struct LayerRangeStats {
  std::string layer;             ///< as passed to `add`
  std::int64_t num_samples = 0;  ///< number of values
  double zero = 0;               ///< equal to 0
  double underflow = 0;          ///< nonzero, but rounded to 0 in the dtype
  double subnormal = 0;          ///< subnormal in the dtype, with fewer bits of precision
  double overflow = 0;           ///< finite, but beyond the dtype's range
  double nonfinite = 0;          ///< inf or NaN
  /// Exponents e, 2^e <= |value| < 2^(e + 1), of the smallest and largest finite nonzero magnitude.
  std::optional<int> min_exponent = std::nullopt;
  std::optional<int> max_exponent = std::nullopt;  ///< see min_exponent
};

/// Options of an UnderflowReport.
struct UnderflowReportOptions {
  double loss_scale = 1;            ///< by which the values are scaled; used by suggest_loss_scale
  std::int64_t max_samples = 8192;  ///< maximum number of values read per tensor, evenly spaced
};

/// Counts, by layer, sampled values that leave the range of a low-precision dtype. Values may have
/// any floating dtype. Values that underflowed when they were computed, such as float16 gradients
/// under autocast, count as zero.
///
///     mezzo::UnderflowReport gradients(torch::kHalf, {.loss_scale = scaler.get_scale()});
///     gradients.add_gradients(*model);                  // after backward(), before step()
///     std::cout << gradients << mezzo::suggest_loss_scale(gradients);
class UnderflowReport {
 public:
  /// \throws c10::Error for a dtype without an ExponentRange, and unless the options are positive
  explicit UnderflowReport(at::ScalarType dtype, const UnderflowReportOptions& options = {})
      : dtype_(dtype), options_(options), range_(ExponentRange::from_dtype(dtype)) {
    TORCH_CHECK(options.max_samples > 0, "UnderflowReport: max_samples must be positive, but got ",
                options.max_samples);
    TORCH_CHECK(detail::is_above(options.loss_scale, 0),
                "UnderflowReport: loss_scale must be positive, but got ", options.loss_scale,
                "; pass scaler.get_scale()");
  }

  /// Samples `values`, such as an activation or a gradient. Calls with the same layer accumulate.
  /// Synchronizes with the device.
  /// \throws c10::Error unless the dtype is floating
  void add(const std::string& layer, const at::Tensor& values) {
    if (!values.defined() || values.numel() == 0) return;
    TORCH_CHECK(values.is_floating_point(), "UnderflowReport::add: expected a floating-point ",
                "tensor for ", layer, ", but got ", detail::describe(values));
    const at::NoGradGuard no_grad;
    const at::Tensor dense = values.is_sparse() ? values.detach().to_dense() : values.detach();
    const at::Tensor flat = dense.reshape({-1});
    // Odd, so that the samples do not all lie in one column of a matrix.
    const std::int64_t stride =
        ((flat.numel() + options_.max_samples - 1) / options_.max_samples) | 1;
    const at::Tensor samples =
        flat.slice(0, 0, flat.numel(), stride).cpu().to(at::kDouble).contiguous();
    auto counts = std::find_if(counts_.begin(), counts_.end(),
                               [&](const LayerRangeStats& known) { return known.layer == layer; });
    if (counts == counts_.end()) counts = counts_.insert(counts, LayerRangeStats{.layer = layer});
    for (std::int64_t i = 0; i < samples.numel(); ++i) {
      count_value(*counts, samples.const_data_ptr<double>()[i]);
      count_value(total_counts_, samples.const_data_ptr<double>()[i]);
    }
  }

  /// Samples the gradients of all parameters that have one. A layer is a module that owns
  /// parameters.
  void add_gradients(const torch::nn::Module& model) {
    for (const auto& entry : model.named_parameters()) {
      add(detail::layer_name(entry.key()), entry.value().grad());
    }
  }

  /// Returns the layers in the order in which they were added.
  std::vector<LayerRangeStats> layers() const {
    std::vector<LayerRangeStats> layers;
    for (const LayerRangeStats& counts : counts_) layers.push_back(normalize(counts));
    return layers;
  }

  /// Returns the statistics over all layers, named "all layers".
  LayerRangeStats total() const { return normalize(total_counts_); }

  /// Returns the dtype whose range is used.
  at::ScalarType dtype() const noexcept { return dtype_; }
  /// Returns the options of the constructor.
  const UnderflowReportOptions& options() const noexcept { return options_; }

 private:
  void count_value(LayerRangeStats& counts, double value) const {
    ++counts.num_samples;
    if (value == 0) return static_cast<void>(++counts.zero);
    if (detail::is_nonfinite(value)) return static_cast<void>(++counts.nonfinite);
    const int exponent = std::ilogb(value);
    counts.min_exponent = std::min(counts.min_exponent.value_or(exponent), exponent);
    counts.max_exponent = std::max(counts.max_exponent.value_or(exponent), exponent);
    if (exponent < range_.min_subnormal - 1) {
      ++counts.underflow;  // above half of the smallest subnormal, values round up
    } else if (exponent < range_.min_normal) {
      ++counts.subnormal;
    } else if (exponent > range_.max) {
      ++counts.overflow;
    }
  }

  /// Turns counts into fractions.
  static LayerRangeStats normalize(LayerRangeStats stats) {
    const auto num_samples = static_cast<double>(std::max<std::int64_t>(stats.num_samples, 1));
    for (double* const fraction :
         {&stats.zero, &stats.underflow, &stats.subnormal, &stats.overflow, &stats.nonfinite}) {
      *fraction /= num_samples;
    }
    return stats;
  }

  at::ScalarType dtype_;
  UnderflowReportOptions options_;
  ExponentRange range_;
  std::vector<LayerRangeStats> counts_;  // counts instead of fractions, as in total_counts_
  LayerRangeStats total_counts_{.layer = "all layers"};
};

/// Returns a loss scale, for a fixed scale or as `init_scale`: the largest power of two, at most
/// 2^24 (Apex's maximum), at which the largest sampled value stays `margin` powers of two below the
/// dtype's maximum. If a value overflowed, at most half of the current scale; if every value is 0,
/// assumes that the largest was just below half of the smallest subnormal number.
/// \throws c10::Error if the report has no values
inline double suggest_loss_scale(const UnderflowReport& gradients, int margin = 3) {
  constexpr double kMaxExponent = 24;
  const LayerRangeStats total = gradients.total();
  TORCH_CHECK(
      total.num_samples > 0,
      "suggest_loss_scale: the report has no values; call add_gradients() after backward()");
  const ExponentRange range = ExponentRange::from_dtype(gradients.dtype());
  const bool has_overflowed = total.nonfinite > 0 || total.overflow > 0;
  const int largest =
      total.max_exponent.value_or(has_overflowed ? range.max : range.min_subnormal - 1);
  const double scale_exponent = std::floor(std::log2(gradients.options().loss_scale));
  double exponent = scale_exponent + range.max - margin - largest;
  if (has_overflowed) exponent = std::min(exponent, scale_exponent - 1);
  return std::exp2(std::min(exponent, kMaxExponent));
}

/// Prints a table with one row per layer, and how far the loss scale can grow.
inline std::ostream& operator<<(std::ostream& stream, const UnderflowReport& report) {
  using detail::format_significant;
  const auto power = [](std::optional<int> exponent) {
    return exponent ? "2^" + std::to_string(*exponent) : std::string("-");
  };
  const std::vector<int> widths = {-36, 10, 12, 12, 12, 12, 12, 10, 10};
  const ExponentRange range = ExponentRange::from_dtype(report.dtype());
  std::string text = std::string(detail::dtype_name(report.dtype())) + " (" +
                     power(range.min_subnormal) + " to " + power(range.max) +
                     "), percent of sampled values\n" +
                     detail::format_row(widths, {"layer", "sampled", "zero", "underflow",
                                                 "subnormal", "overflow", "inf/NaN", "min", "max"});
  const LayerRangeStats total = report.total();
  std::vector<LayerRangeStats> layers = report.layers();
  layers.push_back(total);
  for (const LayerRangeStats& stats : layers) {
    text += detail::format_row(
        widths,
        {stats.layer, std::to_string(stats.num_samples), format_significant(100 * stats.zero),
         format_significant(100 * stats.underflow), format_significant(100 * stats.subnormal),
         format_significant(100 * stats.overflow), format_significant(100 * stats.nonfinite),
         power(stats.min_exponent), power(stats.max_exponent)});
  }
  const std::string scale = format_significant(report.options().loss_scale, 6);
  if (total.zero == 1) {
    text += "every value is 0: with the loss scale " + scale + " all are at most " +
            power(range.min_subnormal - 1) +
            ", or the loss does not depend on these weights. To find out, use a loss scale of " +
            format_significant(suggest_loss_scale(report), 8) + ", which overflows none of them\n";
  } else if (total.nonfinite > 0 || total.overflow > 0) {
    text += "a value overflowed: lower the loss scale from " + scale + " to " +
            format_significant(suggest_loss_scale(report), 6) + " or less\n";
  } else if (total.max_exponent) {
    text += "the loss scale, " + scale + ", can grow by " + power(range.max - *total.max_exponent) +
            " before the largest value overflows\n";
  }
  return stream << text;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
