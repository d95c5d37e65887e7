/// \file
/// AutocastOpList: which op autocast runs in which dtype, as libtorch and other libraries
/// registered it.
#pragma once

#include <mezzo/autocast/cast_policy.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>

#include <cstddef>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An op and its cast policy.
struct OpEntry {
  std::string name;        ///< with its overload: "aten::softmax.int"
  CastPolicy cast_policy;  ///< what autocast does with the op

  /// Returns whether name and cast policy are equal.
  bool operator==(const OpEntry&) const = default;
};

/// The ops that autocast on one device type lists, sorted by name.
class AutocastOpList {
 public:
  /// \param entries  sorted by name
  AutocastOpList(c10::DeviceType device, std::vector<OpEntry> entries)
      : device_(device), entries_(std::move(entries)) {}

  /// Returns the device type.
  c10::DeviceType device() const { return device_; }
  /// Returns all ops, sorted by name.
  const std::vector<OpEntry>& entries() const& { return entries_; }
  /// Returns all ops of a temporary list.
  std::vector<OpEntry> entries() && { return std::move(entries_); }

  /// Returns the number of ops with this cast policy.
  std::size_t count(CastPolicy policy) const;

  /// Returns the cast policy of an op by its full name, "aten::softmax.int"; fallthrough for an op
  /// that is not listed.
  CastPolicy cast_policy(std::string_view name) const;

 private:
  c10::DeviceType device_;
  std::vector<OpEntry> entries_;
};

/// Prints a table of device, op and cast policy.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const AutocastOpList& list);

/// Returns the op list of autocast on `device`, as the loaded libtorch and other libraries
/// registered it, without overrides. Probes the kernels: calls each once per process with tensors
/// that have a dtype and no shape, and records the casts that it requests. No op runs and no GPU is
/// needed. A policy that cannot be determined so is `unknown`.
///
/// Thread-safe. Takes milliseconds; tens of milliseconds the first time.
/// \throws c10::Error for a device type without autocast
MEZZO_INLINE AutocastOpList autocast_op_list(c10::DeviceType device);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/autocast/detail/autocast_op_list_inl.h>
#endif
