/// \file
/// AutocastRegion, which all guards share: it enters a region, and leaves everything as it was.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/recommended_autocast.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Counts this thread's regions, as libtorch does, and clears libtorch's cache of casts at the
/// outermost exit. Also clears it where an inner region begins or ends with another dtype than the
/// one around it: the cache is keyed by the weight alone and would hand out the wrong dtype.
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

/// A region of one device type in this thread.
class AutocastRegion {
 public:
  explicit AutocastRegion(const AutocastOptions& validated) noexcept
      : device_(*validated.device_type),
        enabled_(validated.enabled),
        prev_(current_flags()),
        nesting_guard_(*validated.dtype != prev_.dtype) {
    set_flags({enabled_, *validated.dtype, validated.cache_enabled.value_or(prev_.cache_enabled),
               OpOverrideMap::nest(prev_.op_overrides, validated.op_overrides)});
  }
  ~AutocastRegion() { set_flags(prev_); }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

  bool is_enabled() const noexcept { return enabled_; }

 private:
  struct Flags {
    bool enabled;
    at::ScalarType dtype;
    bool cache_enabled;
    std::shared_ptr<const OpOverrideMap> op_overrides;
  };

  Flags current_flags() const noexcept {
    return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
            at::autocast::is_autocast_cache_enabled(),
            thread_op_overrides()[autocast_device_index(device_)]};
  }

  void set_flags(const Flags& flags) const noexcept {
    at::autocast::set_autocast_enabled(device_, flags.enabled);
    at::autocast::set_autocast_dtype(device_, flags.dtype);
    at::autocast::set_autocast_cache_enabled(flags.cache_enabled);
    thread_op_overrides()[autocast_device_index(device_)] = flags.op_overrides;
  }

  c10::DeviceType device_;
  bool enabled_;
  Flags prev_;
  NestingGuard nesting_guard_;
};

/// Returns `options` for a guard whose type says `device` and `dtype`.
inline AutocastOptions make_static_options(AutocastOptions options, c10::DeviceType device,
                                           at::ScalarType dtype) {
  TORCH_CHECK(options.device_type.value_or(device) == device,
              "device_type: the AutocastOptions say ", *options.device_type, ", the guard's type ",
              device, "; leave it out of the options, or use mezzo::AutocastGuard");
  TORCH_CHECK(options.dtype.value_or(dtype) == dtype, "dtype: the AutocastOptions say ",
              *options.dtype, ", the guard's type ", dtype,
              "; leave it out of the options, or use mezzo::AutocastGuard");
  options.device_type = device;
  options.dtype = dtype;
  return options;
}

/// Validates a options, and returns it with a dtype. A disabled region is held to it too: an
/// enabled one inside it, or a later change of the flag, would use its dtype.
/// \throws c10::Error unless libtorch can autocast on its device to its dtype
inline AutocastOptions validated_options(AutocastOptions options) {
  TORCH_CHECK(options.device_type.has_value(),
              "device_type: the AutocastOptions have none; give it torch::kCPU, kCUDA or kMPS");
  const c10::DeviceType device = *options.device_type;
  check_autocast_device(device);
  const at::ScalarType dtype = options.dtype.value_or(at::autocast::get_autocast_dtype(device));
  TORCH_CHECK(is_autocast_dtype_supported(device, dtype), "dtype: autocast on ", device,
              " cannot lower to ", dtype,
              "; use Half or BFloat16, or a disabled region for full precision");
  TORCH_CHECK(!options.output_dtype || at::isFloatingType(*options.output_dtype),
              "output_dtype: results cannot be of ", *options.output_dtype, "; use torch::kFloat");
  if (options.op_overrides != nullptr) {
    for (const auto& [op, cast_policy] : options.op_overrides->cast_policies) {
      TORCH_CHECK(op->is_installed, "op_overrides: they make ", op->name, " ",
                  to_string(cast_policy),
                  ", and mezzo's override of that op is not installed in this process. Call "
                  "mezzo::install_op_overrides(overrides) once, before other threads run ops.");
    }
  }
  if (options.enabled) warn_if_unsupported_hardware(device, dtype);
  options.dtype = dtype;
  return options;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
