/// \file
/// Automatic mixed precision for the forward pass, `torch.autocast` in Python: inside an enabled
/// region libtorch runs matrix products and convolutions in half or bfloat16, and the ops that need
/// the range in float32.
///
/// Autocast state belongs to a thread. libtorch's cache of weight casts belongs to the whole
/// process: see AutocastSetting::cache. autocast_module.h wraps modules.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/region.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Guard of a region whose device and dtype are known at run time only: from a flag, a file, the
/// hardware. Else as Autocast.
///
///     mezzo::AutocastGuard autocast(mezzo::recommended(device));
///     mezzo::AutocastGuard autocast({.device = device.type(), .enabled = flags.amp});
///     mezzo::AutocastGuard autocast(torch::kCUDA, torch::kBFloat16);
class AutocastGuard {
 public:
  /// Enters a region of `setting`.
  /// \throws c10::Error, and changes nothing, when the setting names no device, when that has no
  ///   autocast or cannot lower to the dtype, also when not enabled, and as Autocast does
  [[nodiscard]] explicit AutocastGuard(const AutocastSetting& setting) {
    const AutocastSetting checked = detail::checked_setting(setting);
    TORCH_CHECK(!checked.output,
                "output: a guard returns nothing whose dtype it could change; give the setting to "
                "mezzo::autocast(setting, [&] { return ...; }) or to mezzo::AutocastModule");
    region_.emplace(checked);
  }

  /// Enters a region as `torch.autocast(device, dtype)` does.
  /// \param device a device or its type
  /// \param dtype of the lowered ops; none means `at::autocast::get_autocast_dtype(device)`
  template <class Device>
  requires(std::same_as<Device, c10::Device> || std::same_as<Device, c10::DeviceType>)
      [[nodiscard]] explicit AutocastGuard(Device device,
                                           std::optional<at::ScalarType> dtype = std::nullopt)
      : AutocastGuard(AutocastSetting{.device = c10::Device(device).type(), .dtype = dtype}) {}

  /// Whether the region is enabled and has not ended.
  [[nodiscard]] bool is_enabled() const noexcept { return region_ && region_->is_enabled(); }

  /// Ends the region here, for code without a block: before `backward()`. The end of the scope then
  /// does nothing.
  void end() noexcept { region_.reset(); }

 private:
  std::optional<detail::Region> region_;
};

/// Guard of a region of mixed precision, which ends with the scope:
///
///     mezzo::Autocast<torch::kCUDA> autocast;                     // half on CUDA
///     mezzo::Autocast<torch::kCPU> autocast;                      // bfloat16 on the CPU
///     mezzo::Autocast<torch::kCUDA, torch::kBFloat16> autocast;   // or as said
///     mezzo::Autocast<torch::kCPU> exact({.enabled = false});     // full precision in a region
///     mezzo::Autocast<torch::kCPU> autocast({.cache = false, .policy = policy});
///
/// Leaving the scope, also by return or exception, restores exactly what was there: enabled, dtype,
/// cache flag, nesting. The thread's outermost exit clears libtorch's cache of casts. Scopes of one
/// thread must end in reverse order, in that thread and before `main` returns, which block scope
/// sees to. A guard that lives across a coroutine's suspension leaves the wrong state behind, as
/// `torch.autocast` around an await does: enter an AutocastState::Scope after each suspension
/// instead. Entering and leaving costs some thread-local writes and no host sync. Call `backward()`
/// after the scope.
///
/// The region acts on ops whose tensors are on `Device`; for CPU and CUDA at once open both. It
/// warns once a process where `Device` is CUDA and there is none, as Python does, and where the CPU
/// has no instructions for half. See `recommended` for what is fast on this machine.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device)>
class Autocast : public AutocastGuard {
  static_assert(
      default_autocast_dtype(Device) != at::ScalarType::Undefined,
      "mezzo::Autocast: this device type has no autocast; use torch::kCPU, kCUDA or kMPS");
  static_assert(default_autocast_dtype(Device) == at::ScalarType::Undefined ||
                    autocast_accepts(Device, Dtype),
                "mezzo::Autocast: autocast cannot lower to this dtype; use torch::kHalf or "
                "torch::kBFloat16, or {.enabled = false} for full precision");

 public:
  /// Enters a region of `setting`. The type says device and dtype.
  /// \throws c10::Error, and changes nothing, for a setting of another device or dtype, and for a
  ///   policy with an op that install_op_overrides was not called for
  [[nodiscard]] explicit Autocast(const AutocastSetting& setting = {})
      : AutocastGuard(detail::setting_of_type(setting, Device, Dtype)) {}
};

