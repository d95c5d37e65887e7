/// \file
/// Mixed precision for the forward pass (torch.autocast): in an enabled region libtorch runs matrix
/// products and convolutions in float16 or bfloat16, and ops that need the range in float32.
/// Autocast state is thread-local. autocast_module.h wraps modules.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/autocast_region.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether an AutocastGuard's device is known at run time only.
template <c10::DeviceType Device>
concept RuntimeDevice = Device == kRuntimeDevice;

template <class T>
concept DeviceOrType = std::same_as<T, c10::Device> || std::same_as<T, c10::DeviceType>;

/// A device as Python names it, "cuda".
template <class T>
concept DeviceText = std::convertible_to<const T&, std::string_view>;

}  // namespace detail

/// Guard of an autocast region of the calling thread, which ends with the scope:
///
///     mezzo::AutocastGuard<torch::kCUDA> autocast;                    // float16
///     mezzo::AutocastGuard<torch::kCPU> autocast;                     // bfloat16
///     mezzo::AutocastGuard<torch::kCUDA, torch::kBFloat16> autocast;
///     mezzo::AutocastGuard autocast(device, dtype, enabled);          // known at run time
///     mezzo::AutocastGuard autocast(mezzo::recommended_autocast(device));
///     mezzo::AutocastGuard<torch::kCPU> full_precision({.enabled = false});
///
/// A device and dtype in the type are checked at compile time. As a member, write
/// `std::optional<mezzo::AutocastGuard<>>`.
///
/// The end of the scope, also by return or exception, restores the previous state exactly: enabled,
/// dtype, cache flag, nesting. The thread's outermost exit clears libtorch's cache of casts. Guards
/// of a thread must end in reverse order, in that thread and before `main` returns. A guard that
/// lives across a coroutine's suspension leaves the wrong state behind, as `torch.autocast` around
/// an await does: enter an AutocastStateGuard after each suspension instead. Call `backward()`
/// after the region.
///
/// The region applies to ops whose tensors are on the device; for the CPU and CUDA at once enter
/// both. Warns once per process if the device is CUDA and there is none, as Python does, and if it
/// is a CPU without float16 instructions and the dtype is float16. Costs some thread-local writes;
/// no host sync.
template <c10::DeviceType Device = detail::kRuntimeDevice,
          at::ScalarType Dtype = default_autocast_dtype(Device)>
class AutocastGuard {
  static constexpr bool kHasAutocast = default_autocast_dtype(Device) != at::ScalarType::Undefined;
  static_assert(
      kHasAutocast || detail::RuntimeDevice<Device>,
      "mezzo::AutocastGuard: this device type has no autocast; use that of the model, such as "
      "torch::kCPU or kCUDA");
  static_assert(!kHasAutocast || is_autocast_dtype_supported(Device, Dtype),
                "mezzo::AutocastGuard: autocast cannot lower to this dtype; use torch::kHalf or "
                "torch::kBFloat16, or {.enabled = false} for full precision");

 public:
  /// Enters a region of the device and dtype in the type.
  [[nodiscard]] explicit AutocastGuard() requires(!detail::RuntimeDevice<Device>)
      : AutocastGuard(AutocastOptions{}) {}
  /// Deleted: write `AutocastGuard<torch::kCUDA>`, or pass a device.
  AutocastGuard() requires detail::RuntimeDevice<Device>
  = delete;

  /// Enters a region of `options`.
  /// \throws c10::Error, and changes nothing, if the options have no device or contradict the type,
  ///   if autocast on the device cannot lower to the dtype, also when disabled, and for an
  ///   output_dtype or overrides of an op that is not installed
  [[nodiscard]] explicit AutocastGuard(const AutocastOptions& options) {
    const AutocastOptions validated =
        detail::validated_options(detail::with_static_device(options, Device, Dtype));
    TORCH_CHECK(!validated.output_dtype,
                "output_dtype: a guard has no result to cast; pass the options to "
                "mezzo::autocast(options, [&] { return ...; }) or to mezzo::AutocastModule");
    region_.emplace(validated);
  }

