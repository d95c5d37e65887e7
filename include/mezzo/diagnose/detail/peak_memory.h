/// \file
/// How many bytes libtorch's allocators hand out at most.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The most bytes at a time that this thread, and the backward passes that it starts, took from
/// libtorch's allocators, on all devices, beyond those in use at `restart`. Takes the profiler's
/// place, to which allocators report; where that is taken there is no number. The CPU's allocator
/// writes a warning when memory goes that came before this object, so it lives long.
class PeakMemory {
 public:
  PeakMemory() {
    constexpr auto kPlace = c10::DebugInfoKind::PROFILER_STATE;
    if (c10::ThreadLocalDebugInfo::get(kPlace) != nullptr) return;
    counter_ = std::make_shared<Counter>();
    guard_.emplace(kPlace, counter_);
  }

  void restart() {
    if (counter_ == nullptr) return;
    counter_->live = 0;
    counter_->peak = 0;
  }

  std::optional<int64_t> bytes() const {
    if (counter_ == nullptr) return std::nullopt;
    return counter_->peak.load();
  }

 private:
  /// A profiler, since that is what libtorch takes it for, which profiles nothing.
  struct Counter final : torch::profiler::impl::ProfilerStateBase {
    using Base = torch::profiler::impl::ProfilerStateBase;

    Counter()
        : Base(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled,
                                                     /*report_input_shapes=*/false,
                                                     /*profile_memory=*/true)) {}

    torch::profiler::impl::ActiveProfilerType profilerType() override {
      return torch::profiler::impl::ActiveProfilerType::NONE;
    }

    void reportMemoryUsage(void* /*memory*/, int64_t size, std::size_t /*allocated*/,
                           std::size_t /*reserved*/, c10::Device /*device*/) override {
      const int64_t now = live.fetch_add(size) + size;
      int64_t most = peak.load();
      while (now > most && !peak.compare_exchange_weak(most, now)) {
      }
    }

    std::atomic<int64_t> live = 0;
    std::atomic<int64_t> peak = 0;
  };

  std::shared_ptr<Counter> counter_;
  std::optional<c10::DebugInfoGuard> guard_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
