/// \file
/// What a run did, step by step, without making the host wait for it:
///
///     mezzo::Telemetry telemetry;
///     telemetry.write_to(mezzo::CsvFile("run.csv"));
///     mezzo::RunReport report("BERT, half");
///     telemetry.write_to(std::ref(report));
///     for (...) {
///       auto result = scaler.step(optimizer, {.max_norm = 1.0});
///       scaler.update();
///       telemetry.record(result, loss, {.max_norm = 1.0, .tokens = 4096});
///     }
///     telemetry.flush();
///     report.save("run.html");
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor of one element on its way to the host. The copy overwrites a NaN that no arithmetic
/// makes, so its arrival shows without a question to the device.
class LateNumber {
 public:
  explicit LateNumber(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.numel() == 1, "Telemetry::record: loss has ", tensor.numel(),
                " elements; give its mean or sum");
    const at::Tensor number = tensor.detach().reshape({}).to(at::kFloat);
    if (number.is_cpu()) {
      value_ = number.item<float>();
      return;
    }
    const c10::InferenceMode no_inference(false);
    device_ = number.device();
    host_ = at::empty({}, at::TensorOptions(at::kFloat).pinned_memory(true));
    *host_.mutable_data_ptr<float>() = std::bit_cast<float>(kNotThere);
    host_.copy_(number, /*non_blocking=*/true);
  }

  bool ready() {
    if (!host_.defined()) return true;
    const std::atomic_ref<std::uint32_t> bits(*static_cast<std::uint32_t*>(host_.data_ptr()));
    return bits.load(std::memory_order_acquire) != kNotThere;
  }

  /// None of an undefined tensor. May wait for the device.
  std::optional<double> value() {
    if (host_.defined()) {
      if (!ready())
        c10::impl::VirtualGuardImpl(device_->type()).synchronizeDevice(device_->index());
      value_ = *host_.const_data_ptr<float>();
      host_ = at::Tensor();
    }
    return value_;
  }

 private:
  static constexpr std::uint32_t kNotThere = 0x7FC5EED5U;

  at::Tensor host_;
  std::optional<at::Device> device_;
  std::optional<double> value_;
};

}  // namespace detail

/// What is known of one step, once it is. What nobody told or measured is unset.
struct TelemetryRecord {
  std::int64_t step = 0;                      ///< counted from the Telemetry's first
  double wall_time = 0;                       ///< when `record` was called, in seconds since 1970
  std::optional<double> loss = std::nullopt;  ///< as given to `record`
  double scale = 1;                           ///< the loss scale that the gradients carried
  bool skipped = false;  ///< whether an inf or NaN in a gradient skipped the step
  std::optional<double> grad_norm = std::nullopt;   ///< unscaled, before clipping
  std::optional<double> clip_ratio = std::nullopt;  ///< what clipping multiplied gradients by
  std::optional<double> underflow = std::nullopt;   ///< share of gradient values that are lost
  std::optional<double> tokens_per_second = std::nullopt;  ///< since the record before
  double seconds = 0;                                  ///< since the record before; 0: not known
  std::optional<double> learning_rate = std::nullopt;  ///< as given to `record`
  /// Most bytes so far that libtorch's allocator had in use on the loss's device; of a loss on the
  /// CPU what the process has resident now (Linux).
  std::optional<double> memory_bytes = std::nullopt;

  /// Returns the columns of files, with their names; `skipped` is 0 or 1.
  std::array<std::pair<const char*, std::optional<double>>, 9> numbers() const {
    return {{{"loss", loss},
             {"scale", scale},
             {"skipped", skipped ? 1.0 : 0.0},
             {"grad_norm", grad_norm},
             {"clip_ratio", clip_ratio},
             {"underflow", underflow},
             {"tokens_per_second", tokens_per_second},
             {"memory_bytes", memory_bytes},
             {"learning_rate", learning_rate}}};
  }
};

/// What only the training program knows of a step.
struct TelemetryStep {
  double max_norm = std::numeric_limits<double>::infinity();  ///< that gradients were clipped to
  std::int64_t tokens = 0;  ///< or samples, since the step before; 0: not counted
  std::optional<double> underflow = std::nullopt;      ///< as UnderflowReport::lost gives it
  std::optional<double> learning_rate = std::nullopt;  ///< that the step had
};

