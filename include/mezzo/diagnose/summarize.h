/// \file
/// What tensors hold, in one read: the range of the finite values, and how many are inf or NaN; and
/// what a model's parameters are called.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A model with a name of its own among several.
struct NamedModel {
  std::string name;  ///< in front of the names of its parameters
  std::reference_wrapper<const torch::nn::Module> model;  ///< outlives what it is given to
};

/// Returns all parameters of a floating dtype, as `named_parameters` orders them, each once.
inline NamedTensors name_parameters(const torch::nn::Module& model) {
  return detail::NamedOnce().floating(model.named_parameters());
}

/// Returns all parameters of a floating dtype of `models`, each once: "generator.0.weight".
inline NamedTensors name_parameters(const std::vector<NamedModel>& models) {
  NamedTensors all;
  detail::NamedOnce once;
  for (const auto& [name, model] : models) {
    for (auto& [own, parameter] : once.floating(model.get().named_parameters())) {
      all.emplace_back(name + "." + own, std::move(parameter));
    }
  }
  return all;
}

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

/// What one tensor holds. The range is that of the finite values, of complex ones their magnitudes;
/// 0 where there are none.
struct TensorSummary {
  std::string name = {};  ///< of a parameter, where whoever asked knows it
  /// The tensor's dtype; Undefined of one that holds no floating numbers, which is not read.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes = {};  ///< the tensor's shape
  std::int64_t count = 0;                ///< how many values were read; of a sparse tensor its own
  double minimum = 0;                    ///< with sign
  double maximum = 0;                    ///< with sign
  double smallest = 0;                   ///< in magnitude
  double largest = 0;                    ///< in magnitude
  std::int64_t infs = 0;                 ///< of either sign
  std::int64_t negative_infs = 0;        ///< how many of `infs` are -inf
  std::int64_t nans = 0;                 ///< how many values are NaN

  /// Returns whether no value is inf or NaN.
  bool is_finite() const { return infs + nans == 0; }

  /// Returns "encoder.weight float16 [8, 4] -3.1 to 3.2, |x| from 0.001 1 inf".
  std::string to_string() const {
    using detail::digits;
    std::string text = (name.empty() ? name : name + " ") + std::string(detail::dtype_name(dtype));
    text += " " + detail::sizes_text(sizes);
    if (infs + nans < count) {
      text += " " + digits(minimum) + " to " + digits(maximum);
      if (minimum < 0 && maximum > 0) text += ", |x| from " + digits(smallest);
    }
    if (infs > 0) text += " " + std::to_string(infs) + (negative_infs == infs ? " -inf" : " inf");
    if (nans > 0) text += " " + std::to_string(nans) + " NaN";
    return text;
  }
};

namespace detail {

inline bool all_finite(const std::vector<TensorSummary>& summaries) {
  return std::all_of(summaries.begin(), summaries.end(),
                     [](const TensorSummary& summary) { return summary.is_finite(); });
}

inline std::string summaries_text(const std::vector<TensorSummary>& summaries) {
  std::string text;
  for (const TensorSummary& summary : summaries) {
    if (summary.count == 0) continue;
    text += (text.empty() ? "" : "; ") + summary.to_string();
  }
  return text.empty() ? "nothing" : text;
}

/// Whether a tensor has numbers that could be inf or NaN, and kernels that read them.
inline bool is_readable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return false;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return false;
  return tensor.is_sparse() ? tensor._nnz() > 0 : tensor.has_storage() && tensor.numel() > 0;
}

/// Returns the values in a type that has arithmetic; magnitudes of complex numbers.
inline at::Tensor ordered_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor.detach();
  if (values.is_complex()) return values.abs();
  return values.element_size() == 1 ? values.to(at::kFloat) : values;  // float8
}

// c10's own conversions are inlined, and wrong under -ffast-math.
inline bool has_rounding_ends(double value, at::ScalarType dtype) {
  return !nonfinite_bits(value) &&
         (dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat);
}

/// Returns whether a cast to `dtype` makes inf of a finite value: one that is half a step beyond
/// the largest number.
inline bool overflows(double value, at::ScalarType dtype) {
  if (!has_rounding_ends(value, dtype)) return false;
  const ExponentRange range = ExponentRange::of(dtype);
  const double step = std::ldexp(1, range.smallest - range.normal);
  return std::abs(value) >= std::ldexp(2 - step / 2, range.largest);
}

/// Returns whether a cast to `dtype` makes 0 of another value: one up to half of the smallest
/// number.
inline bool vanishes(double value, at::ScalarType dtype) {
  return value != 0 && has_rounding_ends(value, dtype) &&
         std::abs(value) <= std::ldexp(1, ExponentRange::of(dtype).smallest - 1);
}

}  // namespace detail

/// Returns a summary of each tensor; an empty one of a tensor without floating numbers. Writes
/// nothing. Waits for the device once.
inline std::vector<TensorSummary> summarize(const std::vector<at::Tensor>& tensors) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const at::NoGradGuard no_grad;
  std::vector<TensorSummary> summaries(tensors.size());
  std::vector<at::Tensor> counted;
  for (const at::Tensor& tensor : tensors) {
    if (!detail::is_readable(tensor)) continue;
    const at::Tensor values = detail::ordered_values(tensor), is_finite = values.isfinite();
    for (const at::Tensor& number :
         {at::where(is_finite, values, kInf).min(), at::where(is_finite, values, -kInf).max(),
          at::where(is_finite, values.abs(), kInf).min(), values.isinf().sum(),
          values.isneginf().sum(), values.isnan().sum()}) {
      const at::Device device = counted.empty() ? number.device() : counted.front().device();
      counted.push_back(number.to(device, at::kDouble));
    }
  }
  if (counted.empty()) return summaries;
  const at::Tensor known = at::stack(counted).cpu();
  const double* number = known.const_data_ptr<double>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!detail::is_readable(tensors[i])) continue;
    TensorSummary& summary = summaries[i];
    summary.dtype = tensors[i].scalar_type();
    summary.sizes = tensors[i].sizes().vec();
    summary.count = tensors[i].is_sparse() ? tensors[i]._values().numel() : tensors[i].numel();
    summary.infs = static_cast<std::int64_t>(number[3]);
    summary.negative_infs = static_cast<std::int64_t>(number[4]);
    summary.nans = static_cast<std::int64_t>(number[5]);
    if (summary.infs + summary.nans < summary.count) {
      summary.minimum = number[0];
      summary.maximum = number[1];
      summary.smallest = number[2];
      summary.largest = std::max(std::abs(number[0]), std::abs(number[1]));
    }
    number += 6;
  }
  return summaries;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
