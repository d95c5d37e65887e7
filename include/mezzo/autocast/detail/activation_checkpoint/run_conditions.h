/// \file
/// RunConditions, the thread's state at the first run, which the second run gets again.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/version.h>

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Leaves libtorch's cache of weight casts unread and unwritten. A cast that was cached before the
/// first run is gone by the second, so that the two runs would have different graphs.
class WeightCastsUncached {
 public:
  WeightCastsUncached() noexcept : found_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WeightCastsUncached() { at::autocast::set_autocast_cache_enabled(found_); }
  WeightCastsUncached(const WeightCastsUncached&) = delete;
  WeightCastsUncached& operator=(const WeightCastsUncached&) = delete;

 private:
  bool found_;
};

/// The device that `torch::kCUDA` without an index means, if there is one.
inline std::optional<c10::Device> current_cuda_device() {
  if (!at::hasCUDA()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
}

/// Autocast state, random state and current device of the thread that makes it.
class RunConditions {
 public:
  explicit RunConditions(bool with_random_state)
      : autocast_(AutocastState::capture()), cuda_device_(current_cuda_device()) {
    if (with_random_state) random_.emplace();
  }

  /// Runs the calling thread under `conditions`, recording for autograd, and restores what was
  /// there.
  class Scope {
   public:
    explicit Scope(const RunConditions& conditions)
        : device_(conditions.cuda_device_), autocast_(conditions.autocast_) {
      if (conditions.random_) random_.emplace(*conditions.random_);
    }

   private:
    c10::AutoGradMode recording_{true};
    c10::OptionalDeviceGuard device_;
    std::optional<RandomState::Scope> random_;
    AutocastState::Scope autocast_;
    WeightCastsUncached uncached_;
  };

 private:
  AutocastState autocast_;
  std::optional<c10::Device> cuda_device_;
  std::optional<RandomState> random_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
