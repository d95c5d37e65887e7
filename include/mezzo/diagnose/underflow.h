/// \file
/// Would these numbers survive in a low type? Counts values of gradients or activations by exponent
/// against what half, bfloat16 or float8 can hold:
///
///     mezzo::UnderflowReport gradients(torch::kHalf, {.loss_scale = scaler.get_scale()});
///     gradients.add_gradients(*model);                  // after backward, before the step
///     std::cout << gradients << mezzo::suggest_loss_scale(gradients);
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a floating type can hold, by the power of two below a value's magnitude.
struct ExponentRange {
  int smallest = 0;  ///< of the smallest subnormal number: -24 of half
  int normal = 0;    ///< of the smallest normal number: -14
  int largest = 0;   ///< of the largest number: 15

  /// Returns the range of half, bfloat16, float32 or float8 (e4m3fn, e5m2).
  /// \throws c10::Error for another dtype
  static ExponentRange of(at::ScalarType dtype) {
    if (dtype == at::kHalf) return {-24, -14, 15};
    if (dtype == at::kBFloat16) return {-133, -126, 127};
    if (dtype == at::kFloat8_e4m3fn) return {-9, -6, 8};
    if (dtype == at::kFloat8_e5m2) return {-16, -14, 15};
    TORCH_CHECK(dtype == at::kFloat, "ExponentRange: dtype is ", dtype,
                "; it should be torch::kHalf, torch::kBFloat16, torch::kFloat or a float8");
    return {-149, -126, 127};
  }
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
/// Adding launches some small kernels and does not wait for a device; the questions do. One thread
/// at a time.
class UnderflowReport {
 public:
  /// \throws c10::Error for a dtype without an ExponentRange, or options that are not positive
  explicit UnderflowReport(at::ScalarType dtype, const UnderflowOptions& options = {})
      : dtype_(dtype), options_(options) {
    ExponentRange::of(dtype);
    TORCH_CHECK(options.samples > 0, "UnderflowReport: samples is ", options.samples,
                "; it should be positive");
    TORCH_CHECK(detail::is_above(options.loss_scale, 0), "UnderflowReport: loss_scale is ",
                options.loss_scale, "; it should be positive, as scaler.get_scale() is");
  }

  /// Counts some of `values`: an activation, a gradient. Calls for the same layer add up.
  void add(const std::string& layer, const at::Tensor& values) {
    if (!values.defined() || values.numel() == 0) return;
    TORCH_CHECK(values.is_floating_point(), "UnderflowReport::add: ", layer, " is ",
                detail::tensor_words(values), "; give it values of a floating dtype");
    const at::NoGradGuard no_grad;
    const at::Tensor dense = values.is_sparse() ? values.detach().to_dense() : values.detach();
    const at::Tensor flat = dense.reshape({-1});
    // An odd stride, so that it does not walk down one column of a matrix.
    const std::int64_t stride = ((flat.numel() + options_.samples - 1) / options_.samples) | 1;
    const at::Tensor some = flat.slice(0, 0, flat.numel(), stride).to(at::kFloat).contiguous();
    const at::Tensor bits = some.view(at::kInt).bitwise_and(0x7FFFFFFF);
    const at::Tensor columns = at::where(bits.eq(0), kZero, bits.bitwise_right_shift(23));
    const at::Tensor counts = at::zeros({kZero + 1}, columns.options().dtype(at::kLong));
    counts.scatter_add_(0, columns.to(at::kLong), at::ones_like(some, at::kLong));  // no wait
    for (auto& [name, sums] : counts_) {
      if (name == layer && sums.device() == counts.device()) {
        return static_cast<void>(sums += counts);
      }
    }
    counts_.emplace_back(layer, counts);
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
    for (const auto& [name, counts] : counts_) layers.push_back(exponents_of(name, counts.cpu()));
    return layers;
  }

  /// Returns all layers as one, called "all layers".
  LayerExponents total() const {
    at::Tensor sum = at::zeros({kZero + 1}, at::kLong);
    for (const auto& [name, counts] : counts_) sum += counts.cpu();
    return exponents_of("all layers", sum);
  }

  /// Returns the lost share of the values that are not zero, for TelemetryStep::underflow. Zeros
  /// are left out because most are gradients of weights that were not used.
  double lost() const {
    const LayerExponents all = total();
    return all.zero < 1 ? all.lost / (1 - all.zero) : 0;
  }

  /// Returns the dtype that the report is about.
  at::ScalarType dtype() const noexcept { return dtype_; }
  /// Returns the options that the report was made with.
  const UnderflowOptions& options() const noexcept { return options_; }

 private:
  /// The column of zeros, behind those of a float's 256 exponents, of which the first is of its own
  /// subnormals and the last of inf and NaN.
  static constexpr int kZero = 256;

  LayerExponents exponents_of(std::string name, const at::Tensor& counts) const {
    const auto* const count = counts.const_data_ptr<int64_t>();
    const ExponentRange range = ExponentRange::of(dtype_);
    LayerExponents layer{.layer = std::move(name), .sampled = counts.sum().item<int64_t>()};
    const auto share = [&](int column) {
      return static_cast<double>(count[column]) / static_cast<double>(layer.sampled);
    };
    for (int column = 0; column < kZero - 1; ++column) {
      if (count[column] == 0) continue;
      const int exponent = column - 127;
      if (!layer.smallest) layer.smallest = exponent;
      layer.largest = exponent;
      if (exponent < range.smallest - 1) {
        layer.lost += share(column);  // above half of the smallest number rounding goes up
      } else if (exponent < range.normal) {
        layer.subnormal += share(column);
      } else if (exponent > range.largest) {
        layer.overflow += share(column);
      }
    }
    if (layer.sampled > 0) layer.zero = share(kZero), layer.non_finite = share(kZero - 1);
    return layer;
  }

  at::ScalarType dtype_;
  UnderflowOptions options_;
  std::vector<std::pair<std::string, at::Tensor>> counts_;  // by layer, where its values are
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
  const auto line = [](const std::vector<std::string>& cells) {
    return detail::table_line({-36, 10, 12, 12, 12, 12, 12, 10, 10}, cells);
  };
  const ExponentRange range = ExponentRange::of(report.dtype());
  std::string text = "values in " + std::string(detail::dtype_name(report.dtype())) + ", " +
                     power(range.smallest) + " to " + power(range.largest) +
                     ", in percent of those sampled\n" +
                     line({"layer", "sampled", "zero", "lost", "subnormal", "overflow",
                           "inf or NaN", "smallest", "largest"});
  const LayerExponents all = report.total();
  std::vector<LayerExponents> layers = report.layers();
  layers.push_back(all);
  for (const LayerExponents& one : layers) {
    text += line({one.layer, std::to_string(one.sampled), digits(100 * one.zero),
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