/// Runs `function()` in a region of `setting`, now, and returns what it returns:
///
///     auto loss = mezzo::autocast(setting, [&] { return criterion(model->forward(x), y); });
///
/// Throws as AutocastGuard does.
template <class F>
decltype(auto) autocast(const AutocastSetting& setting, F&& function) {
  if constexpr (std::invocable<F>) {
    const AutocastSetting checked = detail::checked_setting(setting);
    const detail::Region region(checked);
    return detail::with_output(
        checked.output, [&]() -> decltype(auto) { return std::invoke(std::forward<F>(function)); });
  } else {
    static_assert(std::invocable<F>,
                  "mezzo::autocast(setting, f): f cannot be called without arguments. If there is "
                  "an error inside f above, mend that; otherwise capture the arguments, or make a "
                  "callable that takes them: mezzo::autocast(f, setting)");
    return at::Tensor();  // so that nothing more is said of what the caller does with it
  }
}

/// Returns `function` as a callable that runs under autocast in whatever thread calls it, as a
/// decorator of `forward` does in Python. All arguments are forwarded perfectly, move-only ones
/// too, and the result is returned as it is, references included. The function stands first here,
/// the setting after it.
///
///     auto forward = mezzo::autocast<torch::kCPU>([&](auto x) { return net->forward(x); });
///     auto step = mezzo::autocast(&Trainer::step, mezzo::recommended(device));
///     step(trainer, batch);
///
/// A lvalue `function` is copied, as by std::bind_front; pass std::ref(function) to keep a
/// reference. Throws as Autocast does, here and not at the calls.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device), class F>
[[nodiscard]] auto autocast(F&& function, const AutocastSetting& setting = {}) {
  static_assert(std::is_destructible_v<Autocast<Device, Dtype>>);  // says what Autocast refuses
  return autocast(std::forward<F>(function), detail::setting_of_type(setting, Device, Dtype));
}

/// Returns `function` as a callable that runs in regions of `setting`, as the overload above does
/// for a device known at compile time. Throws as AutocastGuard does, here and not at the calls.
template <class F>
[[nodiscard]] auto autocast(F&& function, const AutocastSetting& setting) requires(
    !std::is_same_v<std::decay_t<F>, AutocastSetting>) {
  return detail::in_scopes_of<detail::Region>(detail::checked_setting(setting),
                                              std::forward<F>(function));
}

/// Holds the autocast state of a thread, for all device types: enabled, dtype, op policy, and
/// whether casts are cached. A new thread starts with autocast off; capture the state
/// where it is set, and hand it over:
///
///     pool.submit([state = mezzo::AutocastState::capture()] {
///       mezzo::AutocastState::Scope scope(state);
///       ...
///     });
///
/// A value: copy it and keep it as long as you like. at::ThreadLocalState carries more (grad mode,
/// profiler) but neither the cache flag, nor the clearing of the cache, nor a policy.
class AutocastState {
 public:
  /// Returns the calling thread's state.
  [[nodiscard]] static AutocastState capture() noexcept { return AutocastState(); }

  class Scope;

 private:
  AutocastState() noexcept {
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      dtypes_[i] = at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i));
    }
  }

  void install() const noexcept {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | disabled_;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i), dtypes_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
    detail::thread_policies() = policies_;
  }

  // libtorch keeps "autocast is off for this device type" as an excluded dispatch key. Asking it
  // type by type would throw for types that its version has no autocast for; the keys and dtypes
  // are there for all.
  c10::DispatchKeySet disabled_ =
      c10::impl::tls_local_dispatch_key_set().excluded_ & c10::autocast_dispatch_keyset;
  std::array<at::ScalarType, c10::COMPILE_TIME_MAX_DEVICE_TYPES> dtypes_{};
  bool cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  detail::ThreadPolicies policies_ = detail::thread_policies();
};

/// Runs the calling thread under a state and restores what was there. Counts as a region: the end
/// of the thread's outermost one clears libtorch's weight cache.
class AutocastState::Scope {
 public:
  /// Enters the regions of `state`.
  [[nodiscard]] explicit Scope(const AutocastState& state) noexcept
      : nesting_(state.dtypes_ != found_.dtypes_) {
    state.install();
  }
  ~Scope() { found_.install(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  AutocastState found_;
  detail::Nesting nesting_;
};

/// Returns `function` as a callable that runs under the autocast state of the thread that makes it,
/// wherever it is called: `std::thread worker(mezzo::with_current_autocast(work), batch);`.
/// Forwards as `autocast` does.
template <class F>
[[nodiscard]] auto with_current_autocast(F&& function) {
  return detail::in_scopes_of<AutocastState::Scope>(AutocastState::capture(),
                                                    std::forward<F>(function));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
