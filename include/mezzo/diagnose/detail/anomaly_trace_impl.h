/// \file
/// How an AnomalyTrace is printed, and when an AnomalyWatch makes one.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/detail/anomaly_recorder.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <sstream>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
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
      text << detail::table_line({10, 10, 0},
                                 {detail::digits(range.smallest), detail::digits(range.largest),
                                  c10::str("  ", detail::dtype_name(range.dtype), " [",
                                           c10::Join(", ", range.sizes), "]  ", frame.place())});
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
