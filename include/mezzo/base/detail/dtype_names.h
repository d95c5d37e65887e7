/// \file
/// Names of the dtypes for training.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};

/// `dtype_name` returns the first name of a dtype.
inline constexpr std::array<DtypeName, 12> kDtypeNames = {{{"float32", at::ScalarType::Float},
                                                           {"f32", at::ScalarType::Float},
                                                           {"float", at::ScalarType::Float},
                                                           {"full", at::ScalarType::Float},
                                                           {"bfloat16", at::ScalarType::BFloat16},
                                                           {"bf16", at::ScalarType::BFloat16},
                                                           {"float16", at::ScalarType::Half},
                                                           {"f16", at::ScalarType::Half},
                                                           {"half", at::ScalarType::Half},
                                                           {"float64", at::ScalarType::Double},
                                                           {"f64", at::ScalarType::Double},
                                                           {"double", at::ScalarType::Double}}};

inline constexpr const char* kKnownDtypes =
    "float32 (f32, float, full), bfloat16 (bf16), float16 (f16, half) and float64 (f64, double)";

/// Returns the Python name without "torch.", such as "float32"; the C++ name for a dtype that is
/// not in the table.
inline std::string_view dtype_name(at::ScalarType dtype) {
  for (const auto& known : kDtypeNames) {
    if (known.dtype == dtype) return known.name;
  }
  return dtype == at::ScalarType::Undefined ? "Undefined" : c10::toString(dtype);
}

inline std::optional<at::ScalarType> parse_dtype(std::string_view name) {
  for (const auto& known : kDtypeNames) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

constexpr bool is_training_dtype(at::ScalarType dtype) {
  return dtype == at::ScalarType::Float || dtype == at::ScalarType::BFloat16 ||
         dtype == at::ScalarType::Half || dtype == at::ScalarType::Double;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