namespace detail {

inline double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns TelemetryRecord::memory_bytes of a loss.
inline std::optional<double> memory_in_use(const at::Tensor& loss) {
  if (!loss.defined()) return std::nullopt;
  if (loss.is_cuda()) {
    const auto stats =
        at::getDeviceAllocator(loss.device().type())->getDeviceStats(loss.device().index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  return resident_bytes();
}

}  // namespace detail

/// Collects the steps of one optimizer and hands them to writers in order. It keeps each step's
/// handle and asks it again at the next `record`, so records come some steps late where a device
/// decides. Nothing waits until `flush`, or until 1024 steps are kept: then `record` waits for the
/// earliest. A step costs some microseconds on the host, and on a device one copy of the loss. Give
/// each of several models a Telemetry of its own.
///
/// One thread at a time. Writers are called from `record`, `flush` and the destructor.
class Telemetry {
 public:
  /// Hears of each record, on the thread that calls `record` or `flush`.
  using Writer = std::function<void(const TelemetryRecord&)>;

  /// \param first_step  the number of the first recorded step: more than 1 in a resumed run
  explicit Telemetry(std::int64_t first_step = 1) : next_step_(first_step) {}
  /// Hands over what is left, as `flush` does. What a writer throws here becomes a warning.
  ~Telemetry() {
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("Telemetry: the last records were not written: ", error.what());
    }
  }
  Telemetry(const Telemetry&) = delete;
  Telemetry& operator=(const Telemetry&) = delete;

  /// `writer` gets all records that are not handed over yet. A file (telemetry_files.h), a
  /// DivergenceWatch, a `std::ref` to a RunReport (run_report.h), or any callable.
  void write_to(Writer writer) { writers_.push_back(std::move(writer)); }

  /// Notes a step. `loss` has one element, is not scaled, and is only read; undefined: no loss.
  /// \throws c10::Error for a loss of several elements; what a step's result throws, whose record
  ///   is then lost; and what the first writer throws that does, once all have had the record
  void record(const StepResult& result, const at::Tensor& loss, const TelemetryStep& step = {}) {
    constexpr std::size_t kMost = 1024;
    detail::LateNumber late_loss(loss);
    TelemetryRecord record{.step = next_step_++,
                           .wall_time = detail::seconds_since_1970(),
                           .underflow = step.underflow,
                           .learning_rate = step.learning_rate,
                           .memory_bytes = detail::memory_in_use(loss)};
    const auto before = std::exchange(last_call_, std::chrono::steady_clock::now());
    if (before) record.seconds = std::chrono::duration<double>(*last_call_ - *before).count();
    if (before && step.tokens > 0) {
      record.tokens_per_second = static_cast<double>(step.tokens) / record.seconds;
    }
    pending_.push_back({record, result, std::move(late_loss), step.max_norm});
    if (pending_.size() > kMost) hand_over_first();
    while (!pending_.empty() && pending_.front().result.ready() && pending_.front().loss.ready()) {
      hand_over_first();
    }
  }

  /// Begins to time the next step: what the host did since the last one (a score, a checkpoint)
  /// does not count into its tokens a second. Before the first step it lets that one count too.
  void restart_clock() { last_call_ = std::chrono::steady_clock::now(); }

  /// Waits for the device, and hands over all that was recorded.
  void flush() {
    while (!pending_.empty()) hand_over_first();
  }

 private:
  struct Pending {
    TelemetryRecord record;
    StepResult result;
    detail::LateNumber loss;
    double max_norm;
  };

  /// May wait for the device.
  void hand_over_first() {
    Pending first = std::move(pending_.front());
    pending_.pop_front();  // also where its result, or a writer, throws: the next are not held up
    TelemetryRecord& record = first.record;
    record.loss = first.loss.value();
    record.scale = first.result.scale();
    record.skipped = !first.result.ran();
    record.grad_norm = first.result.grad_norm();
    if (record.grad_norm && !record.skipped && !detail::is_positive_infinity(first.max_norm)) {
      record.clip_ratio = std::min(1.0, first.max_norm / (*record.grad_norm + 1e-6));
    }
    std::exception_ptr error;
    for (const Writer& writer : writers_) {
      try {
        writer(record);
      } catch (...) {
        if (error == nullptr) error = std::current_exception();
      }
    }
    if (error != nullptr) std::rethrow_exception(error);
  }

  std::int64_t next_step_;
  std::optional<std::chrono::steady_clock::time_point> last_call_;
  std::deque<Pending> pending_;
  std::vector<Writer> writers_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
