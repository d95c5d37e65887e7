/// \file
/// What every tool of diagnose/ sees and says: what tensors hold, in one read, and what a model's
/// parameters are called; a Finding, and numbers and tables as text, in any locale.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How bad a finding is.
enum class FindingSeverity : std::uint8_t {
  note,     ///< good to know
  warning,  ///< costs speed, memory or digits
  error,    ///< makes inf or NaN, or throws
};

/// Returns "note", "warning" or "error".
inline std::string_view to_string(FindingSeverity severity) {
  constexpr std::array<std::string_view, 3> names = {"note", "warning", "error"};
  return names.at(static_cast<std::size_t>(severity));
}

/// One thing that a tool found. Where the evidence does not decide, `reason` says "not known", and
/// `remedy` what to look at next.
struct Finding {
  FindingSeverity severity = FindingSeverity::note;  ///< how bad it is
  std::string check = {};                            ///< what it is about: "range"
  std::string where = {};   ///< a module, parameter, op or step: "after encoder.0"
  std::string reason = {};  ///< what was seen, with numbers, and why it matters
  std::string remedy = {};  ///< what to do, or a line of code; empty where nothing is known to help

  /// Returns "where: reason; remedy", in one line.
  std::string message() const {
    return where + ": " + reason + (remedy.empty() ? "" : "; " + remedy);
  }
};

/// Writes a finding for a terminal of 100 columns, with the remedy unbroken on a line of its own.
inline std::ostream& operator<<(std::ostream& stream, const Finding& finding) {
  constexpr std::size_t kWidth = 100, kIndent = 11;
  std::string text, line = "  " + std::string(to_string(finding.severity));
  line.resize(kIndent, ' ');
  std::istringstream words(finding.where + ": " + finding.reason);
  for (std::string word; words >> word; line += word) {
    if (line.size() > kIndent && line.size() + 1 + word.size() > kWidth) {
      text += line + "\n";
      line.assign(kIndent, ' ');
    } else if (line.size() > kIndent) {
      line += ' ';
    }
  }
  text += line + "\n";
  if (!finding.remedy.empty()) text += std::string(kIndent, ' ') + "> " + finding.remedy + "\n";
  return stream << text;
}

namespace detail {

/// Returns `value` by std::to_chars with these arguments; "nan" of either sign.
template <class... Format>
std::string format_number(double value, Format... format) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format...).ptr;
  const std::string number(text.data(), end);
  return number == "-nan" ? "nan" : number;
}

/// Returns `value` in so many significant digits: "0.0123", "1.2e-05", "inf", "nan".
inline std::string format_significant(double value, int significant = 3) {
  return format_number(value, std::chars_format::general, significant);
}

/// Returns "[8, 4]".
inline std::string format_sizes(c10::ArrayRef<std::int64_t> sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// Returns the name of the module that a parameter belongs to; "(model)" for the model itself.
inline std::string layer_name(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "(model)" : parameter.substr(0, dot);
}

/// Returns a line of a table on a terminal. Each cell is as wide as `widths` says, aligned right,
/// or left where the width is negative; a longer cell moves the cells behind it.
inline std::string format_row(const std::vector<int>& widths,
                              const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto width = static_cast<std::size_t>(std::abs(widths[i]));
    const std::string gap(width - std::min(width, cells[i].size()), ' ');
    line += widths[i] < 0 ? cells[i] + gap : gap + cells[i];
  }
  return line + "\n";
}

}  // namespace detail

/// A model with a name of its own among several.
struct NamedModel {
  std::string name;  ///< in front of the names of its parameters
  std::reference_wrapper<const torch::nn::Module> model;  ///< outlives what it is given to
};

namespace detail {

/// Returns the floating tensors of `list(model)` for all models, each once, as "model.tensor".
template <class List>
TensorsByName name_tensors(const std::vector<NamedModel>& models, const List& list) {
  TensorsByName all;
  UniqueTensorCollector once;
  for (const auto& [name, model] : models) {
    for (auto& [own, tensor] : once.collect_floating(list(model.get()))) {
      all.emplace_back(name + "." + own, std::move(tensor));
    }
  }
  return all;
}

}  // namespace detail

/// Returns all parameters of a floating dtype, as `named_parameters` orders them, each once.
inline TensorsByName named_float_parameters(const torch::nn::Module& model) {
  return detail::UniqueTensorCollector().collect_floating(model.named_parameters());
}

/// Returns all parameters of a floating dtype of `models`, each once: "generator.0.weight".
inline TensorsByName named_float_parameters(const std::vector<NamedModel>& models) {
  return detail::name_tensors(
      models, [](const torch::nn::Module& model) { return model.named_parameters(); });
}

/// Returns all buffers of a floating dtype, each once.
inline TensorsByName named_float_buffers(const torch::nn::Module& model) {
  return detail::UniqueTensorCollector().collect_floating(model.named_buffers());
}