  /// Enters a region as `torch.autocast(device, dtype, enabled, cache_enabled)` does.
  /// \param device a device or its type
  /// \param dtype float16 or bfloat16; unset means `at::autocast::get_autocast_dtype(device)`
  [[nodiscard]] explicit AutocastGuard(detail::DeviceOrType auto device,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       bool enabled = true,
                                       std::optional<bool> cache_enabled = std::nullopt)  //
      requires detail::RuntimeDevice<Device>
      : AutocastGuard(AutocastOptions{.device_type = c10::Device(device).type(),
                                      .dtype = dtype,
                                      .enabled = enabled,
                                      .cache_enabled = cache_enabled}) {}

  /// Deleted for text: write `torch::kCUDA`, or `torch::Device(text)`.
  AutocastGuard(const detail::DeviceText auto&, auto...) = delete;  // AutocastGuard(torch::kCUDA)

  /// Returns whether the region is enabled and has not ended.
  [[nodiscard]] bool is_enabled() const noexcept { return region_ && region_->is_enabled(); }

  /// Ends the region now, before `backward()` in code without a block. The end of the scope then
  /// does nothing.
  void end() noexcept { region_.reset(); }

 private:
  std::optional<detail::AutocastRegion> region_;
};

/// Calls `function()` in a region of `options` and returns its result:
///
///     auto loss = mezzo::autocast(options, [&] { return criterion(model->forward(x), y); });
///
/// \throws c10::Error as AutocastGuard does
template <class F>
decltype(auto) autocast(const AutocastOptions& options, F&& function) {
  if constexpr (std::invocable<F>) {
    const AutocastOptions validated = detail::validated_options(options);
    const detail::AutocastRegion region(validated);
    return detail::call_with_output_dtype(validated.output_dtype, std::forward<F>(function));
  } else {
    static_assert(std::invocable<F>,
                  "mezzo::autocast(options, f): f cannot be called without arguments. If there is "
                  "an error inside f above, fix it; otherwise capture the arguments, or make a "
                  "callable that takes them: mezzo::autocast_wrap(options, f)");
    return at::Tensor();  // suppresses errors about the use of the result
  }
}

/// Deleted: construct an AutocastGuard, or pass options in braces.
void autocast(detail::DeviceOrType auto, std::invocable auto&&) = delete;  // {.device_type = ...}
void autocast(detail::DeviceOrType auto, auto&&...) = delete;  // AutocastGuard guard(device, dtype)
void autocast(const detail::DeviceText auto&, auto&&...) = delete;  // AutocastGuard(torch::kCUDA)

/// Returns a callable that runs `function` in a region of `options`, in any thread that calls it:
/// `@torch.autocast` on a function.
///
///     auto step = mezzo::autocast_wrap(mezzo::recommended_autocast(device), &Trainer::step);
///     step(trainer, batch);
///
/// Forwards all arguments perfectly, move-only ones too, and returns the result unchanged,
/// references included, unless the options have an output_dtype. Copies an lvalue `function`; pass
/// std::ref(function) to keep a reference.
/// \throws c10::Error as AutocastGuard does, here and not when called
template <class F>
[[nodiscard]] auto autocast_wrap(const AutocastOptions& options, F&& function) {
  return detail::wrap_in_guard<detail::AutocastRegion>(detail::validated_options(options),
                                                       std::forward<F>(function));
}

/// Like autocast_wrap(options, function), with device and dtype checked at compile time:
/// `mezzo::autocast_wrap<torch::kCPU>({}, [&](auto x) { return net->forward(x); })`.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device), class F>
[[nodiscard]] auto autocast_wrap(const AutocastOptions& options, F&& function) {
  static_assert(std::is_destructible_v<AutocastGuard<Device, Dtype>>);  // its static_asserts
  return autocast_wrap(detail::with_static_device(options, Device, Dtype),
                       std::forward<F>(function));
}
/// Calls autocast_wrap with default options.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device), class F>
[[nodiscard]] auto autocast_wrap(F&& function) {
  return autocast_wrap<Device, Dtype>(AutocastOptions{}, std::forward<F>(function));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
