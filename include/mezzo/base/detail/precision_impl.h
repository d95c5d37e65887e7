/// \file
/// Precision: from and to text, and its casts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/precision.h>

#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_precision_dtype(const char* member, at::ScalarType dtype) {
  TORCH_CHECK(is_training_dtype(dtype), "Precision: ", member, " is ", dtype_name(dtype),
              "; it should be float32, bfloat16, float16 or float64");
}

inline std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const auto first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

/// What a precision's text says so far.
struct PrecisionText {
  std::string_view whole;
  std::optional<at::ScalarType> param{}, compute{}, output{};

  at::ScalarType dtype(std::string_view name) const {
    const auto dtype = dtype_named(name);
    TORCH_CHECK(dtype.has_value(), "Precision \"", whole, "\": \"", name,
                "\" is not a dtype; known are ", kKnownDtypes);
    return *dtype;
  }

  std::optional<at::ScalarType>& dtype_of(std::string_view key) {
    if (key == "params" || key == "param" || key == "p") return param;
    if (key == "compute" || key == "c") return compute;
    TORCH_CHECK(key == "output" || key == "o", "Precision \"", whole, "\": \"", key,
                "\" is not a key; known are params (p), compute (c) and output (o)");
    return output;
  }

  void read_part(std::string_view part) {
    const auto equals = part.find('=');
    TORCH_CHECK(equals != std::string_view::npos, "Precision \"", whole, "\": \"", part,
                "\" should be key=dtype; keys are params (p), compute (c) and output (o)");
    const auto key = trimmed(part.substr(0, equals));
    auto& target = dtype_of(key);
    TORCH_CHECK(!target.has_value(), "Precision \"", whole, "\": \"", key,
                "\" says again what an earlier part says; leave one of them out");
    target = dtype(trimmed(part.substr(equals + 1)));
  }
};

template <class T>
OwningType<T> cast_tensors(T&& value, at::ScalarType dtype) {
  static_assert(carries_tensors<OwningType<T>>(),
                "mezzo::Precision: this type holds no tensors that a cast could reach; give it a "
                "tensor, a container of tensors, or a struct with tensors()");
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    const bool casts = tensor.defined() && is_training_dtype(tensor.scalar_type());
    return casts ? tensor.to(dtype) : tensor;
  });
}

}  // namespace detail

inline Precision::Precision(const PrecisionDtypes& dtypes) : dtypes_(dtypes) {
  detail::check_precision_dtype("param", dtypes.param);
  detail::check_precision_dtype("compute", dtypes.compute);
  detail::check_precision_dtype("output", dtypes.output);
}

inline Precision Precision::parse(std::string_view text) {
  detail::PrecisionText read{.whole = text};
  if (text.find_first_of("=,") == std::string_view::npos) {
    const at::ScalarType dtype = read.dtype(detail::trimmed(text));
    return Precision({.param = dtype, .compute = dtype, .output = dtype});
  }
  for (std::string_view rest = text;;) {
    const auto comma = rest.find(',');
    read.read_part(detail::trimmed(rest.substr(0, comma)));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  const at::ScalarType param = read.param.value_or(at::ScalarType::Float);
  const at::ScalarType compute = read.compute.value_or(param);
  return Precision({.param = param, .compute = compute, .output = read.output.value_or(compute)});
}

inline Precision Precision::with_param(at::ScalarType dtype) const {
  return Precision({.param = dtype, .compute = compute(), .output = output()});
}

inline Precision Precision::with_compute(at::ScalarType dtype) const {
  return Precision({.param = param(), .compute = dtype, .output = output()});
}

inline Precision Precision::with_output(at::ScalarType dtype) const {
  return Precision({.param = param(), .compute = compute(), .output = dtype});
}

template <class T>
auto Precision::cast_to_param(T&& value) const {
  return detail::cast_tensors(std::forward<T>(value), param());
}

template <class T>
auto Precision::cast_to_compute(T&& value) const {
  return detail::cast_tensors(std::forward<T>(value), compute());
}

template <class T>
auto Precision::cast_to_output(T&& value) const {
  return detail::cast_tensors(std::forward<T>(value), output());
}

inline std::string Precision::to_string() const {
  std::string text("params=");
  text += detail::dtype_name(param());
  text += ",compute=";
  text += detail::dtype_name(compute());
  text += ",output=";
  text += detail::dtype_name(output());
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const Precision& precision) {
  return stream << precision.to_string();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
