/// \file
/// A run as one HTML page: the loss scale's staircase with skipped steps marked, loss, gradient
/// norm, overflows, exponents by layer, and a comparison of precisions. The page needs no network
/// and no script, follows the reader's light or dark setting, and fits a phone.
///
///     mezzo::RunReport report("BERT on tweets, half");
///     telemetry.write_to(std::ref(report));
///     scaler.on_skip(mezzo::OverflowReport(*model, {.callback = [&](const mezzo::Overflow& found) {
///                                            report.add(found);
///                                          }}));
///     ...                                    // train
///     telemetry.flush();
///     report.save("run.html");
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/report_chart.h>
#include <mezzo/diagnose/detail/report_html.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/telemetry_files.h>
#include <mezzo/diagnose/underflow.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Of a long run it keeps some thousand points: each is then the mean loss, the last scale, the
/// largest norm and the number of skips of as many steps as it takes.
class RunReport {
 public:
  explicit RunReport(std::string title) : title_(std::move(title)) {}

  /// One more step: a Telemetry's writer.
  void operator()(const TelemetryRecord& record);

  void add(PrecisionComparison comparison) { comparisons_.push_back(std::move(comparison)); }

  /// A row of the overflow table, which holds the first 20 and the last 20. An Overflow knows no
  /// step: the row says "about" the one after the last record, and nothing before the first record.
  void add(const Overflow& overflow);

  /// Where an inf or NaN began: its lines as text.
  void add(const AnomalyTrace& trace);

  /// The exponents of each layer's values against the type's range. Waits for the device.
  void add(const UnderflowReport& report);

  /// The page as it stands.
  std::string html() const;

  /// The page in a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const;

 private:
  struct Point {
    std::int64_t first = 0, last = 0;  // steps
    double loss = 0;                   // summed
    std::int64_t losses = 0;
    double scale = 1;
    double norm = -1;  // none yet
    std::int64_t skips = 0;

    void add(const Point& other);
  };

  static constexpr std::size_t kMostPoints = 4096;
  static constexpr std::size_t kMostOverflows = 40;

  void thin();
  std::string facts_html() const;
  std::string charts_html() const;

  std::string title_;
  std::vector<Point> points_;
  std::int64_t steps_a_point_ = 1;
  TelemetryRecord last_;
  std::vector<PrecisionComparison> comparisons_;
  std::int64_t overflows_ = 0;
  std::vector<std::string> overflow_rows_;  // as HTML, as are these
  std::string anomalies_;
  std::string exponents_;
};

inline void RunReport::add(const UnderflowReport& report) {
  exponents_ += detail::exponents_html(report);
}

inline void RunReport::add(const Overflow& overflow) {
  ++overflows_;
  if (overflow_rows_.size() == kMostOverflows) {
    overflow_rows_.erase(overflow_rows_.begin() + kMostOverflows / 2);
  }
  std::optional<std::int64_t> step;
  if (!points_.empty()) step = last_.step + 1;
  overflow_rows_.push_back(detail::overflow_row_html(overflow, step));
}

inline void RunReport::add(const AnomalyTrace& trace) {
  std::ostringstream text;
  text << trace;
  anomalies_ +=
      detail::section_html("Where it began", "<pre>" + detail::html_text(text.str()) + "</pre>");
}

inline void RunReport::Point::add(const Point& other) {
  last = other.last;
  loss += other.loss;
  losses += other.losses;
  scale = other.scale;
  norm = std::max(norm, other.norm);
  skips += other.skips;
}

inline void RunReport::operator()(const TelemetryRecord& record) {
  Point point{.first = record.step,
              .last = record.step,
              .scale = record.scale,
              .skips = record.skipped ? 1 : 0};
  if (record.loss) {
    point.loss = *record.loss;
    point.losses = 1;
  }
  if (record.grad_norm && !record.skipped) point.norm = *record.grad_norm;
  last_ = record;
  const bool joins = !points_.empty() && record.step - points_.back().first < steps_a_point_ &&
                     record.step >= points_.back().first;
  if (joins) {
    points_.back().add(point);
  } else {
    points_.push_back(point);
  }
  if (points_.size() > kMostPoints) thin();
}

inline void RunReport::thin() {
  steps_a_point_ *= 2;
  std::vector<Point> kept;
  for (const Point& point : points_) {
    const bool joins = !kept.empty() && point.last - kept.back().first < steps_a_point_;
    if (joins) {
      kept.back().add(point);
    } else {
      kept.push_back(point);
    }
  }
  points_ = std::move(kept);
}

inline std::string RunReport::facts_html() const {
  std::int64_t skips = 0;
  for (const Point& point : points_) skips += point.skips;
  std::ostringstream html;
  const auto fact = [&html](const char* name, const std::string& value) {
    html << "<div><dt>" << name << "</dt><dd>" << value << "</dd></div>";
  };
  html << "<dl>";
  fact("steps", std::to_string(points_.back().last - points_.front().first + 1));
  fact("skipped", std::to_string(skips));
  if (last_.loss) fact("last loss", detail::digits(*last_.loss, 4));
  fact("loss scale", detail::digits(last_.scale, 8));
  if (last_.tokens_per_second) fact("tokens/s", detail::digits(*last_.tokens_per_second, 4));
  if (last_.memory_bytes) fact("MiB", detail::digits(*last_.memory_bytes / 1048576, 5));
  html << "</dl>\n";
  return html.str();
}

inline std::string RunReport::charts_html() const {
  detail::Chart loss{.title = "loss"};
  detail::Chart scale{.title = "loss scale", .logarithmic = true, .steps = true};
  detail::Chart norm{.title = "gradient norm before clipping", .logarithmic = true};
  for (const Point& point : points_) {
    constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
    const auto step = static_cast<double>(point.first);
    const double mean = point.loss / static_cast<double>(point.losses);  // 0 / 0 is a gap
    loss.points.push_back({step, mean});
    if (point.losses > 0 && detail::nonfinite_bits(mean)) {
      loss.marks.emplace_back(step, "loss is " + detail::number_text(mean));
    }
    scale.points.push_back({step, point.scale});
    norm.points.push_back({step, point.norm < 0 ? kGap : point.norm});
    if (point.skips == 0) continue;
    scale.marks.emplace_back(step, "step " + std::to_string(point.last) + " skipped");
  }
  norm.marks = scale.marks;
  if (!scale.marks.empty()) scale.title += "; red: a skipped step";
  if (!loss.marks.empty()) loss.title += "; red: inf or NaN";
  return "<div class=charts>\n" + detail::chart_html(loss) + detail::chart_html(scale) +
         detail::chart_html(norm) + "</div>\n";
}

inline std::string RunReport::html() const {
  const std::string title = detail::html_text(title_);
  std::string page =
      "<!doctype html>\n<html lang=en><meta charset=utf-8>"
      "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
      title + "</title><style>" + detail::kReportStyle + "</style>\n<h1>" + title + "</h1>\n";
  if (!points_.empty()) page += facts_html() + charts_html();
  if (overflows_ > 0) page += detail::overflows_html(overflow_rows_, overflows_);
  page += anomalies_ + exponents_;
  for (const PrecisionComparison& comparison : comparisons_) {
    page += detail::comparison_html(comparison);
  }
  return page;
}

inline void RunReport::save(const std::string& path) const {
  detail::RecordFile(path, std::ios::trunc).write(html());
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
