#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/underflow.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Counts by layer, on the device of each tensor: 256 by the bits of a float's exponent (the first
/// are zeros and float's own subnormals, the last inf and NaN), and one of zeros.
class ExponentCounts {
 public:
  static constexpr int64_t kColumns = 257;

  void add(const std::string& layer, const at::Tensor& values, int64_t samples) {
    if (!values.defined() || values.numel() == 0) return;
    const at::NoGradGuard no_grad;
    const at::Tensor counts = counts_of(sampled(values.detach(), samples));
    const std::scoped_lock lock(mutex_);
    for (auto& [name, sums] : layers_) {
      if (name != layer || sums.device() != counts.device()) continue;
      sums = sums + counts;  // not in place: a reader may hold it
      return;
    }
    layers_.emplace_back(layer, counts);
  }

  std::vector<std::pair<std::string, at::Tensor>> layers() const {
    const std::scoped_lock lock(mutex_);
    return layers_;
  }

 private:
  /// An odd stride, so that it does not walk down one column of a matrix.
  static at::Tensor sampled(const at::Tensor& values, int64_t samples) {
    const at::Tensor flat = (values.is_sparse() ? values.to_dense() : values).reshape({-1});
    const int64_t stride = ((flat.numel() + samples - 1) / samples) | 1;
    return flat.slice(0, 0, flat.numel(), stride).to(at::kFloat).contiguous();
  }

  static at::Tensor counts_of(const at::Tensor& values) {
    const at::Tensor exponents =
        values.view(at::kInt).bitwise_right_shift(23).bitwise_and(0xFF).to(at::kLong);
    at::Tensor counts = at::zeros({256}, exponents.options());
    counts.scatter_add_(0, exponents, at::ones_like(exponents));  // bincount would wait
    return at::cat({counts, values.eq(0).sum().reshape({1})});
  }

  mutable std::mutex mutex_;
  std::vector<std::pair<std::string, at::Tensor>> layers_;
};

inline LayerExponents layer_exponents(std::string name, const at::Tensor& counted,
                                      const ExponentRange& range) {
  const at::Tensor counts = counted.cpu();
  const auto* const count = counts.const_data_ptr<int64_t>();
  LayerExponents layer{.layer = std::move(name)};
  layer.sampled = counts.slice(0, 0, 256).sum().item<int64_t>();
  const auto all = static_cast<double>(std::max<int64_t>(layer.sampled, 1));
  const int64_t zeros = count[256];
  layer.zero = static_cast<double>(zeros) / all;
  layer.non_finite = static_cast<double>(count[255]) / all;
  for (std::size_t bin = 0; bin < layer.histogram.size(); ++bin) {
    layer.histogram[bin] = count[bin] - (bin == 0 ? zeros : 0);
    const double share = static_cast<double>(layer.histogram[bin]) / all;
    const int exponent = static_cast<int>(bin) + LayerExponents::kFirst;
    if (exponent < range.smallest - 1) {
      layer.lost += share;  // above half of the smallest number rounding goes up
    } else if (exponent < range.normal) {
      layer.subnormal += share;
    } else if (exponent > range.largest) {
      layer.overflow += share;
    }
  }
  return layer;
}

template <class Float>
ExponentRange exponent_range() {
  using Limits = std::numeric_limits<Float>;
  return {.smallest = Limits::min_exponent - Limits::digits,
          .normal = Limits::min_exponent - 1,
          .largest = Limits::max_exponent - 1};
}

}  // namespace detail

inline ExponentRange ExponentRange::of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return detail::exponent_range<c10::Half>();
  if (dtype == at::kBFloat16) return detail::exponent_range<c10::BFloat16>();
  TORCH_CHECK(dtype == at::kFloat, "ExponentRange: dtype is ", dtype,
              "; it should be torch::kHalf, torch::kBFloat16 or torch::kFloat");
  return detail::exponent_range<float>();
}

inline std::optional<int> LayerExponents::smallest() const {
  const auto bin = std::find_if(histogram.begin(), histogram.end(), [](auto n) { return n > 0; });
  if (bin == histogram.end()) return std::nullopt;
  return static_cast<int>(bin - histogram.begin()) + kFirst;
}

inline std::optional<int> LayerExponents::largest() const {
  const auto bin = std::find_if(histogram.rbegin(), histogram.rend(), [](auto n) { return n > 0; });
  if (bin == histogram.rend()) return std::nullopt;
  return static_cast<int>(histogram.rend() - bin) - 1 + kFirst;
}

inline UnderflowReport::UnderflowReport(at::ScalarType dtype, const UnderflowOptions& options)
    : dtype_(dtype), options_(options), counts_(std::make_shared<detail::ExponentCounts>()) {
  ExponentRange::of(dtype);
  TORCH_CHECK(options.samples > 0, "UnderflowReport: samples is ", options.samples,
              "; it should be positive");
  TORCH_CHECK(detail::is_above(options.loss_scale, 0), "UnderflowReport: loss_scale is ",
              options.loss_scale, "; it should be positive, as scaler.get_scale() is");
}

