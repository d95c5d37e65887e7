/// \file
/// Op lists, which say which op runs in which dtype under autocast: libtorch's as data, and edits
/// to them as a value that is given to a guard.
///
///     const auto overrides = mezzo::OpOverrides().deny("aten::bmm").allow("aten::softmax.int");
///     mezzo::install_op_overrides(overrides);      // once, in main, before threads start
///     ...
///     mezzo::AutocastGuard<torch::kCPU> autocast({.op_overrides = overrides});  // bmm in float32, softmax not
///
/// Peers: Apex edits its lists with register_half_function (`allow`), register_float_function
/// (`deny`) and register_promote_function (`promote`).
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/cast_policy.h>
#include <mezzo/base/version.h>

#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An op, with its overload where it has one, and its cast overrides.
struct OpEntry {
  std::string name;        ///< "aten::softmax.int"
  CastPolicy cast_policy;  ///< what autocast does with the op

  /// Whether name and cast overrides are equal.
  bool operator==(const OpEntry&) const = default;
};

/// One device's op lists, sorted by name. Printing it gives a table.
class AutocastOpList {
 public:
  /// Holds `entries`, which are sorted by name.
  AutocastOpList(c10::DeviceType device, std::vector<OpEntry> entries)
      : device_(device), entries_(std::move(entries)) {}

  /// Returns the device that the list is for.
  c10::DeviceType device() const { return device_; }
  /// Returns all ops, sorted by name.
  const std::vector<OpEntry>& entries() const& { return entries_; }
  /// Returns all ops of a temporary list.
  std::vector<OpEntry> entries() && { return std::move(entries_); }

  /// Returns the number of ops of this cast overrides.
  std::size_t count(CastPolicy cast_policy) const;

  /// Returns the cast overrides of an op by its full name ("aten::softmax.int"); fallthrough for
  /// every op that autocast does not know.
  CastPolicy cast_policy(std::string_view name) const;

 private:
  c10::DeviceType device_;
  std::vector<OpEntry> entries_;
};

/// Prints a table: an op a line, with its cast overrides.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const AutocastOpList& list);

/// Returns every op that autocast knows on `device`, with its cast overrides, as the installed
/// libtorch and other libraries registered it, before any overrides. Probes the kernels: calls each
/// once a process with tensors that have a dtype and nothing else, and watches the casts that it
/// asks for. No op runs, no GPU is needed, and a cast overrides that cannot be told this way is
/// `unknown`, never a guess.
///
/// Any thread. Some milliseconds, the first time some tens.
/// \throws c10::Error for a device type other than CPU, CUDA and MPS
MEZZO_INLINE AutocastOpList autocast_op_list(c10::DeviceType device);

/// Edits to the op lists: an immutable value. Each method returns a new overrides with one more
/// edit; a later edit of an op replaces the earlier. A overrides that a guard was given holds in
/// that scope and thread, and where AutocastState hands the thread's state over. Guards nest: the
/// inner overrides comes first, and the outer one where the inner has no edit. One overrides serves
/// CPU, CUDA and MPS.
///
/// Any thread may make a overrides, which changes nothing outside it. A region takes only policies
/// whose ops are installed: see install_op_overrides.
///
/// An op is named "aten::softmax.int" (one overload), "aten::softmax" (all of them) or, from aten,
/// "softmax". `.allow("mylib::attention")` makes an op of TORCH_LIBRARY's take part that autocast
/// does not know. Ops that write into their arguments (in-place, out=) have no place in autocast
/// and cannot be named. An op whose schema says that its result is a view (view, reshape, select,
/// to) cannot be cast, since writes through the view would reach a copy; `ignore` takes it. Where
/// another op hands an argument back, as dropout does in evaluation, a cast op's result is a copy.
///
/// \throws c10::Error from every method that names an op: for a name that nobody registered, for
/// an op that writes into its arguments, and for a cast of an op that returns a view
class OpOverrides {
 public:
  /// Makes a overrides without edits.
  OpOverrides() = default;

  /// Casts the op's floating inputs to the region's dtype.
  [[nodiscard]] OpOverrides allow(std::string_view op) const {
    return set(op, CastPolicy::lower_precision_fp);
  }

  /// Casts the op's floating inputs to float32. Lifts the ban of an op that CUDA's list bans.
  [[nodiscard]] OpOverrides deny(std::string_view op) const { return set(op, CastPolicy::fp32); }

  /// Casts the op's floating inputs to the widest of their dtypes; half and bfloat16 meet in
  /// float32.
  [[nodiscard]] OpOverrides promote(std::string_view op) const {
    return set(op, CastPolicy::promote);
  }

  /// Takes the op off the lists: it runs in its inputs' dtypes, and the ops that it is made of keep
  /// their cast policies.
  [[nodiscard]] OpOverrides ignore(std::string_view op) const {
    return set(op, CastPolicy::fallthrough);
  }

  /// Returns this overrides with all of `other`'s edits on top.
  [[nodiscard]] OpOverrides with(const OpOverrides& other) const;

  /// Reads a list: a line holds one verb (allow, deny, promote, ignore) and the ops that it is for;
  /// `#` starts a comment.
  /// \throws c10::Error naming the line
  static OpOverrides parse(std::string_view text);

  /// Reads a list, as `parse` does, from a file.
  /// \throws c10::Error naming file and line; also when the file cannot be read
  static OpOverrides from_file(const std::string& path);

  /// Returns the edits, sorted by name.
  std::vector<OpEntry> entries() const;

  /// Returns text that `parse` reads back.
  std::string to_string() const;

  /// Returns the op's cast overrides on `device` under this overrides alone.
  CastPolicy cast_policy(std::string_view op, c10::DeviceType device) const;

  /// Whether there are no edits.
  bool empty() const { return edits_ == nullptr; }

  /// Converts to what an AutocastOptions holds.
  operator OpOverridesHandle() const { return edits_; }

 private:
  friend OpOverrides install_op_overrides(OpOverrides overrides);
  explicit OpOverrides(std::shared_ptr<const detail::OpOverrideMap> edits)
      : edits_(std::move(edits)) {}

  OpOverrides set(std::string_view op, CastPolicy cast_policy) const;

  std::shared_ptr<const detail::OpOverrideMap> edits_;
};

/// Prints `to_string`.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpOverrides& overrides);

/// Lets regions use `overrides`, and every overrides that names the same ops: puts a kernel of
/// mezzo's in front of libtorch's, in the dispatcher's table, for each op that the overrides names.
/// It asks the calling thread's overrides at each call, which costs some ten nanoseconds, and where
/// that is silent calls libtorch's. Ops that no installed overrides names are untouched.
///
/// **Call it in main, before other threads run ops**: it writes the dispatcher's table, and a
/// concurrent call of such an op may not survive it. The kernels stay for the life of the process.
/// A second call for the same overrides does nothing, from any thread.
///
/// Returns the overrides, so that one line can make and install it:
///
///     const auto overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::bmm"));
///
/// Several policies that meet in nested regions are installed one by one.
MEZZO_INLINE OpOverrides install_op_overrides(OpOverrides overrides);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/autocast/detail/op_overrides_inl.h>
#endif
