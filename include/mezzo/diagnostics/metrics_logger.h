/// \file
/// MetricsLogger: logs loss, loss scale, gradient norm and speed of each step without host syncs.
#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/step_metrics.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Metrics of a step that the training program supplies.
struct StepMetricsOptions {
  std::int64_t tokens = 0;  ///< tokens or samples since the previous step; 0 if not counted
  std::optional<double> learning_rate = std::nullopt;  ///< of the step
};

namespace detail {

/// Asynchronous copy of a one-element tensor to the host.
class AsyncScalar {
 public:
  explicit AsyncScalar(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.numel() == 1,
                "MetricsLogger::record: expected a loss with one element, but got ", tensor.numel(),
                " elements; pass its mean or sum");
    const c10::InferenceMode no_inference(false);
    const at::Device device = tensor.device();
    const auto dtype = tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    host_ = empty_host_tensor({}, dtype, device);
    host_.copy_(tensor.detach().reshape({}).to(dtype), /*non_blocking=*/true);
    if (device.is_cpu()) return;
    copied_.emplace(device.type());
    copied_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  /// Returns whether the copy has completed.
  bool ready() const {
    if (!copied_) return true;
    const RelaxedCaptureModeGuard relaxed(copied_->device());
    return copied_->query();
  }

  /// Returns the value, after synchronizing if not ready(); none for an undefined tensor.
  std::optional<double> value() const {
    if (!host_.defined()) return std::nullopt;
    if (copied_) {
      const RelaxedCaptureModeGuard relaxed(copied_->device());
      copied_->synchronize();
    }
    return host_.item<double>();
  }

 private:
  at::Tensor host_;
  std::optional<c10::Event> copied_;
};

/// Returns StepMetrics::memory_bytes for a loss.
inline std::optional<double> measure_memory_bytes(const at::Tensor& loss) {
  if (!loss.defined()) return std::nullopt;
  if (loss.is_cuda()) {
    const auto stats =
        at::getDeviceAllocator(loss.device().type())->getDeviceStats(loss.device().index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  return resident_memory_bytes();
}

}  // namespace detail

/// Passes the metrics of each step of one optimizer to callbacks, in order. Steps whose results are
/// still on a device are delivered by a later `record`. Only `flush` synchronizes, and a `record`
/// with 1024 steps pending, for the oldest. Costs microseconds per step, and on a device an
/// asynchronous copy of the loss.
///
///     mezzo::MetricsLogger logger;
///     logger.add_callback(mezzo::CsvWriter("run.csv"));
///     for (...) {
///       auto result = scaler.step(optimizer, {.max_norm = 1.0});
///       scaler.update();
///       logger.record(result, loss, {.tokens = 4096});
///     }
///
/// Not thread-safe. Callbacks run in `record`, `flush` and the destructor.
class MetricsLogger {
 public:
  /// Receives each step once, in the thread that calls `record` or `flush`.
  using Callback = std::function<void(const StepMetrics&)>;

  /// \param first_step  number of the first recorded step; more than 1 in a resumed run
  explicit MetricsLogger(std::int64_t first_step = 1) : next_step_(first_step) {}
  /// Flushes. Exceptions of callbacks become warnings.
  ~MetricsLogger() {
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("MetricsLogger: failed to flush the last steps: ", error.what());
    } catch (...) {
      TORCH_WARN(
          "MetricsLogger: failed to flush the last steps: a callback threw an exception that does "
          "not derive from std::exception");
    }
  }
  MetricsLogger(const MetricsLogger&) = delete;
  MetricsLogger& operator=(const MetricsLogger&) = delete;

  /// Adds a callback, which receives all steps that are not delivered yet. A callback may add
  /// another, which receives the following steps.
  ///
  /// While any callback's `is_pending()` returns true, exceptions of callbacks are stored and
  /// thrown later, so that a TraceOnSkips finishes its trace before a DivergenceMonitor throws.
  /// \param callback  a CsvWriter, TensorBoardWriter, DivergenceMonitor, TraceOnSkips, `std::ref`
  ///   of a RunReport, or any callable
  template <class C>
  void add_callback(C callback) {
    using Target = std::unwrap_reference_t<C>;
    if constexpr (requires(const Target& target) { target.is_pending(); }) {
      const auto shared = std::make_shared<C>(std::move(callback));
      callbacks_.push_back({[shared](const StepMetrics& metrics) { (*shared)(metrics); },
                            [shared] {
                              const Target& target = *shared;
                              return target.is_pending();
                            }});
    } else {
      callbacks_.push_back({std::move(callback), [] { return false; }});
    }
  }

  /// Records a step.
  /// \param loss  unscaled loss with one element, which is only read; undefined for none
  /// \throws c10::Error for a loss with several elements; the error of a step result, whose step is
  ///   then dropped; the first exception of a callback, after all callbacks have run
  void record(const StepResult& result, const at::Tensor& loss,
              const StepMetricsOptions& options = {}) {
    constexpr std::size_t kMaxPending = 1024;
    detail::AsyncScalar async_loss(loss);
    StepMetrics metrics{.step = next_step_++,
                        .wall_time = detail::wall_time_now(),
                        .learning_rate = options.learning_rate,
                        .memory_bytes = detail::measure_memory_bytes(loss)};
    const auto previous = std::exchange(last_record_, std::chrono::steady_clock::now());
    if (previous) {
      metrics.step_seconds = std::chrono::duration<double>(*last_record_ - *previous).count();
      if (options.tokens > 0) {
        metrics.tokens_per_second = static_cast<double>(options.tokens) / metrics.step_seconds;
      }
    }
    pending_.push_back({metrics, result, std::move(async_loss)});
    if (pending_.size() > kMaxPending) deliver_first();
    while (!pending_.empty() && pending_.front().result.ready() && pending_.front().loss.ready()) {
      deliver_first();
    }
  }

  /// Restarts the timer, so that the time since the previous `record` (validation, a checkpoint)
  /// does not count into `step_seconds` and `tokens_per_second`. Before the first step, includes
  /// that step in the timing.
  void restart_clock() { last_record_ = std::chrono::steady_clock::now(); }

  /// Delivers all recorded steps. Synchronizes with the device.
  void flush() {
    while (!pending_.empty()) deliver_first();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  struct PendingStep {
    StepMetrics metrics;
    StepResult result;
    detail::AsyncScalar loss;
  };
  struct CallbackEntry {
    Callback call;
    std::function<bool()> is_pending;
  };

  /// May synchronize with the device.
  void deliver_first() {
    PendingStep first = std::move(pending_.front());
    pending_.pop_front();  // before anything that may throw, which would block later steps
    StepMetrics& metrics = first.metrics;
    metrics.loss = first.loss.value();
    metrics.scale = first.result.scale();
    metrics.skipped = !first.result.applied();
    metrics.grad_norm = first.result.grad_norm();
    for (std::size_t i = 0, count = callbacks_.size(); i < count; ++i) {
      try {
        callbacks_[i].call(metrics);
      } catch (...) {
        if (error_ == nullptr) error_ = std::current_exception();
      }
    }
    const bool is_pending =
        std::any_of(callbacks_.begin(), callbacks_.end(),
                    [](const CallbackEntry& entry) { return entry.is_pending(); });
    if (error_ != nullptr && !is_pending) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::int64_t next_step_;
  std::optional<std::chrono::steady_clock::time_point> last_record_;
  std::deque<PendingStep> pending_;
  std::deque<CallbackEntry> callbacks_;  // a deque, since callbacks may add callbacks
  std::exception_ptr error_;             // of a callback, until it is rethrown
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
