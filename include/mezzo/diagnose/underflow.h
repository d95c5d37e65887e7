/// \file
/// UnderflowReport: would these numbers survive in a low type? Counts values of gradients or
/// activations by exponent against what half, bfloat16 or float8 can hold.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>
#include <mezzo/diagnose/summarize.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One layer's sampled values; shares are of all of them, from 0 to 1.
struct LayerExponents {
  std::string layer;         ///< its name, as given to `add`
  std::int64_t sampled = 0;  ///< how many values were counted
  double zero = 0;           ///< zero already
  double lost = 0;           ///< not zero, but nearer to zero than to the smallest subnormal number
  double subnormal = 0;      ///< held with fewer bits than others
  double overflow = 0;       ///< finite, but inf in the type
  double non_finite = 0;     ///< inf or NaN already
  /// The exponent e, 2^e <= |value| < 2^(e + 1), of the smallest finite value that is not zero;
  /// -127 of all below 2^-126.
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
                detail::tensor_words(values), "; give it values of a floating dtype");
    const at::NoGradGuard no_grad;
    const at::Tensor dense = values.is_sparse() ? values.detach().to_dense() : values.detach();
    const at::Tensor flat = dense.reshape({-1});
    // An odd stride, so that it does not walk down one column of a matrix.
    const std::int64_t stride = ((flat.numel() + options_.samples - 1) / options_.samples) | 1;
    const at::Tensor some =
        flat.slice(0, 0, flat.numel(), stride).cpu().to(at::kFloat).contiguous();
    auto sums = std::find_if(counts_.begin(), counts_.end(),
                             [&](const LayerExponents& known) { return known.layer == layer; });
    if (sums == counts_.end()) sums = counts_.insert(sums, LayerExponents{.layer = layer});
    for (std::int64_t i = 0; i < some.numel(); ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(some.const_data_ptr<float>()[i]) & 0x7FFFFFFFU;
      for (LayerExponents* const counts : {&*sums, &all_}) count(*counts, bits);
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
  /// Counts a float by its bits without the sign.
  void count(LayerExponents& counts, std::uint32_t bits) const {
    ++counts.sampled;
    const int exponent = static_cast<int>(bits >> 23U) - 127;
    if (bits == 0) return static_cast<void>(++counts.zero);
    if (exponent == 128) return static_cast<void>(++counts.non_finite);
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
/// Where every value is 0, the gradients have underflowed or there are none. Underflowed values
/// were at most half of the type's smallest number: the suggestion is what values of that size
/// allow. If the next report has zeros alone again, the loss does not depend on these weights.
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
