/// \file
/// TensorSummary: range of a tensor's values, and how many are inf or NaN. ExponentRange: range of
/// a dtype.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Representable range of a floating dtype, as exponents e of 2^e <= |value| < 2^(e + 1).
struct ExponentRange {
  int min_subnormal = 0;  ///< of the smallest subnormal number; -24 for float16
  int min_normal = 0;     ///< of the smallest normal number; -14 for float16
  int max = 0;            ///< of the largest finite number; 15 for float16

  /// Returns the range of float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
  /// \throws c10::Error for any other dtype
  static ExponentRange from_dtype(at::ScalarType dtype) {
    if (dtype == at::kHalf) return {-24, -14, 15};
    if (dtype == at::kBFloat16) return {-133, -126, 127};
    if (dtype == at::kFloat8_e4m3fn) return {-9, -6, 8};
    if (dtype == at::kFloat8_e5m2) return {-16, -14, 15};
    TORCH_CHECK(dtype == at::kFloat, "ExponentRange: unsupported dtype ", dtype,
                "; use torch::kHalf, torch::kBFloat16, torch::kFloat or a float8 dtype");
    return {-149, -126, 127};
  }
};

/// Range of a tensor's values, and how many are inf or NaN. The range is over the finite values
/// (over magnitudes for complex dtypes), and 0 if there are none.
struct TensorSummary {
  std::string name = {};  ///< of the parameter, if known
  /// The tensor's dtype; Undefined for tensors without floating-point values, which are not read.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes = {};  ///< shape
  std::int64_t numel = 0;                ///< values read; for sparse tensors the stored ones
  double min = 0;                        ///< smallest value
  double max = 0;                        ///< largest value
  double min_abs = 0;                    ///< smallest magnitude
  double max_abs = 0;                    ///< largest magnitude
  std::int64_t infs = 0;                 ///< number of inf and -inf
  std::int64_t negative_infs = 0;        ///< number of -inf
  std::int64_t nans = 0;                 ///< number of NaN

  /// Returns whether no value is inf or NaN.
  bool is_finite() const { return infs + nans == 0; }

  /// Returns "encoder.weight float16 [8, 4] in [-3.1, 3.2], |x| >= 0.001, 1 inf, 2 NaN".
  std::string to_string() const {
    using detail::format_significant;
    std::string text = (name.empty() ? name : name + " ") + std::string(detail::dtype_name(dtype));
    text += " " + detail::format_sizes(sizes);
    if (infs + nans < numel) {
      text += " in [" + format_significant(min) + ", " + format_significant(max) + "]";
      if (min < 0 && max > 0) text += ", |x| >= " + format_significant(min_abs);
    }
    if (infs > 0) text += ", " + std::to_string(infs) + (negative_infs == infs ? " -inf" : " inf");
    if (nans > 0) text += ", " + std::to_string(nans) + " NaN";
    return text;
  }
};

namespace detail {

inline bool all_finite(const std::vector<TensorSummary>& summaries) {
  return std::all_of(summaries.begin(), summaries.end(),
                     [](const TensorSummary& summary) { return summary.is_finite(); });
}

/// Returns the summaries of non-empty tensors, separated by "; "; "none" if there are none.
inline std::string format_summaries(const std::vector<TensorSummary>& summaries) {
  std::string text;
  for (const TensorSummary& summary : summaries) {
    if (summary.numel == 0) continue;
    text += (text.empty() ? "" : "; ") + summary.to_string();
  }
  return text.empty() ? "none" : text;
}

/// Returns whether a tensor has values that may be inf or NaN, and kernels to read them.
inline bool is_readable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return false;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return false;
  return tensor.is_sparse() ? tensor._nnz() > 0 : tensor.has_storage() && tensor.numel() > 0;
}

/// Returns the values in a dtype that has comparisons; magnitudes for complex dtypes.
inline at::Tensor comparable_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor.detach();
  if (values.is_complex()) return values.abs();
  return values.element_size() == 1 ? values.to(at::kFloat) : values;  // float8
}

// overflows() and underflows() compute the rounding themselves: c10's conversions are inlined, and
// wrong under -ffast-math.
inline bool rounds_to_nearest_even(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

/// Returns whether casting the finite `value` to `dtype` gives inf: from half a step above the
/// largest finite number on.
inline bool overflows(double value, at::ScalarType dtype) {
  if (is_nonfinite(value) || !rounds_to_nearest_even(dtype)) return false;
  const ExponentRange range = ExponentRange::from_dtype(dtype);
  const double step = std::ldexp(1, range.min_subnormal - range.min_normal);
  return std::abs(value) >= std::ldexp(2 - step / 2, range.max);
}

/// Returns whether casting the nonzero `value` to `dtype` gives 0: up to half of the smallest
/// subnormal number.
inline bool underflows(double value, at::ScalarType dtype) {
  if (value == 0 || is_nonfinite(value) || !rounds_to_nearest_even(dtype)) return false;
  return std::abs(value) <= std::ldexp(1, ExponentRange::from_dtype(dtype).min_subnormal - 1);
}

/// Returns the name of the first tensor that contains inf or NaN; empty if none does. Synchronizes
/// with the device.
inline std::string find_nonfinite(const TensorsByName& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (is_readable(tensor) && !comparable_values(tensor).isfinite().all().item<bool>()) {
      return name;
    }
  }
  return {};
}

}  // namespace detail

/// Returns a summary of each tensor; an empty one for tensors without floating-point values. Does
/// not modify the tensors. Synchronizes with the device once, and again for each tensor that
/// contains inf or NaN.
inline std::vector<TensorSummary> summarize(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<TensorSummary> summaries(tensors.size());
  std::vector<at::Tensor> ranges;  // min, max and min_abs of each readable tensor
  for (const at::Tensor& tensor : tensors) {
    if (!detail::is_readable(tensor)) continue;
    const at::Tensor values = detail::comparable_values(tensor);
    const auto [min, max] = at::aminmax(values);
    ranges.insert(ranges.end(), {min, max, values.abs().min()});
  }
  if (ranges.empty()) return summaries;
  for (at::Tensor& value : ranges) value = value.to(ranges.front().device(), at::kDouble);
  const at::Tensor host_ranges = at::stack(ranges).cpu();
  const double* range = host_ranges.const_data_ptr<double>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!detail::is_readable(tensors[i])) continue;
    TensorSummary& summary = summaries[i];
    const at::Tensor values = detail::comparable_values(tensors[i]);
    if (detail::is_nonfinite(range[0]) || detail::is_nonfinite(range[1])) {
      summary = summarize({values.masked_select(values.isfinite())}).front();
      summary.infs = values.isinf().sum().item<int64_t>();
      summary.negative_infs = values.isneginf().sum().item<int64_t>();
      summary.nans = values.isnan().sum().item<int64_t>();
    } else {
      summary.min = range[0];
      summary.max = range[1];
      summary.min_abs = range[2];
      summary.max_abs = std::max(std::abs(range[0]), std::abs(range[1]));
    }
    summary.dtype = tensors[i].scalar_type();
    summary.sizes = tensors[i].sizes().vec();
    summary.numel = values.numel();
    range += 3;
  }
  return summaries;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
