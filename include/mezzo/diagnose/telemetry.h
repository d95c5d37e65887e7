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

#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/late_number.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What is known of one step, once it is. What nobody told or measured is unset.
struct TelemetryRecord {
  std::int64_t step = 0;
  double wall_time = 0;  ///< when `record` was called, in seconds since 1970
  std::optional<double> loss = std::nullopt;
  double scale = 1;      ///< the loss scale that the gradients carried
  bool skipped = false;  ///< whether an inf or NaN in a gradient skipped the step
  std::optional<double> grad_norm = std::nullopt;   ///< unscaled, before clipping
  std::optional<double> clip_ratio = std::nullopt;  ///< what clipping multiplied gradients by
  std::optional<double> underflow = std::nullopt;   ///< share of gradient values that are lost
  std::optional<double> tokens_per_second = std::nullopt;
  /// Most bytes so far that libtorch's allocator had in use on the loss's device; of a loss on the
  /// CPU what the process has resident now (Linux).
  std::optional<double> memory_bytes = std::nullopt;

  /// The columns of files, with their names; `skipped` is 0 or 1.
  std::array<std::pair<const char*, std::optional<double>>, 8> numbers() const {
    return {{{"loss", loss},
             {"scale", scale},
             {"skipped", skipped ? 1.0 : 0.0},
             {"grad_norm", grad_norm},
             {"clip_ratio", clip_ratio},
             {"underflow", underflow},
             {"tokens_per_second", tokens_per_second},
             {"memory_bytes", memory_bytes}}};
  }
};

/// What only the training program knows of a step.
struct TelemetryStep {
  double max_norm = std::numeric_limits<double>::infinity();  ///< that gradients were clipped to
  std::int64_t tokens = 0;  ///< or samples, since the step before; 0: not counted
  std::optional<double> underflow = std::nullopt;  ///< as UnderflowReport::lost gives it
};

/// Collects steps and hands them to writers in order. It keeps each step's handle and asks it again
/// at the next `record`, so records come some steps late where a device decides, and nothing waits
/// until `flush`. A step costs some microseconds on the host, and on a device one copy of the loss.
///
/// One thread at a time. Writers are called from `record`, `flush` and the destructor.
class Telemetry {
 public:
  using Writer = std::function<void(const TelemetryRecord&)>;

  /// \param first_step  the number of the first recorded step: more than 1 in a resumed run
  explicit Telemetry(std::int64_t first_step = 1) : next_step_(first_step) {}

  /// Hands over what is left, as `flush` does. What a writer throws here becomes a warning.
  ~Telemetry();
  Telemetry(const Telemetry&) = delete;
  Telemetry& operator=(const Telemetry&) = delete;

  /// `writer` gets all records that are not handed over yet. A file (telemetry_files.h), a
  /// `std::ref` to a RunReport (run_report.h), or any callable.
  void write_to(Writer writer) { writers_.push_back(std::move(writer)); }

  /// Notes a step. `loss` has one element, is not scaled, and is only read; undefined: no loss.
  /// \throws c10::Error for a loss of several elements, and what a writer throws
  void record(const StepResult& result, const at::Tensor& loss, const TelemetryStep& step = {});

  /// Waits for the device, and hands over all that was recorded.
  void flush() { deliver(/*waits=*/true); }

 private:
  struct Pending {
    TelemetryRecord record;
    StepResult result;
    detail::LateNumber loss;
    double max_norm;
  };

  void deliver(bool waits);
  static TelemetryRecord finished(Pending& pending);

  std::int64_t next_step_;
  std::optional<std::chrono::steady_clock::time_point> last_call_;
  std::deque<Pending> pending_;
  std::vector<Writer> writers_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/telemetry_impl.h>  // IWYU pragma: export
