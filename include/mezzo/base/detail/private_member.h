/// \file
/// Access to private data members of libtorch without a public accessor.
#pragma once

#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Defines a function that returns a pointer to a private member. An explicit instantiation may
/// name private members:
///
///     struct SizeMember {
///       friend constexpr auto private_member(SizeMember);
///     };
///     template struct PrivateMember<SizeMember, &Class::size_>;
///     ... object.*private_member(SizeMember()) ...
template <class Tag, auto Member>
struct PrivateMember {
  friend constexpr auto private_member(Tag) { return Member; }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
