/// \file
/// MixedPrecisionPolicy as a value: the dtypes of a model's weights, of its computation and of its
/// results.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iosfwd>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a tensor of one of the four dtypes as `dtype`, and any other as it is.
inline at::Tensor cast_if_training_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_training_dtype(tensor.scalar_type()) ? tensor.to(dtype) : tensor;
}

/// Returns `value` with its tensors cast to the dtype of a MixedPrecisionPolicy's `member`.
template <class T>
OwningType<T> cast_tensors(T&& value, const char* member, at::ScalarType dtype) {
  TORCH_CHECK(is_training_dtype(dtype), "MixedPrecisionPolicy: ", member, " is ", dtype_name(dtype),
              "; it should be float32, bfloat16, float16 or float64");
  static_assert(
      contains_tensors<OwningType<T>>(),
      "mezzo::MixedPrecisionPolicy: this type holds no tensors that a cast could reach; give it a "
      "tensor, a container of tensors, or a struct with tensors()");
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    return cast_if_training_dtype(tensor, dtype);
  });
}

}  // namespace detail

/// The dtypes of a model's weights, of its computation and of its results, each float32, bfloat16,
/// float16 or float64. jmp calls it a Policy.
///
///     mezzo::MixedPrecisionPolicy mixed{.compute_dtype = torch::kBFloat16};           // the others are float32
///     auto precision = mezzo::MixedPrecisionPolicy::parse("params=float32,compute=bfloat16,output=float32");
///     auto output = precision.cast_to_output(net(precision.cast_to_compute(batch)));
///
/// Casts are differentiable, keep the tensor's device, and do not copy a tensor that has the dtype
/// already. Any thread.
struct MixedPrecisionPolicy {
  at::ScalarType param_dtype = at::ScalarType::Float;    ///< what the weights are kept in
  at::ScalarType compute_dtype = at::ScalarType::Float;  ///< what the forward pass runs in
  at::ScalarType output_dtype = at::ScalarType::Float;   ///< what the results are handed on in

  /// Parses the text that `to_string` writes, and jmp's short forms: "p=f32,c=bf16,o=f32", or one
  /// dtype for all three, "bfloat16". Order and white space do not matter. Defaults are jmp's:
  /// params is float32, compute equals params, output equals compute. Dtypes: float32, f32, float,
  /// full; bfloat16, bf16; float16, f16, half (also on devices where jmp would take bfloat16);
  /// float64, f64, double.
  /// \throws c10::Error naming the part that was not understood, and the accepted forms
  static MixedPrecisionPolicy parse(std::string_view text);

  /// Returns `value` with its float32, bfloat16, float16 and float64 tensors cast to `param_dtype`.
  /// All other tensors (integers, bool, complex, float8, quantized, undefined) stay as they are. A
  /// value is a tensor, or an optional, pair, tuple, array, vector or map of values, nested to any
  /// depth, or a struct that lists its tensors (`auto tensors() { return std::tie(logits, loss);
  /// }`). An lvalue is copied, an rvalue moved from; an ArrayRef becomes a vector. To cast a
  /// module, use its `to(dtype)`.
  /// \throws c10::Error if `param_dtype` is none of the four dtypes
  template <class T>
  [[nodiscard]] auto cast_to_param(T&& value) const {
    return detail::cast_tensors(std::forward<T>(value), "param_dtype", param_dtype);
  }
  /// Returns `value` with its tensors cast to `compute_dtype`, as `cast_to_param` casts them.
  template <class T>
  [[nodiscard]] auto cast_to_compute(T&& value) const {
    return detail::cast_tensors(std::forward<T>(value), "compute_dtype", compute_dtype);
  }
  /// Returns `value` with its tensors cast to `output_dtype`, as `cast_to_param` casts them.
  template <class T>
  [[nodiscard]] auto cast_to_output(T&& value) const {
    return detail::cast_tensors(std::forward<T>(value), "output_dtype", output_dtype);
  }

  /// Returns a text such as "params=float32,compute=bfloat16,output=float32".
  std::string to_string() const;

  friend bool operator==(const MixedPrecisionPolicy&, const MixedPrecisionPolicy&) = default;
};

inline std::ostream& operator<<(std::ostream& stream, const MixedPrecisionPolicy& precision);

inline MixedPrecisionPolicy MixedPrecisionPolicy::parse(std::string_view text) {
  const auto trimmed = [](std::string_view part) {
    constexpr std::string_view kBlanks = " \t\r\n";
    const auto first = std::min(part.find_first_not_of(kBlanks), part.size());
    return part.substr(first, part.find_last_not_of(kBlanks) + 1 - first);
  };
  const auto dtype = [&](std::string_view name) {
    name = trimmed(name);
    const auto found = detail::parse_dtype(name);
    TORCH_CHECK(found.has_value(), "MixedPrecisionPolicy \"", text, "\": \"", name,
                "\" is not a dtype; known are ", detail::kKnownDtypes);
    return *found;
  };
  if (text.find_first_of("=,") == std::string_view::npos) {
    return {.param_dtype = dtype(text), .compute_dtype = dtype(text), .output_dtype = dtype(text)};
  }
  std::optional<at::ScalarType> param, compute, output;
  for (std::string_view rest = text;;) {
    const auto comma = rest.find(',');
    const auto part = trimmed(rest.substr(0, comma));
    const auto equals = part.find('=');
    TORCH_CHECK(equals != std::string_view::npos, "MixedPrecisionPolicy \"", text, "\": \"", part,
                "\" should be key=dtype; keys are params (p), compute (c) and output (o)");
    const auto key = trimmed(part.substr(0, equals));
    const bool is_param = key == "params" || key == "param" || key == "p";
    const bool is_compute = key == "compute" || key == "c";
    TORCH_CHECK(is_param || is_compute || key == "output" || key == "o", "MixedPrecisionPolicy \"",
                text, "\": \"", key,
                "\" is not a key; known are params (p), compute (c) and output (o)");
    auto& target = is_param ? param : is_compute ? compute : output;
    TORCH_CHECK(!target.has_value(), "MixedPrecisionPolicy \"", text, "\": \"", key,
                "\" is given twice; leave one of them out");
    target = dtype(part.substr(equals + 1));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  const at::ScalarType weights = param.value_or(at::ScalarType::Float);
  const at::ScalarType computed = compute.value_or(weights);
  return {
      .param_dtype = weights, .compute_dtype = computed, .output_dtype = output.value_or(computed)};
}

inline std::string MixedPrecisionPolicy::to_string() const {
  return c10::str("params=", detail::dtype_name(param_dtype),
                  ",compute=", detail::dtype_name(compute_dtype),
                  ",output=", detail::dtype_name(output_dtype));
}

/// Writes `to_string()`.
inline std::ostream& operator<<(std::ostream& stream, const MixedPrecisionPolicy& precision) {
  return stream << precision.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
