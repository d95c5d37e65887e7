/// \file
/// The cast policies of autocast's op lists.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The treatment of an op by autocast. Double, complex and integer tensors, and tensors of another
/// device type, are left alone by every cast overrides.
enum class CastPolicy : std::uint8_t {
  lower_precision_fp,  ///< floating inputs are cast to the region's dtype
  fp32,                ///< floating inputs are cast to float32
  fp32_set_opt_dtype,  ///< inputs stay; the `dtype` argument becomes float32 unless the caller set
                       ///< it
  fp32_append_dtype,   ///< inputs stay; the overload that takes a `dtype` is called with float32
  promote,             ///< floating inputs are cast to the widest of their dtypes
  banned,              ///< an error: the op overflows in half precision
  fallthrough,         ///< not on a list: runs in whatever dtype its inputs have
  unknown,             ///< a kernel that mezzo could not probe
};

namespace detail {

inline constexpr std::array<std::string_view, 8> kCastPolicyNames = {
    "lower_precision_fp", "fp32",   "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned",
    "fallthrough",        "unknown"};

}  // namespace detail

/// Returns the enumerator's own name: "lower_precision_fp", "fp32" and so on.
constexpr std::string_view to_string(CastPolicy cast_policy) {
  return detail::kCastPolicyNames[static_cast<std::size_t>(cast_policy)];
}

/// Prints the name.
inline std::ostream& operator<<(std::ostream& stream, CastPolicy cast_policy) {
  return stream << to_string(cast_policy);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
