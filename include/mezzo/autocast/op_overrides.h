/// \file
/// OpOverrides: changes to autocast's op lists (allow, deny, promote), an option of regions:
///
///     const auto overrides = mezzo::OpOverrides().deny("aten::bmm").allow("aten::softmax.int");
///     mezzo::install_op_overrides(overrides);  // once, in main, before threads start
///     ...
///     mezzo::AutocastGuard<torch::kCPU> autocast({.op_overrides = overrides});
///
/// Apex's counterparts are register_half_function (`allow`), register_float_function (`deny`) and
/// register_promote_function (`promote`).
#pragma once

#include <mezzo/autocast/autocast_op_list.h>
#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/cast_policy.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>

#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Overrides of the op lists, an immutable value. Each method returns new overrides with one more
/// entry; a later entry for an op replaces an earlier one. They apply in the region and thread of
/// the guard, and where AutocastState passes the thread's state. In nested regions the inner
/// overrides take precedence. The same overrides apply to all device types.
///
/// An op is named "aten::softmax.int" (one overload), "aten::softmax" (all overloads) or, in aten,
/// "softmax". `.allow("mylib::attention")` adds an op of TORCH_LIBRARY that is on no list. In-place
/// ops and out= overloads cannot be named: autocast ignores them. An op whose schema returns a view
/// (view, reshape, select, to) cannot be cast, since writes through the view would reach a copy;
/// `ignore` accepts it. Where another op returns an argument itself, as dropout does in evaluation,
/// the result of a cast op is a copy.
///
/// A region accepts only overrides of installed ops: see install_op_overrides. Thread-safe.
///
/// \throws c10::Error from every method that names an op, if it is not registered, if it writes
///   into its arguments, and for a cast of an op that returns a view
class OpOverrides {
 public:
  /// Makes overrides without entries.
  OpOverrides() = default;

  /// Casts the op's floating-point inputs to the region's dtype.
  [[nodiscard]] OpOverrides allow(std::string_view op) const {
    return set(op, CastPolicy::lower_precision_fp);
  }

  /// Casts the op's floating-point inputs to float32. Also permits an op that CUDA's list bans.
  [[nodiscard]] OpOverrides deny(std::string_view op) const { return set(op, CastPolicy::fp32); }

  /// Casts the op's floating-point inputs to their widest dtype; float16 and bfloat16 to float32.
  [[nodiscard]] OpOverrides promote(std::string_view op) const {
    return set(op, CastPolicy::promote);
  }

  /// Removes the op from the lists: it runs in the dtype of its inputs. The ops that it calls keep
  /// their cast policies.
  [[nodiscard]] OpOverrides ignore(std::string_view op) const {
    return set(op, CastPolicy::fallthrough);
  }

  /// Returns the entries of both; `other` takes precedence.
  [[nodiscard]] OpOverrides with(const OpOverrides& other) const;

  /// Parses text: each line holds allow, deny, promote or ignore, and one or more ops; `#` starts a
  /// comment.
  /// \throws c10::Error with the line number
  static OpOverrides parse(std::string_view text);

  /// Parses a file.
  /// \throws c10::Error with path and line number; also if the file cannot be read
  static OpOverrides from_file(const std::string& path);

  /// Returns the entries, sorted by name.
  std::vector<OpEntry> entries() const;

  /// Returns text that `parse` reads.
  std::string to_string() const;

  /// Returns the op's cast policy on `device` under these overrides alone.
  CastPolicy cast_policy(std::string_view op, c10::DeviceType device) const;

  /// Returns whether there are no entries.
  bool empty() const { return map_ == nullptr; }

  /// Converts to AutocastOptions::op_overrides.
  operator OpOverridesHandle() const { return map_; }

 private:
  explicit OpOverrides(OpOverridesHandle map) : map_(std::move(map)) {}

  OpOverrides set(std::string_view op, CastPolicy policy) const;

  OpOverridesHandle map_;
};

/// Prints `to_string`.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const OpOverrides& overrides);

/// Registers a mezzo kernel in front of libtorch's autocast kernel of each op in `overrides`.
/// The kernel looks up the calling thread's overrides, which costs some ten nanoseconds, and calls
/// libtorch's kernel unless they name the op. Returns the overrides:
///
///     const auto overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::bmm"));
///
/// **Call it in main, before other threads run ops**: it writes the dispatcher's table, and a
/// concurrent call of the op may crash. The kernels are never removed. Installing an op again has
/// no effect and is thread-safe. Install the overrides of nested regions one by one.
MEZZO_INLINE OpOverrides install_op_overrides(OpOverrides overrides);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/autocast/detail/op_overrides_inl.h>
#endif