/// Returns all buffers of a floating dtype of `models`, each once: "generator.1.running_mean".
inline TensorsByName named_float_buffers(const std::vector<NamedModel>& models) {
  return detail::name_tensors(models,
                              [](const torch::nn::Module& model) { return model.named_buffers(); });
}

/// What a floating type can hold, by the power of two below a value's magnitude.
struct ExponentRange {
  int min_subnormal = 0;  ///< of the smallest subnormal number: -24 of half
  int min_normal = 0;     ///< of the smallest normal number: -14
  int max = 0;            ///< of the largest number: 15

  /// Returns the range of half, bfloat16, float32 or float8 (e4m3fn, e5m2).
  /// \throws c10::Error for another dtype
  static ExponentRange from_dtype(at::ScalarType dtype) {
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
  std::int64_t numel = 0;                ///< how many values were read; of a sparse tensor its own
  double min = 0;                        ///< with sign
  double max = 0;                        ///< with sign
  double min_abs = 0;                    ///< in magnitude
  double max_abs = 0;                    ///< in magnitude
  std::int64_t infs = 0;                 ///< of either sign
  std::int64_t negative_infs = 0;        ///< how many of `infs` are -inf
  std::int64_t nans = 0;                 ///< how many values are NaN

  /// Returns whether no value is inf or NaN.
  bool is_finite() const { return infs + nans == 0; }

  /// Returns "encoder.weight float16 [8, 4] -3.1 to 3.2, |x| from 0.001 1 inf".
  std::string to_string() const {
    using detail::format_significant;
    std::string text = (name.empty() ? name : name + " ") + std::string(detail::dtype_name(dtype));
    text += " " + detail::format_sizes(sizes);
    if (infs + nans < numel) {
      text += " " + format_significant(min) + " to " + format_significant(max);
      if (min < 0 && max > 0) text += ", |x| from " + format_significant(min_abs);
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

inline std::string format_summaries(const std::vector<TensorSummary>& summaries) {
  std::string text;
  for (const TensorSummary& summary : summaries) {
    if (summary.numel == 0) continue;
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
  return !is_nonfinite(value) &&
         (dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat);
}

/// Returns whether a cast to `dtype` makes inf of a finite value: one that is half a step beyond
/// the largest number.
inline bool overflows(double value, at::ScalarType dtype) {
  if (!has_rounding_ends(value, dtype)) return false;
  const ExponentRange range = ExponentRange::from_dtype(dtype);
  const double step = std::ldexp(1, range.min_subnormal - range.min_normal);
  return std::abs(value) >= std::ldexp(2 - step / 2, range.max);
}

/// Returns whether a cast to `dtype` makes 0 of another value: one up to half of the smallest
/// number.
inline bool underflows(double value, at::ScalarType dtype) {
  return value != 0 && has_rounding_ends(value, dtype) &&
         std::abs(value) <= std::ldexp(1, ExponentRange::from_dtype(dtype).min_subnormal - 1);
}

}  // namespace detail

/// Returns a summary of each tensor; an empty one of a tensor without floating numbers. Writes
/// nothing. Waits for the device once, and again for each tensor that holds inf or NaN.
inline std::vector<TensorSummary> summarize(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<TensorSummary> summaries(tensors.size());
  std::vector<at::Tensor> ends;
  for (const at::Tensor& tensor : tensors) {
    if (!detail::is_readable(tensor)) continue;
    const at::Tensor values = detail::ordered_values(tensor);
    const auto [low, high] = at::aminmax(values);
    ends.insert(ends.end(), {low, high, values.abs().min()});
  }
  if (ends.empty()) return summaries;
  for (at::Tensor& end : ends) end = end.to(ends.front().device(), at::kDouble);
  const at::Tensor known = at::stack(ends).cpu();
  const double* number = known.const_data_ptr<double>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!detail::is_readable(tensors[i])) continue;
    TensorSummary& summary = summaries[i];
    const at::Tensor values = detail::ordered_values(tensors[i]);
    if (detail::is_nonfinite(number[0]) || detail::is_nonfinite(number[1])) {
      summary = summarize({values.masked_select(values.isfinite())}).front();
      summary.infs = values.isinf().sum().item<int64_t>();
      summary.negative_infs = values.isneginf().sum().item<int64_t>();
      summary.nans = values.isnan().sum().item<int64_t>();
    } else {
      summary.min = number[0];
      summary.max = number[1];
      summary.min_abs = number[2];
      summary.max_abs = std::max(std::abs(number[0]), std::abs(number[1]));
    }
    summary.dtype = tensors[i].scalar_type();
    summary.sizes = tensors[i].sizes().vec();
    summary.numel = values.numel();
    number += 3;
  }
  return summaries;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