inline void UnderflowReport::add(const std::string& layer, const at::Tensor& values) {
  TORCH_CHECK(!values.defined() || values.is_floating_point(), "UnderflowReport::add: ", layer,
              " is ", detail::tensor_words(values), "; give it values of a floating dtype");
  counts_->add(layer, values, options_.samples);
}

inline void UnderflowReport::add_gradients(torch::nn::Module& model) {
  for (const auto& entry : model.named_parameters()) {
    add(detail::layer_name(entry.key()), entry.value().grad());
  }
}

inline void UnderflowReport::add_gradient_of(const std::string& layer,
                                             const at::Tensor& activation) {
  TORCH_CHECK(activation.requires_grad(), "UnderflowReport::add_gradient_of: ", layer,
              " requires no grad; call it in a forward pass that has a backward pass");
  activation.register_hook(
      [counts = counts_, samples = options_.samples, layer](const at::Tensor& gradient) {
        counts->add(layer, gradient, samples);
      });
}

inline std::vector<LayerExponents> UnderflowReport::layers() const {
  std::vector<LayerExponents> layers;
  for (const auto& [name, counts] : counts_->layers()) {
    layers.push_back(detail::layer_exponents(name, counts, range()));
  }
  return layers;
}

inline LayerExponents UnderflowReport::total() const {
  at::Tensor sum = at::zeros({detail::ExponentCounts::kColumns}, at::kLong);
  for (const auto& [name, counts] : counts_->layers()) sum += counts.cpu();
  return detail::layer_exponents("all layers", sum, range());
}

inline double UnderflowReport::lost() const {
  const LayerExponents all = total();
  return all.zero < 1 ? all.lost / (1 - all.zero) : 0;
}

inline double suggest_loss_scale(const UnderflowReport& gradients, int margin) {
  const LayerExponents all = gradients.total();
  TORCH_CHECK(all.sampled > 0,
              "suggest_loss_scale: this report has no values; add gradients after backward()");
  const double scale = gradients.options().loss_scale;
  const ExponentRange range = gradients.range();
  const bool has_overflowed = all.non_finite > 0 || all.overflow > 0;
  // A value that became 0 was at most half of the smallest number.
  const int largest = all.largest().value_or(has_overflowed ? range.largest : range.smallest - 1);
  double exponent = std::floor(std::log2(scale)) + range.largest - margin - largest;
  if (has_overflowed) exponent = std::min(exponent, std::floor(std::log2(scale)) - 1);
  return std::exp2(std::min(exponent, 24.0));
}

inline std::ostream& operator<<(std::ostream& stream, const UnderflowReport& report) {
  const std::vector<int> widths = {-36, 10, 12, 12, 12, 12, 12, 10, 10};
  const auto power = [](std::optional<int> exponent) {
    return exponent ? "2^" + std::to_string(*exponent) : std::string("-");
  };
  const auto line = [&](const LayerExponents& layer) {
    const auto percent = [](double share) { return detail::digits(100 * share); };
    return detail::table_line(
        widths, {layer.layer, std::to_string(layer.sampled), percent(layer.zero),
                 percent(layer.lost), percent(layer.subnormal), percent(layer.overflow),
                 percent(layer.non_finite), power(layer.smallest()), power(layer.largest())});
  };
  const ExponentRange range = report.range();
  stream << "values in " << detail::dtype_name(report.dtype()) << ", 2^" << range.smallest
         << " to 2^" << range.largest << ", in percent of those sampled\n"
         << detail::table_line(widths, {"layer", "sampled", "zero", "lost", "subnormal", "overflow",
                                        "inf or NaN", "smallest", "largest"});
  for (const LayerExponents& layer : report.layers()) stream << line(layer);
  const LayerExponents all = report.total();
  stream << line(all);
  if (all.zero == 1 && all.sampled > 0) {
    const double suggested = suggest_loss_scale(report);
    stream << "every value is 0: with the loss scale "
           << detail::digits(report.options().loss_scale, 6) << " they are at most 2^"
           << range.smallest - 1
           << ", or the loss does not depend on these weights; a loss scale of "
           << detail::digits(suggested, 8) << " overflows no such value, and tells which\n";
  } else if (all.non_finite > 0 || all.overflow > 0) {
    stream << "a value is beyond the type's largest number, or was: the loss scale, "
           << detail::digits(report.options().loss_scale, 6) << ", should fall to "
           << detail::digits(suggest_loss_scale(report), 6) << " or less\n";
  } else if (const auto largest = all.largest()) {
    stream << "the loss scale, " << detail::digits(report.options().loss_scale, 6)
           << ", could change by 2^" << range.largest - *largest
           << " before the largest value overflows\n";
  }
  return stream;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
