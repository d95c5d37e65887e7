/// \file
/// AutocastRegion, which guards, calls and modules share, and the validation of its options.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/recommended_autocast.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Counts this thread's regions, as libtorch does, and clears libtorch's cache of casts at the
/// outermost exit. Also clears it where an inner region has another dtype than the enclosing one:
/// the cache is keyed by the weight alone and would return the wrong dtype.
class NestingGuard {
 public:
  explicit NestingGuard(bool dtype_changes) noexcept
      : clears_cache_(at::autocast::increment_nesting() > 1 && dtype_changes) {
    if (clears_cache_) at::autocast::clear_cache();
  }
  ~NestingGuard() {
    if (at::autocast::decrement_nesting() <= 0 || clears_cache_) at::autocast::clear_cache();
  }
  NestingGuard(const NestingGuard&) = delete;
  NestingGuard& operator=(const NestingGuard&) = delete;

 private:
  bool clears_cache_;
};

/// A region of one device type in this thread. Takes validated options.
class AutocastRegion {
 public:
  explicit AutocastRegion(const AutocastOptions& options) noexcept
      : device_(*options.device_type),
        enabled_(options.enabled),
        prev_(get_device_state()),
        nesting_guard_(*options.dtype != prev_.dtype) {
    set_device_state({enabled_, *options.dtype, options.cache_enabled.value_or(prev_.cache_enabled),
                      OpOverrideMap::merge(prev_.op_overrides, options.op_overrides)});
  }
  ~AutocastRegion() { set_device_state(prev_); }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

  bool is_enabled() const noexcept { return enabled_; }

 private:
  struct DeviceState {
    bool enabled;
    at::ScalarType dtype;
    bool cache_enabled;
    OpOverridesHandle op_overrides;
  };

  DeviceState get_device_state() const noexcept {
    return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
            at::autocast::is_autocast_cache_enabled(),
            thread_op_overrides()[autocast_device_index(device_)]};
  }

  void set_device_state(const DeviceState& state) const noexcept {
    at::autocast::set_autocast_enabled(device_, state.enabled);
    at::autocast::set_autocast_dtype(device_, state.dtype);
    at::autocast::set_autocast_cache_enabled(state.cache_enabled);
    thread_op_overrides()[autocast_device_index(device_)] = state.op_overrides;
  }

  c10::DeviceType device_;
  bool enabled_;
  DeviceState prev_;
  NestingGuard nesting_guard_;
};

/// The `Device` of an AutocastGuard whose device is known at run time only.
inline constexpr auto kRuntimeDevice = c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES;

/// Returns `options` with the device and dtype of an AutocastGuard's template arguments.
/// \throws c10::Error if the options have others
inline AutocastOptions with_static_device(AutocastOptions options, c10::DeviceType device,
                                          at::ScalarType dtype) {
  if (device == kRuntimeDevice) return options;
  TORCH_CHECK(options.device_type.value_or(device) == device, "device_type is ",
              *options.device_type, " in the options and ", device,
              " in the type; omit it in the options, or use mezzo::AutocastGuard guard(options)");
  TORCH_CHECK(options.dtype.value_or(dtype) == dtype, "dtype is ", *options.dtype,
              " in the options and ", dtype,
              " in the type; omit it in the options, or use mezzo::AutocastGuard guard(options)");
  options.device_type = device;
  options.dtype = dtype;
  return options;
}

/// Returns `options` with a dtype. Validates disabled regions too: an enabled one inside, or a
/// later change of the flag, would use the dtype.
/// \throws c10::Error unless autocast on the device can lower to the dtype, and for op overrides
///   that are not installed
inline AutocastOptions validated_options(AutocastOptions options) {
  TORCH_CHECK(options.device_type.has_value(),
              "device_type is not set; set it to that of the model, such as torch::kCUDA");
  const c10::DeviceType device = *options.device_type;
  check_autocast_device(device);
  const at::ScalarType dtype = options.dtype.value_or(at::autocast::get_autocast_dtype(device));
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "In ", c10::DeviceTypeName(device),
              " autocast, but the target dtype ", dtype,
              " is not supported; use Half or BFloat16, or .enabled = false for full precision");
  TORCH_CHECK(!options.output_dtype || at::isFloatingType(*options.output_dtype),
              "output_dtype is ", *options.output_dtype, "; it should be a floating-point dtype");
  if (options.op_overrides != nullptr) {
    for (const auto& [op, cast_policy] : options.op_overrides->cast_policies) {
      TORCH_CHECK(op->is_installed, "op_overrides: the override of ", op->name, " (",
                  to_string(cast_policy),
                  ") is not installed in this process; call mezzo::install_op_overrides(overrides) "
                  "once, before other threads run ops");
    }
  }
  if (options.enabled) warn_if_unsupported_hardware(device, dtype);
  options.dtype = dtype;
  return options;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
