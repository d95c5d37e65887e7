/// \file
/// A private data member of libtorch's, where nothing public tells the same. Three are read so, and
/// each reader says why: RecordFunction's inputs (op_listener.h), the number of tensors that share
/// a version (weight_identity.h) and what an archive holds (archive_value.h).
#pragma once

#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An explicit instantiation may name a private member, and defines the function that hands out the
/// pointer to it:
///
///     struct SizeMember {
///       friend constexpr auto private_member(SizeMember);
///     };
///     template struct PrivateMember<SizeMember, &Theirs::size_>;
///     ... theirs.*private_member(SizeMember()) ...
template <class Tag, auto Member>
struct PrivateMember {
  friend constexpr auto private_member(Tag) { return Member; }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
