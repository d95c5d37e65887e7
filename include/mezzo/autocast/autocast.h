/// \file
/// Automatic mixed precision for the forward pass: inside an enabled region libtorch runs matrix
/// products and convolutions in half or bfloat16 and the ops that need the range in float32. What
/// Python calls `torch.autocast`.
///
/// Autocast state belongs to a thread. libtorch's cache of weight casts that goes with it belongs
/// to the whole process: see AutocastOptions::cache_enabled, and weight_cache.h for a better one.
/// Modules are wrapped by autocast_module.h.
#pragma once

#include <mezzo/autocast/detail/op_policy/policy_edits.h>
#include <mezzo/autocast/detail/region.h>
#include <mezzo/autocast/detail/scoped_function.h>
#include <mezzo/autocast/detail/thread_state.h>
#include <mezzo/autocast/detail/weight_cache/thread_caches.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>

#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How a guard behaves, beside its device and dtype.
struct AutocastOptions {
  /// False makes the region run in full precision, also inside an enabled one. Tensors that the
  /// surrounding region lowered stay as they are: cast them (`x.to(torch::kFloat)`) before use.
  bool enabled = true;

  /// Whether libtorch keeps the low-precision copy of a float32 parameter until the outermost
  /// region of the thread ends, so that a weight used twice is cast once. Unset, as where the
  /// region is entered: what the surrounding region or
  /// `at::autocast::set_autocast_cache_enabled` said, and on in a thread where nobody did.
  ///
  /// libtorch has one such cache a process, keyed by the weight alone: set this to false where
  /// weights change inside a region, where a `NoGradGuard` comes and goes inside it (a copy made
  /// without gradients would be reused with them), or where threads run the same weights in
  /// different dtypes. Or give the region a `weight_cache`, which has none of these traps. False
  /// turns a surrounding region's `weight_cache` off too, for this region and those inside it.
  std::optional<bool> cache_enabled = std::nullopt;

  /// Edits to the op lists, an OpPolicy (op_policy.h), for this region: on top of the surrounding
  /// region's where regions nest.
  PolicyRef policy = {};

  /// A WeightCache (weight_cache.h), which takes the place of libtorch's cache in this region.
  /// Without one the surrounding region's stays in force.
  WeightCacheRef weight_cache = {};
};

/// A region of mixed precision that ends with the scope:
///
///     mezzo::Autocast<torch::kCUDA> autocast;                     // half on CUDA
///     mezzo::Autocast<torch::kCPU> autocast;                      // bfloat16 on the CPU
///     mezzo::Autocast<torch::kCUDA, torch::kBFloat16> autocast;   // or as said
///     mezzo::Autocast<torch::kCPU> exact({.enabled = false});     // full precision in a region
///     mezzo::Autocast<torch::kCPU> autocast(policy);              // with edited op lists
///     mezzo::Autocast<torch::kCPU> autocast(cache);               // with a WeightCache
///     mezzo::Autocast<torch::kCPU> autocast({.policy = policy, .weight_cache = cache});
///
/// Leaving the scope, also by return or exception, restores exactly what was there: enabled, dtype,
/// cache flag, nesting; at the thread's outermost exit the weight cache is cleared. Scopes of one
/// thread must end in reverse order, in that thread, which block scope sees to; a static or
/// thread_local guard of that thread may end when the process or the thread does. A guard that
/// lives across a coroutine's suspension may not: it leaves the wrong state behind, as
/// `torch.autocast` around an await does, and warns. Enter an AutocastState::Scope after each
/// suspension instead. Entering and leaving costs some thread-local writes and no host sync;
/// nothing throws. Call `backward()` after the scope.
///
/// The region acts on ops whose tensors are on `Device`; for CPU and CUDA at once open both. It
/// asks nothing of the hardware: see `recommended` in mezzo/base/precision.h for what is fast on
/// this machine.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device)>
class Autocast {
  static_assert(
      default_autocast_dtype(Device) != at::ScalarType::Undefined,
      "mezzo::Autocast: this device type has no autocast; use torch::kCPU or torch::kCUDA");
  static_assert(default_autocast_dtype(Device) == at::ScalarType::Undefined ||
                    autocast_accepts(Device, Dtype),
                "mezzo::Autocast: autocast cannot lower to this dtype; use torch::kHalf or "
                "torch::kBFloat16, or {.enabled = false} for full precision");

 public:
  [[nodiscard]] explicit Autocast(AutocastOptions options = {}) noexcept
      : region_({Device, Dtype, options.enabled, options.cache_enabled, std::move(options.policy),
                 std::move(options.weight_cache)}) {}

  /// The region under an OpPolicy.
  [[nodiscard]] explicit Autocast(PolicyRef policy) noexcept
      : Autocast(AutocastOptions{.policy = std::move(policy)}) {}

  /// The region with a WeightCache.
  [[nodiscard]] explicit Autocast(WeightCacheRef cache) noexcept
      : Autocast(AutocastOptions{.weight_cache = std::move(cache)}) {}

