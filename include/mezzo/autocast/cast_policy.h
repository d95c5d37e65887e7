/// \file
/// CastPolicy, what autocast does with an op.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What autocast does with an op: at::autocast::CastPolicy, and three more. Double, complex and
/// integer tensors, and tensors on another device type, are never cast.
enum class CastPolicy : std::uint8_t {
  lower_precision_fp,  ///< casts floating-point inputs to the region's dtype
  fp32,                ///< casts floating-point inputs to float32
  fp32_set_opt_dtype,  ///< sets the `dtype` argument to float32 unless the caller set it
  fp32_append_dtype,   ///< calls the overload that takes a `dtype` with float32
  promote,             ///< casts floating-point inputs to their widest dtype
  banned,              ///< throws: the op is unsafe to autocast
  fallthrough,         ///< not on a list: runs in the dtype of its inputs
  unknown,             ///< has a kernel that mezzo could not probe
};

namespace detail {

inline constexpr std::array<std::string_view, 8> kCastPolicyNames = {
    "lower_precision_fp", "fp32",   "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned",
    "fallthrough",        "unknown"};

}  // namespace detail

/// Returns the enumerator's name, such as "lower_precision_fp".
constexpr std::string_view to_string(CastPolicy policy) {
  return detail::kCastPolicyNames[static_cast<std::size_t>(policy)];
}

/// Prints the enumerator's name.
inline std::ostream& operator<<(std::ostream& stream, CastPolicy policy) {
  return stream << to_string(policy);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
