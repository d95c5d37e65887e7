/// \file
/// What an AnomalyTrace prints, and when an AnomalyWatch makes one.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/detail/anomaly_recorder.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string ranges_text(const std::vector<ValueRange>& ranges) {
  std::string text;
  for (const ValueRange& range : ranges) {
    if (range.dtype == at::ScalarType::Undefined) continue;
    text += (text.empty() ? "" : "; ") + range.to_string();
  }
  return text.empty() ? "nothing" : text;
}

/// Why, and what to do.
inline std::string cause_text(const Anomaly& anomaly) {
  const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                [](const ValueRange& range) { return !range.is_finite(); });
  const std::string dtype(dtype_name(bad->dtype));
  const std::string wide(dtype_name(anomaly.wide_dtype.value_or(at::kFloat)));
  double largest = 0;
  for (const ValueRange& range : anomaly.wide_outputs) largest = std::max(largest, range.largest);
  switch (anomaly.cause) {
    case AnomalyCause::arrived:
      for (const ValueRange& input : anomaly.inputs) {
        if (!input.is_finite() && !input.parameter.empty()) {
          return "The parameter " + input.parameter +
                 " is not finite: no step repairs it, load a checkpoint from before";
        }
      }
      return "An input is not finite, and no op that was watched made it: look at the batch, at "
             "constants and buffers, and at what was computed before the trace";
    case AnomalyCause::loss_scale:
      return c10::str("In ", wide, " it is finite, up to ", digits(largest), ", and ", dtype,
                      " would hold it without the loss scale of ", digits(anomaly.loss_scale, 6),
                      ": the scaler lowers that, nothing is wrong with the model");
    case AnomalyCause::low_precision:
      return c10::str("In ", wide, " it is finite, up to ", digits(largest),
                      anomaly.loss_scale > 1 ? ", too large even without the loss scale: " : ": ",
                      dtype == "float32" ? "keep what it reads smaller"
                                         : "run this op in float32, or use bfloat16");
    case AnomalyCause::model:
      if (anomaly.lost_scalar) {
        return c10::str("An input was made with ", digits(*anomaly.lost_scalar), ", which ", dtype,
                        " rounds to 0: take an eps that it holds, or float32");
      }
      return "In " + wide +
             " it is not finite either: look for a log or a division of 0, an exp, or a root of 0 "
             "in the backward pass";
    case AnomalyCause::unknown:
      break;
  }
  return "It could not be run again in " + wide;
}

}  // namespace detail

inline std::string ValueRange::to_string() const {
  std::string text = parameter.empty() ? std::string() : parameter + " ";
  text += c10::str(detail::dtype_name(dtype), " [", c10::Join(", ", sizes), "]");
  if (infs + nans < c10::multiply_integers(sizes)) {
    text += c10::str(" ", detail::digits(smallest), " to ", detail::digits(largest));
  }
  if (infs > 0) text += c10::str(" ", infs, " inf");
  if (nans > 0) text += c10::str(" ", nans, " NaN");
  return text;
}

inline std::string AnomalyFrame::place() const {
  std::string text = op;
  if (!caller.empty()) text += " (in " + caller + ")";
  if (is_backward() && node != op) text += " of " + node;
  if (!module.empty()) text += (reads_module ? ", in " : ", after ") + module;
  return text;
}

inline std::string Anomaly::message() const {
  const std::string where = rank ? c10::str("rank ", *rank, ", ") : std::string();
  return c10::str(where, frame.is_backward() ? "backward pass: " : "forward pass: ", frame.place(),
                  cause == AnomalyCause::arrived ? " passed on " : " made ",
                  detail::ranges_text(frame.outputs), ". It read ", detail::ranges_text(inputs),
                  ". ", detail::cause_text(*this));
}

inline AnomalyTrace::AnomalyTrace(const torch::nn::Module& model, AnomalyTraceOptions options)
    : recorder_(std::make_shared<detail::AnomalyRecorder>(model, std::move(options))) {
  recorder_->start();
}

inline AnomalyTrace::~AnomalyTrace() { recorder_->stop(); }

inline std::vector<Anomaly> AnomalyTrace::anomalies() const { return recorder_->anomalies(); }

inline std::vector<AnomalyFrame> AnomalyTrace::frames() const { return recorder_->frames(); }

inline bool AnomalyTrace::saw_backward() const { return recorder_->saw_backward(); }

inline std::ostream& operator<<(std::ostream& stream, const AnomalyTrace& trace) {
  const std::vector<Anomaly> anomalies = trace.anomalies();
  std::ostringstream text;
  if (anomalies.empty()) text << "no op made an inf or NaN\n";
  for (const Anomaly& anomaly : anomalies) text << anomaly.message() << "\n";
  const std::vector<AnomalyFrame> frames = trace.frames();
  text << (anomalies.empty() ? "the last ops" : "the ops before the first") << ", |x| from to:\n";
  for (const AnomalyFrame& frame : frames) {
    for (const ValueRange& range : frame.outputs) {
      if (range.dtype == at::ScalarType::Undefined) continue;
      text << std::setw(10) << detail::digits(range.smallest) << std::setw(10)
           << detail::digits(range.largest) << "  " << detail::dtype_name(range.dtype) << " ["
           << c10::Join(", ", range.sizes) << "]  " << frame.place() << "\n";
    }
  }
  return stream << text.str();
}

inline AnomalyWatch::AnomalyWatch(const torch::nn::Module& model, AnomalyWatchOptions options)
    : model_(&model), options_(std::move(options)) {
  TORCH_CHECK(options_.skips_in_a_row > 0, "AnomalyWatch: skips_in_a_row is ",
              options_.skips_in_a_row, "; it should be positive");
}

inline void AnomalyWatch::operator()(const TelemetryRecord& record) {
  constexpr std::int64_t kRarely = 1000;
  skips_ = record.skipped ? skips_ + 1 : 0;
  if (trace_ != nullptr) {
    if (!trace_->saw_backward()) return;  // of a step before, told late
    const std::shared_ptr<AnomalyTrace> done = std::exchange(trace_, nullptr);
    quiet_until_ = record.step + kRarely;
    tell(*done);
    return;
  }
  if (skips_ < options_.skips_in_a_row || record.step < quiet_until_) return;
  trace_ = std::make_shared<AnomalyTrace>(*model_, options_.trace);
}

inline void AnomalyWatch::tell(const AnomalyTrace& trace) const {
  const bool is_first = options_.trace.rank.value_or(0) == 0;
  if (options_.stream != nullptr && (is_first || !trace.anomalies().empty())) {
    std::ostringstream text;
    text << "Traced a step after " << options_.skips_in_a_row << " skipped in a row: " << trace;
    *options_.stream << text.str() << std::flush;
  }
  if (options_.callback) options_.callback(trace);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