 private:
  detail::Region region_;
};

/// Autocast's twin for a device and dtype that are known at run time only: a flag, a file, the
/// hardware.
///
///     mezzo::AutocastGuard autocast(mezzo::recommended(device));
///     mezzo::AutocastGuard autocast(device, torch::kBFloat16, {.enabled = flags.amp});
///
/// Everything said of Autocast holds. Throws c10::Error, and changes nothing, when the device type
/// has no autocast or cannot lower to the dtype, also when not enabled. Without a dtype it takes
/// the device's default, as Autocast does; an inner `torch.autocast` in Python would inherit the
/// outer one's.
class AutocastGuard {
 public:
  [[nodiscard]] explicit AutocastGuard(const AutocastSetting& setting, PolicyRef policy = {},
                                       WeightCacheRef cache = {})
      : region_(detail::checked_region(setting, std::move(policy), std::move(cache))) {}

  [[nodiscard]] AutocastGuard(const AutocastSetting& setting, WeightCacheRef cache)
      : AutocastGuard(setting, PolicyRef(), std::move(cache)) {}

  [[nodiscard]] explicit AutocastGuard(c10::DeviceType device,
                                       std::optional<at::ScalarType> dtype = std::nullopt,
                                       AutocastOptions options = {})
      : AutocastGuard({.device = device,
                       .dtype = dtype.value_or(default_autocast_dtype(device)),
                       .enabled = options.enabled,
                       .cache_enabled = options.cache_enabled},
                      std::move(options.policy), std::move(options.weight_cache)) {}

 private:
  detail::Region region_;
};

/// `function` as a callable that runs under autocast in whatever thread calls it, and is otherwise
/// the same: all arguments are forwarded perfectly, move-only ones too, the result is returned as
/// it is, references included, overloads, const and noexcept are kept. What Python does by
/// decorating `forward`.
///
///     auto forward = mezzo::autocast<torch::kCPU>([&](auto x) { return net->forward(x); });
///     auto step = mezzo::autocast(&Trainer::step, mezzo::recommended(device));
///     step(trainer, batch);
///
/// A lvalue `function` is copied, as by std::bind_front; pass std::ref(function) to keep a
/// reference.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device), class F>
[[nodiscard]] auto autocast(F&& function, AutocastOptions options = {}) {
  static_assert(std::is_nothrow_constructible_v<Autocast<Device, Dtype>>);
  using Function = detail::ScopedFunction<std::decay_t<F>, detail::Region, detail::RegionState>;
  return Function(std::forward<F>(function),
                  detail::RegionState{Device, Dtype, options.enabled, options.cache_enabled,
                                      std::move(options.policy), std::move(options.weight_cache)});
}

/// The same for a setting known at run time. Throws as AutocastGuard does, here and not at the
/// calls.
template <class F>
[[nodiscard]] auto autocast(F&& function, const AutocastSetting& setting, PolicyRef policy = {},
                            WeightCacheRef cache = {}) {
  using Function = detail::ScopedFunction<std::decay_t<F>, detail::Region, detail::RegionState>;
  return Function(std::forward<F>(function),
                  detail::checked_region(setting, std::move(policy), std::move(cache)));
}

/// The autocast state of a thread, for all device types: enabled, dtype, op policy, weight cache,
/// and whether casts are cached. A new thread starts with autocast off; capture the state where it
/// is set, and hand it over:
///
///     pool.submit([state = mezzo::AutocastState::capture()] {
///       mezzo::AutocastState::Scope scope(state);
///       ...
///     });
///
/// A value: copy it and keep it as long as you like. at::ThreadLocalState carries more (grad mode,
/// profiler) but neither the cache flag, nor the clearing of the cache, nor a policy, nor a
/// WeightCache. A WeightCache that isolates threads gives the other thread copies of its own.
class AutocastState {
 public:
  /// The calling thread's state.
  [[nodiscard]] static AutocastState capture() noexcept { return AutocastState(); }

  /// Runs the calling thread under `state` and restores what was there. Counts as a region: where
  /// it is the thread's outermost, its end clears the process's weight cache.
  class Scope {
   public:
    [[nodiscard]] explicit Scope(const AutocastState& state) noexcept : scope_(state.state_) {}

   private:
    detail::ThreadStateScope scope_;
  };

 private:
  AutocastState() noexcept : state_(detail::this_thread_state()) {}

  detail::ThreadState state_;
};

/// `function` as a callable that runs under the autocast state of the thread that makes it,
/// wherever it is called: `std::thread worker(mezzo::with_current_autocast(work), batch);`.
/// Forwards as `autocast` does.
template <class F>
[[nodiscard]] auto with_current_autocast(F&& function) {
  using Function = detail::ScopedFunction<std::decay_t<F>, AutocastState::Scope, AutocastState>;
  return Function(std::forward<F>(function), AutocastState::capture());
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
