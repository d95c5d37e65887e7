/// \file
/// Region, which all guards share: it enters a region, and leaves everything as it was.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/recommended.h>
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
class Nesting {
 public:
  explicit Nesting(bool dtype_changes) noexcept
      : drops_casts_(at::autocast::increment_nesting() > 1 && dtype_changes) {
    if (drops_casts_) at::autocast::clear_cache();
  }
  ~Nesting() {
    if (at::autocast::decrement_nesting() <= 0 || drops_casts_) at::autocast::clear_cache();
  }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  bool drops_casts_;
};

/// A region of one device type in this thread.
class Region {
 public:
  explicit Region(const AutocastSetting& checked) noexcept
      : device_(*checked.device),
        enabled_(checked.enabled),
        found_(found()),
        nesting_(*checked.dtype != found_.dtype) {
    install({enabled_, *checked.dtype, checked.cache.value_or(found_.caches),
             PolicyEdits::nest(found_.policy, checked.policy)});
  }
  ~Region() { install(found_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool is_enabled() const noexcept { return enabled_; }

 private:
  struct Flags {
    bool enabled;
    at::ScalarType dtype;
    bool caches;
    std::shared_ptr<const PolicyEdits> policy;
  };

  Flags found() const noexcept {
    return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
            at::autocast::is_autocast_cache_enabled(),
            thread_policies()[policy_device_index(device_)]};
  }

  void install(const Flags& flags) const noexcept {
    at::autocast::set_autocast_enabled(device_, flags.enabled);
    at::autocast::set_autocast_dtype(device_, flags.dtype);
    at::autocast::set_autocast_cache_enabled(flags.caches);
    thread_policies()[policy_device_index(device_)] = flags.policy;
  }

  c10::DeviceType device_;
  bool enabled_;
  Flags found_;
  Nesting nesting_;
};

/// Returns `setting` for a guard whose type says `device` and `dtype`.
inline AutocastSetting setting_of_type(AutocastSetting setting, c10::DeviceType device,
                                       at::ScalarType dtype) {
  TORCH_CHECK(setting.device.value_or(device) == device, "device: the AutocastSetting says ",
              *setting.device, ", the guard's type ", device,
              "; leave it out of the setting, or use mezzo::AutocastGuard");
  TORCH_CHECK(setting.dtype.value_or(dtype) == dtype, "dtype: the AutocastSetting says ",
              *setting.dtype, ", the guard's type ", dtype,
              "; leave it out of the setting, or use mezzo::AutocastGuard");
  setting.device = device;
  setting.dtype = dtype;
  return setting;
}

/// Validates a setting, and returns it with a dtype. A disabled region is held to it too: an
/// enabled one inside it, or a later change of the flag, would use its dtype.
/// \throws c10::Error unless libtorch can autocast on its device to its dtype
inline AutocastSetting checked_setting(AutocastSetting setting) {
  TORCH_CHECK(setting.device.has_value(),
              "device: the AutocastSetting names none; give it torch::kCPU, kCUDA or kMPS");
  const c10::DeviceType device = *setting.device;
  check_has_autocast(device);
  const at::ScalarType dtype = setting.dtype.value_or(at::autocast::get_autocast_dtype(device));
  TORCH_CHECK(autocast_accepts(device, dtype), "dtype: autocast on ", device, " cannot lower to ",
              dtype, "; use Half or BFloat16, or a disabled region for full precision");
  TORCH_CHECK(!setting.output || at::isFloatingType(*setting.output),
              "output: results cannot be of ", *setting.output, "; use torch::kFloat");
  if (setting.policy != nullptr) {
    for (const auto& [op, category] : setting.policy->by_op) {
      TORCH_CHECK(op->is_installed, "policy: it makes ", op->name, " ", to_string(category),
                  ", and mezzo's override of that op is not installed in this process. Call "
                  "mezzo::install_op_overrides(policy) once, before other threads run ops.");
    }
  }
  if (setting.enabled) warn_of_hardware(device, dtype);
  setting.dtype = dtype;
  return setting;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
