/// \file
/// What tensors and dtypes hold, and what an op would return in a wider type.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly.h>
#include <mezzo/diagnose/detail/host_numbers.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether a tensor has numbers that could be inf or NaN.
inline bool is_readable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return false;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return false;
  return tensor.is_sparse() ? tensor._nnz() > 0 : tensor.has_storage() && tensor.numel() > 0;
}

inline std::vector<at::Tensor> tensors_in(OpArguments values) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Returns the values in a type that has the functions below; magnitudes of complex numbers.
inline at::Tensor ordered_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
  if (values.is_complex()) return values.abs();
  const bool is_narrow = values.element_size() == 1;  // float8 has no arithmetic
  return is_narrow ? values.to(at::kFloat) : values;
}

inline at::Tensor magnitudes(const at::Tensor& tensor) { return ordered_values(tensor).abs(); }

inline void set_ends(ValueRange& range, double minimum, double maximum, double smallest) {
  range.minimum = minimum;
  range.maximum = maximum;
  range.smallest = smallest;
  range.largest = std::max(std::abs(minimum), std::abs(maximum));
}

/// Counts inf and NaN, and takes the range of the finite values, by a second read of the tensor.
inline void count_non_finite(const at::Tensor& tensor, ValueRange& range) {
  const at::Tensor values = ordered_values(tensor);
  const at::Tensor is_finite = values.isfinite();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const at::Tensor known =
      stacked_on_host({values.isinf().sum().to(at::kDouble), values.isnan().sum().to(at::kDouble),
                       values.isneginf().sum().to(at::kDouble),
                       at::where(is_finite, values, kInf).min().to(at::kDouble),
                       at::where(is_finite, values, -kInf).max().to(at::kDouble),
                       at::where(is_finite, values.abs(), kInf).min().to(at::kDouble)});
  const double* const number = known.const_data_ptr<double>();
  range.infs = static_cast<std::int64_t>(number[0]);
  range.nans = static_cast<std::int64_t>(number[1]);
  range.negative_infs = static_cast<std::int64_t>(number[2]);
  if (!nonfinite_bits(number[3])) set_ends(range, number[3], number[4], number[5]);
}

/// Returns the range of each tensor; of one that is not readable an empty range. Waits for the
/// device once, and once more for each tensor that holds inf or NaN.
inline std::vector<ValueRange> value_ranges(const std::vector<at::Tensor>& tensors) {
  std::vector<ValueRange> ranges(tensors.size());
  std::vector<at::Tensor> ends;
  for (const at::Tensor& tensor : tensors) {
    if (!is_readable(tensor)) continue;
    const at::Tensor values = ordered_values(tensor);
    const auto [low, high] = at::aminmax(values);
    ends.push_back(low.to(at::kDouble));
    ends.push_back(high.to(at::kDouble));
    ends.push_back(values.abs().min().to(at::kDouble));
  }
  if (ends.empty()) return ranges;
  const at::Tensor known = stacked_on_host(std::move(ends));
  const double* number = known.const_data_ptr<double>();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_readable(tensors[i])) continue;
    ValueRange& range = ranges[i];
    range.dtype = tensors[i].scalar_type();
    range.sizes = tensors[i].sizes().vec();
    const double minimum = number[0], maximum = number[1];
    if (nonfinite_bits(minimum) || nonfinite_bits(maximum)) {
      count_non_finite(tensors[i], range);
    } else {
      set_ends(range, minimum, maximum, number[2]);
    }
    number += 3;
  }
  return ranges;
}

inline bool all_finite(const std::vector<ValueRange>& ranges) {
  for (const ValueRange& range : ranges) {
    if (!range.is_finite()) return false;
  }
  return true;
}

/// The type that an op of this dtype runs again in.
inline at::ScalarType wider_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// The magnitudes that a dtype rounds to inf, from half a step beyond its largest number on, and to
/// 0, up to half of its smallest. (c10's own conversions are inlined, and wrong under -ffast-math.)
struct RoundingEnds {
  double overflow = std::numeric_limits<double>::infinity();
  double underflow = 0;
};

inline RoundingEnds rounding_ends(at::ScalarType dtype) {
  if (dtype == at::kHalf) return {65520, 0x1p-25};
  if (dtype == at::kBFloat16) return {0x1.FFp+127, 0x1p-134};
  if (dtype == at::kFloat) return {0x1.FFFFFFp+127, 0x1p-150};
  return {};
}

inline bool overflows(double value, at::ScalarType dtype) {
  return !nonfinite_bits(value) && std::abs(value) >= rounding_ends(dtype).overflow;
}

inline bool vanishes(double value, at::ScalarType dtype) {
  return value != 0 && !nonfinite_bits(value) && std::abs(value) <= rounding_ends(dtype).underflow;
}

/// Returns an argument with its tensors copied in `wide`; an argument that is a dtype becomes it.
inline c10::IValue widened(const c10::IValue& value, const c10::Argument& argument,
                           at::ScalarType wide) {
  const auto copy = [wide](const at::Tensor& tensor) {
    const bool widens = tensor.defined() && tensor.is_floating_point();
    return widens ? tensor.detach().to(wide, /*non_blocking=*/false, /*copy=*/true) : tensor;
  };
  if (value.isTensor()) return copy(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(copy(tensor));
    return list;
  }
  const c10::TypePtr& type = argument.real_type();
  const auto* const optional = type->castRaw<c10::OptionalType>();
  const c10::Type& inner = optional != nullptr ? *optional->getElementType() : *type;
  const bool is_dtype = inner.kind() == c10::TypeKind::ScalarTypeType && value.isInt();
  if (is_dtype && c10::isFloatingType(value.toScalarType())) return static_cast<int64_t>(wide);
  return value;
}

/// Returns the ranges of the op's results when it runs in `wide`; none where that cannot be tried.
/// The op draws other random numbers then, and the program's generators stay as they were.
inline std::optional<std::vector<ValueRange>> run_again(const c10::OperatorHandle& op,
                                                        const std::vector<c10::IValue>& inputs,
                                                        at::ScalarType wide) {
  const c10::FunctionSchema& schema = op.schema();
  const bool is_libtorchs = schema.name().starts_with("aten::");  // not a collective, say
  if (!is_libtorchs || schema.arguments().size() != inputs.size()) return std::nullopt;
  std::optional<RandomState> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace();
  std::optional<std::vector<ValueRange>> ranges;
  try {
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      stack.push_back(widened(inputs[i], schema.arguments()[i], wide));
    }
    op.callBoxed(&stack);
    const std::vector<at::Tensor> results = tensors_in(OpArguments(stack.data(), stack.size()));
    if (!results.empty()) ranges = value_ranges(results);
  } catch (const std::exception&) {  // an op that knows only the narrow type, say
  }
  if (random) random->install();
  return ranges;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
