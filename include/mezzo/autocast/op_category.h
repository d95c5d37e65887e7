/// \file
/// The categories of autocast's op lists.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The treatment of an op by autocast. Double, complex and integer tensors, and tensors of another
/// device type, are left alone by every category.
enum class OpCategory : std::uint8_t {
  lower_precision,     ///< floating inputs are cast to the region's dtype
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

inline constexpr std::array<std::string_view, 8> kCategoryNames = {
    "lower_precision", "fp32",   "fp32_set_opt_dtype", "fp32_append_dtype",
    "promote",         "banned", "fallthrough",        "unknown"};

}  // namespace detail

/// Returns the enumerator's own name: "lower_precision", "fp32" and so on.
constexpr std::string_view to_string(OpCategory category) {
  return detail::kCategoryNames[static_cast<std::size_t>(category)];
}

/// Prints the name.
inline std::ostream& operator<<(std::ostream& stream, OpCategory category) {
  return stream << to_string(category);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
