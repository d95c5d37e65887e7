/// \file
/// MixedPrecisionPolicy: the dtypes of a model's weights, computation and results.
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

/// Casts a tensor of a training dtype (float32, bfloat16, float16, float64) to `dtype`.
inline at::Tensor cast_if_training_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_training_dtype(tensor.scalar_type()) ? tensor.to(dtype) : tensor;
}

/// Returns `value` with its tensors cast to `dtype`, the MixedPrecisionPolicy's `member`.
template <class T>
OwningType<T> cast_tensors(T&& value, const char* member, at::ScalarType dtype) {
  TORCH_CHECK(is_training_dtype(dtype), "MixedPrecisionPolicy: ", member, " is ", dtype_name(dtype),
              "; it should be float32, bfloat16, float16 or float64");
  static_assert(
      contains_tensors<OwningType<T>>(),
      "mezzo::MixedPrecisionPolicy: this type contains no tensors; pass a tensor, a container "
      "of tensors, or a struct with tensors()");
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    return cast_if_training_dtype(tensor, dtype);
  });
}

}  // namespace detail

/// The dtypes of a model's weights, computation and results, each float32, bfloat16, float16 or
/// float64. jmp's Policy:
///
///     mezzo::MixedPrecisionPolicy mixed{.compute_dtype = torch::kBFloat16};
///     auto policy = mezzo::MixedPrecisionPolicy::parse("p=f32,c=bf16,o=f32");
///     auto output = policy.cast_to_output(net(policy.cast_to_compute(batch)));
///
/// Casts are differentiable, keep the device, and return the same tensor if it has the dtype.
/// Thread-safe.
struct MixedPrecisionPolicy {
  at::ScalarType param_dtype = at::ScalarType::Float;    ///< dtype of the weights
  at::ScalarType compute_dtype = at::ScalarType::Float;  ///< dtype of the forward pass
  at::ScalarType output_dtype = at::ScalarType::Float;   ///< dtype of the results

  /// Parses the text of `to_string`, jmp's short form "p=f32,c=bf16,o=f32", or one dtype for all
  /// three, "bfloat16". Order and white space do not matter. Defaults are jmp's: params is float32,
  /// compute equals params, output equals compute. Dtypes: float32, f32, float, full; bfloat16,
  /// bf16; float16, f16, half; float64, f64, double.
  /// \throws c10::Error with the invalid part and the accepted forms
  static MixedPrecisionPolicy parse(std::string_view text);

  /// Returns `value` with its float32, bfloat16, float16 and float64 tensors cast to `param_dtype`.
  /// Other tensors (integers, bool, complex, float8, quantized, undefined) are not cast. A value is
  /// a tensor, or an optional, pair, tuple, array, vector or map of values, nested to any depth, or
  /// a struct with `auto tensors() { return std::tie(logits, loss); }`. An lvalue is copied, an
  /// rvalue moved; an ArrayRef becomes a vector. Use `to(dtype)` to cast a module.
  /// \throws c10::Error if `param_dtype` is not one of the four dtypes
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

inline std::ostream& operator<<(std::ostream& stream, const MixedPrecisionPolicy& policy);

inline MixedPrecisionPolicy MixedPrecisionPolicy::parse(std::string_view text) {
  const auto trim = [](std::string_view part) {
    constexpr std::string_view kBlanks = " \t\r\n";
    const auto first = std::min(part.find_first_not_of(kBlanks), part.size());
    return part.substr(first, part.find_last_not_of(kBlanks) + 1 - first);
  };
  const auto dtype = [&](std::string_view name) {
    name = trim(name);
    const auto parsed = detail::parse_dtype(name);
    TORCH_CHECK(parsed.has_value(), "MixedPrecisionPolicy \"", text, "\": \"", name,
                "\" is not a dtype; choose from ", detail::kKnownDtypes);
    return *parsed;
  };
  if (text.find_first_of("=,") == std::string_view::npos) {
    return {.param_dtype = dtype(text), .compute_dtype = dtype(text), .output_dtype = dtype(text)};
  }
  std::optional<at::ScalarType> param, compute, output;
  for (std::string_view rest = text;;) {
    const auto comma = rest.find(',');
    const auto part = trim(rest.substr(0, comma));
    const auto equals = part.find('=');
    TORCH_CHECK(equals != std::string_view::npos, "MixedPrecisionPolicy \"", text, "\": \"", part,
                "\" should be key=dtype; keys are params (p), compute (c) and output (o)");
    const auto key = trim(part.substr(0, equals));
    const bool is_param = key == "params" || key == "param" || key == "p";
    const bool is_compute = key == "compute" || key == "c";
    TORCH_CHECK(is_param || is_compute || key == "output" || key == "o", "MixedPrecisionPolicy \"",
                text, "\": \"", key,
                "\" is not a key; choose from params (p), compute (c) and output (o)");
    auto& target = is_param ? param : is_compute ? compute : output;
    TORCH_CHECK(!target.has_value(), "MixedPrecisionPolicy \"", text, "\": \"", key,
                "\" is specified twice; remove one of them");
    target = dtype(part.substr(equals + 1));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  const at::ScalarType param_dtype = param.value_or(at::ScalarType::Float);
  const at::ScalarType compute_dtype = compute.value_or(param_dtype);
  return {.param_dtype = param_dtype,
          .compute_dtype = compute_dtype,
          .output_dtype = output.value_or(compute_dtype)};
}

inline std::string MixedPrecisionPolicy::to_string() const {
  return c10::str("params=", detail::dtype_name(param_dtype),
                  ",compute=", detail::dtype_name(compute_dtype),
                  ",output=", detail::dtype_name(output_dtype));
}

/// Writes `to_string()`.
inline std::ostream& operator<<(std::ostream& stream, const MixedPrecisionPolicy& policy) {
  return stream << policy.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
