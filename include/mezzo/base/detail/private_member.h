/// \file
/// Reads private data members of libtorch that have no public accessor: RecordFunction's inputs
/// (op_arguments.h), the module in an InputArchive and in an OutputArchive (archive_value.h), and
/// the hash table of a GenericDict (pickle_reader.h).
#pragma once

#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An explicit instantiation may name a private member. It defines the function that returns the
/// pointer to the member:
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
