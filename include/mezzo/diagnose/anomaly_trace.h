/// \file
/// Where did the inf or NaN begin? Watches every op of a step, forward and backward:
///
///     mezzo::AnomalyTrace trace(*model, {.loss_scale = [&] { return scaler.get_scale(); }});
///     scaler.scale(criterion(model->forward(x), y)).backward();
///     std::cerr << trace;                              // one step, on request
///
/// or by itself, once three steps in a row were skipped:
///
///     telemetry.write_to(mezzo::AnomalyWatch(*model, {.skips_in_a_row = 3}));
///
/// The trace names the op that made the first inf or NaN, with the ranges of what the op read, its
/// module and its autograd node; says whether a wider type would have held the result, and whether
/// the loss scale alone is to blame; and prints the ops before it with their ranges, as Hugging
/// Face's DebugUnderflowOverflow does in Python.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/anomaly_judge.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/op_observer.h>
#include <mezzo/diagnose/names.h>
#include <mezzo/diagnose/summarize.h>
#include <mezzo/diagnose/telemetry.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Checks what each op that the creating thread calls returns, and each op of the backward passes
/// that it calls, for inf and NaN, while it exists. An inf that the program asks for by a scalar
/// (the mask of attention, the start of a running minimum) is no anomaly, nor where it is carried
/// on, unless one number of many becomes inf; nor is what later ops make finite again.
///
/// A debugging tool: a read of every result, on a device a host sync an op, and a copy of what an
/// op overwrites. Not for a thread that captures a CUDA graph. Results, gradients and random
/// numbers stay what they were. Nothing is installed before and after: then it costs nothing.
/// Several may exist at once.
///
/// The trace sees ops that go through libtorch's dispatcher, as the program calls them and not what
/// they are made of. What a kernel of another library or a collective writes shows when the next op
/// reads it, as `arrived`. Modules are known by their parameters' memory: an op of a module without
/// parameters goes by the name of the module before it. Ask it, and destroy it, in the thread that
/// made it.
class AnomalyTrace final : private detail::OpObserver {
 public:
  /// Keeps the parameters, not the model.
  explicit AnomalyTrace(const torch::nn::Module& model, AnomalyTraceOptions options = {})
      : AnomalyTrace(name_parameters(model), std::move(options)) {}
  /// Names the modules of these parameters.
  explicit AnomalyTrace(const NamedTensors& parameters, AnomalyTraceOptions options = {})
      : OpObserver(parameters), judge_(names(), std::move(options)) {
    start();
  }
  ~AnomalyTrace() override { stop(); }

  /// Returns the first four anomalies so far, in their order. Results that read a bad one are not
  /// listed again. An anomaly goes from the list when every result that carries it was read by ops
  /// whose results are finite.
  std::vector<Anomaly> anomalies() const {
    const auto locked = lock();
    return judge_.anomalies();
  }

  /// Returns the last ops before the first anomaly, or so far, the earliest first. Views are left
  /// out.
  std::vector<AnomalyFrame> frames() const {
    const auto locked = lock();
    return judge_.frames();
  }

  /// Returns whether a backward pass has run a node since this object was made.
  using OpObserver::saw_backward;

 private:
  void entered(detail::ObservedOp& op) override { judge_.keep_overwritten(op); }
  void left(const detail::ObservedOp& op, detail::OpArguments returned) override {
    judge_.take(op, detail::tensors_in(returned));
  }

  detail::AnomalyJudge judge_;
};

/// Writes the anomalies, a line each, and the frames before the first as a table.
inline std::ostream& operator<<(std::ostream& stream, const AnomalyTrace& trace) {
  const std::vector<Anomaly> anomalies = trace.anomalies();
  std::string text = anomalies.empty() ? "no op made an inf or NaN\nthe last ops" : "";
  for (const Anomaly& anomaly : anomalies) text += anomaly.message() + "\n";
  text += anomalies.empty() ? ", from to:\n" : "the ops before the first, from to:\n";
  for (const AnomalyFrame& frame : trace.frames()) {
    for (const TensorSummary& output : frame.outputs) {
      if (output.count == 0) continue;
      text += detail::table_line({10, 10, 0},
                                 {detail::digits(output.minimum), detail::digits(output.maximum),
                                  "  " + std::string(detail::dtype_name(output.dtype)) + " " +
                                      detail::sizes_text(output.sizes) + "  " + frame.place()});
    }
  }
  return stream << text;
}

/// When an AnomalyWatch traces, and whom it tells.
struct AnomalyWatchOptions {
  std::int64_t skips_in_a_row = 3;    ///< so many wake it
  AnomalyTraceOptions trace = {};     ///< of the step that is traced
  std::ostream* stream = &std::cerr;  ///< gets the trace; null: nothing. Lives as long as the watch
  std::function<void(const AnomalyTrace&)> callback = {};  ///< called with the trace of the step
};

/// A writer for a Telemetry. When steps were skipped in a row it puts an AnomalyTrace round the
/// next step, up to the next record after a backward pass, and tells what that found; in 1000 steps
/// once at most. Sleeping it costs a comparison a step. A step that goes well is told too, as one
/// without anomaly: then skips do not come from each batch, or from what no op writes. In a job of
/// several a rank other than 0 writes only where it found something. Several watches may wake in
/// the same step.
class AnomalyWatch {
 public:
  /// Keeps the parameters of `model`, which has to live as long as the watch.
  /// \throws c10::Error unless skips_in_a_row is positive
  explicit AnomalyWatch(const torch::nn::Module& model, AnomalyWatchOptions options = {})
      : model_(&model), options_(std::move(options)) {
    TORCH_CHECK(options_.skips_in_a_row > 0, "AnomalyWatch: skips_in_a_row is ",
                options_.skips_in_a_row, "; it should be positive");
  }

  /// Looks at the record of a step.
  void operator()(const TelemetryRecord& record);

 private:
  const torch::nn::Module* model_;
  AnomalyWatchOptions options_;
  std::int64_t skips_ = 0;
  std::int64_t quiet_until_ = 0;         // a step
  std::shared_ptr<AnomalyTrace> trace_;  // of the step under way
};

inline void AnomalyWatch::operator()(const TelemetryRecord& record) {
  constexpr std::int64_t kRarely = 1000;
  skips_ = record.skipped ? skips_ + 1 : 0;
  if (trace_ == nullptr) {
    if (skips_ < options_.skips_in_a_row || record.step < quiet_until_) return;
    trace_ = std::make_shared<AnomalyTrace>(*model_, options_.trace);
    return;
  }
  if (!trace_->saw_backward()) return;  // of a step before, told late
  const std::shared_ptr<AnomalyTrace> done = std::exchange(trace_, nullptr);
  quiet_until_ = record.step + kRarely;
  const bool is_first = options_.trace.rank.value_or(0) == 0;
  if (options_.stream != nullptr && (is_first || !done->anomalies().empty())) {
    *options_.stream << "Traced a step after " + std::to_string(options_.skips_in_a_row) +
                            " skipped in a row: "
                     << *done << std::flush;
  }
  if (options_.callback) options_.callback(*done);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
