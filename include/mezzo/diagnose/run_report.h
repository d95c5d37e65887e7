/// \file
/// A run as one HTML page: its scores and options, the loss scale's staircase with skipped steps
/// marked, loss, gradient norm, learning rate, speed and memory, overflows, exponents by layer, and
/// a comparison of precisions. The page needs no network and no script, follows the reader's light
/// or dark setting, and fits a phone.
///
///     mezzo::RunReport report("BERT on tweets, half");
///     telemetry.write_to(std::ref(report));
///     scaler.on_skip(mezzo::OverflowReport(*model, {.callback = [&](const mezzo::Overflow& found) {
///                                            report.add(found);
///                                          }}));
///     ...                                    // train
///     telemetry.flush();
///     report.score("F1", f1);
///     report.option("seed", "1");
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

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <concepts>
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
/// largest norm and the number of skips of as many steps as it takes. Records with a name
/// (`telemetry.record("generator", result, loss)`) have curves of their own, name by name.
///
/// A checkpoint that has the report (`state.add("report", report)`) lets the page of a resumed run
/// go on where the file was saved; the title is this object's.
class RunReport {
 public:
  /// Begins an empty report.
  explicit RunReport(std::string title) : title_(std::move(title)) {}

  /// One more step: a Telemetry's writer.
  void operator()(const TelemetryRecord& record);

  /// A result for which more is better and 0 is nothing: "F1", 0.513. A score that is 0, negative
  /// or not finite is red, and a line below the title says so. A later score, fact or option of the
  /// same name replaces the earlier one.
  void score(const std::string& name, double value);

  /// A tile beside the scores: "ended", "stopped by SIGTERM".
  void fact(const std::string& name, const std::string& value);

  /// A row of the table of what the run was told: "learning rate", "0.0004". Versions, machine and
  /// date are on the page by themselves.
  void option(const std::string& name, const std::string& value);

  /// Adds a table of the comparison.
  void add(const PrecisionComparison& comparison);

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
    double learning_rate = -1;       // none yet
    double seconds = 0, tokens = 0;  // summed
    double memory = 0;               // bytes, the most

    void add(const Point& other);
  };

  /// The records of one name.
  struct Series {
    std::string name;
    std::vector<Point> points = {};
    std::int64_t steps_a_point = 1;
    TelemetryRecord last = {};

    void add(const TelemetryRecord& record);
    void thin();
    std::string facts_html() const;
    std::string charts_html() const;
    std::string html() const;
  };

  static constexpr std::size_t kMostPoints = 4096;
  static constexpr std::size_t kMostOverflows = 40;

  using Texts = std::vector<std::pair<std::string, std::string>>;

  Series& series(const std::string& name);
  static void set(Texts& texts, const std::string& name, const std::string& value);
  std::string head_html() const;
  std::string options_html() const;

  std::string title_;
  std::vector<std::pair<std::string, double>> scores_;
  Texts facts_, options_;
  std::vector<Series> series_;             // in the order of their first records
  std::optional<std::int64_t> last_step_;  // of the last record, whatever its name
  std::int64_t overflows_ = 0;
  std::vector<std::string> overflow_rows_;  // as HTML, as are these
  std::string anomalies_;
  std::string exponents_;
  std::string comparisons_;

  /// A checkpoint of several ranks does not compare theirs: each has seen batches of its own.
  friend bool differs_by_rank(const RunReport& /*report*/) { return true; }

  template <class Archive>
  requires std::same_as<Archive, torch::serialize::OutputArchive>
  friend Archive& operator<<(Archive& archive, const RunReport& report);
  template <class Archive>
  requires std::same_as<Archive, torch::serialize::InputArchive>
  friend Archive& operator>>(Archive& archive, RunReport& report);
};

#if !defined(MEZZO_LEFT_TO_LIBRARY) || defined(MEZZO_IN_LIBRARY_OF_DIAGNOSE)
MEZZO_INLINE void RunReport::add(const PrecisionComparison& comparison) {
  comparisons_ += detail::comparison_html(comparison);
}

MEZZO_INLINE void RunReport::set(Texts& texts, const std::string& name, const std::string& value) {
  for (auto& [known, text] : texts) {
    if (known == name) {
      text = value;
      return;
    }
  }
  texts.emplace_back(name, value);
}

MEZZO_INLINE void RunReport::score(const std::string& name, double value) {
  std::erase_if(scores_, [&](const auto& known) { return known.first == name; });
  scores_.emplace_back(name, value);
}

MEZZO_INLINE void RunReport::fact(const std::string& name, const std::string& value) {
  set(facts_, name, value);
}

MEZZO_INLINE void RunReport::option(const std::string& name, const std::string& value) {
  set(options_, name, value);
}

MEZZO_INLINE void RunReport::add(const UnderflowReport& report) {
  exponents_ += detail::exponents_html(report);
}

MEZZO_INLINE void RunReport::add(const Overflow& overflow) {
  ++overflows_;
  if (overflow_rows_.size() == kMostOverflows) {
    overflow_rows_.erase(overflow_rows_.begin() + kMostOverflows / 2);
  }
  std::optional<std::int64_t> step;
  if (last_step_) step = *last_step_ + 1;
  overflow_rows_.push_back(detail::overflow_row_html(overflow, step));
}

MEZZO_INLINE void RunReport::add(const AnomalyTrace& trace) {
  std::ostringstream text;
  text << trace;
  anomalies_ +=
      detail::section_html("Where it began", "<pre>" + detail::html_text(text.str()) + "</pre>");
}

MEZZO_INLINE void RunReport::Point::add(const Point& other) {
  last = other.last;
  loss += other.loss;
  losses += other.losses;
  scale = other.scale;
  norm = std::max(norm, other.norm);
  skips += other.skips;
  if (other.learning_rate >= 0) learning_rate = other.learning_rate;
  seconds += other.seconds;
  tokens += other.tokens;
  memory = std::max(memory, other.memory);
}

MEZZO_INLINE RunReport::Series& RunReport::series(const std::string& name) {
  for (Series& one : series_) {
    if (one.name == name) return one;
  }
  return series_.emplace_back(Series{.name = name});
}

MEZZO_INLINE void RunReport::operator()(const TelemetryRecord& record) {
  series(record.name).add(record);
  last_step_ = record.step;
}

MEZZO_INLINE void RunReport::Series::add(const TelemetryRecord& record) {
  Point point{.first = record.step,
              .last = record.step,
              .scale = record.scale,
              .skips = record.skipped ? 1 : 0};
  if (record.loss) {
    point.loss = *record.loss;
    point.losses = 1;
  }
  if (record.grad_norm && !record.skipped) point.norm = *record.grad_norm;
  point.learning_rate = record.learning_rate.value_or(-1);
  if (record.tokens_per_second) {
    point.seconds = record.seconds;
    point.tokens = *record.tokens_per_second * record.seconds;
  }
  point.memory = record.memory_bytes.value_or(0);
  last = record;
  const bool joins = !points.empty() && record.step - points.back().first < steps_a_point &&
                     record.step >= points.back().first;
  if (joins) {
    points.back().add(point);
  } else {
    points.push_back(point);
  }
  if (points.size() > kMostPoints) thin();
}

MEZZO_INLINE void RunReport::Series::thin() {
  steps_a_point *= 2;
  std::vector<Point> kept;
  for (const Point& point : points) {
    const bool joins = !kept.empty() && point.last - kept.back().first < steps_a_point;
    if (joins) {
      kept.back().add(point);
    } else {
      kept.push_back(point);
    }
  }
  points = std::move(kept);
}

MEZZO_INLINE std::string RunReport::Series::facts_html() const {
  Point all = points.front();
  for (std::size_t i = 1; i < points.size(); ++i) all.add(points[i]);
  std::string html = "<dl>";
  html += detail::tile_html("steps", std::to_string(all.last - all.first + 1));
  html += detail::tile_html("skipped", std::to_string(all.skips));
  if (last.loss) {
    html += detail::tile_html("last loss", detail::digits(*last.loss, 4),
                              detail::nonfinite_bits(*last.loss));
  }
  html += detail::tile_html("loss scale", detail::digits(last.scale, 8));
  if (all.seconds > 0) {
    html += detail::tile_html("mean tokens/s",
                              detail::digits(std::round(all.tokens / all.seconds * 10) / 10, 8));
  }
  if (all.memory > 0) {
    html +=
        detail::tile_html("most memory at a step, MiB", detail::digits(all.memory / 1048576, 5));
  }
  return html + "</dl>\n";
}

MEZZO_INLINE std::string RunReport::Series::charts_html() const {
  detail::Chart loss{.title = "loss", .smooth = true};
  detail::Chart scale{.title = "loss scale", .logarithmic = true, .steps = true};
  detail::Chart norm{.title = "gradient norm before clipping", .logarithmic = true, .smooth = true};
  detail::Chart rate{.title = "learning rate"};
  detail::Chart speed{.title = "tokens/s", .smooth = true};
  detail::Chart memory{.title = "memory, MiB"};
  for (const Point& point : points) {
    constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
    const auto step = static_cast<double>(point.first);
    const double mean = point.loss / static_cast<double>(point.losses);  // 0 / 0 is a gap
    loss.points.push_back({step, mean});
    if (point.losses > 0 && detail::nonfinite_bits(mean)) {
      loss.marks.emplace_back(step, "loss is " + detail::number_text(mean));
    }
    scale.points.push_back({step, point.scale});
    norm.points.push_back({step, point.norm < 0 ? kGap : point.norm});
    if (point.learning_rate >= 0) rate.points.push_back({step, point.learning_rate});
    if (point.seconds > 0) speed.points.push_back({step, point.tokens / point.seconds});
    if (point.memory > 0) memory.points.push_back({step, point.memory / 1048576});
    if (point.skips == 0) continue;
    scale.marks.emplace_back(step, "step " + std::to_string(point.last) + " skipped");
  }
  norm.marks = scale.marks;
  if (!scale.marks.empty()) scale.title += "; red: a skipped step";
  if (!loss.marks.empty()) loss.title += "; red: inf or NaN";
  std::string html =
      detail::chart_html(loss) + detail::chart_html(scale) + detail::chart_html(norm);
  for (const detail::Chart* chart : {&rate, &speed, &memory}) {
    if (!chart->points.empty()) html += detail::chart_html(*chart);
  }
  return "<div class=charts>\n" + html + "</div>\n";
}

MEZZO_INLINE std::string RunReport::Series::html() const {
  const std::string head = name.empty() ? "" : "<h2>" + detail::html_text(name) + "</h2>\n";
  return head + facts_html() + charts_html();
}

/// Scores and facts; what went wrong in words.
MEZZO_INLINE std::string RunReport::head_html() const {
  std::string tiles, troubles;
  for (const auto& [name, value] : scores_) {
    const bool is_nothing = !(value > 0) || detail::nonfinite_bits(value);
    tiles += detail::tile_html(name, detail::digits(value, 3), is_nothing);
    if (!is_nothing) continue;
    troubles +=
        (troubles.empty() ? "" : ", ") + detail::html_text(name) + " is " + detail::digits(value);
  }
  if (!troubles.empty()) {
    troubles = "<p class=trouble>" + troubles + ": this run has learnt nothing that counts.</p>\n";
  }
  for (const auto& [name, value] : facts_) tiles += detail::tile_html(name, value);
  return troubles + (tiles.empty() ? "" : "<dl>" + tiles + "</dl>\n");
}

MEZZO_INLINE std::string RunReport::options_html() const {
  Texts rows = options_;
  for (const auto& [name, value] : detail::where_and_when()) rows.emplace_back(name, value);
  std::string html;
  for (const auto& [name, value] : rows) {
    html += "<tr>" + detail::td(detail::html_text(name)) +
            detail::td(detail::html_text(value), " class=text") + "</tr>\n";
  }
  return detail::section_html("The run", "<div class=wide><table>" + html + "</table></div>");
}

MEZZO_INLINE std::string RunReport::html() const {
  const std::string title = detail::html_text(title_);
  std::string page =
      "<!doctype html>\n<html lang=en><meta charset=utf-8>"
      "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
      title + "</title><style>" + detail::kReportStyle + "</style>\n<h1>" + title + "</h1>\n" +
      head_html();
  for (const Series& one : series_) page += one.html();
  if (overflows_ > 0) page += detail::overflows_html(overflow_rows_, overflows_);
  return page + anomalies_ + exponents_ + comparisons_ + options_html();
}

MEZZO_INLINE void RunReport::save(const std::string& path) const {
  detail::RecordFile(path, std::ios::trunc).write(html());
}
#endif

// The archive of a RunReport:
//   names, counts, steps_a_point  of each name: the name, how many points, and steps a point
//   points                        double [sum of counts, 11], the members of Point in their order;
//                                 7 of them in files of before 0.2
//   last                          double [names, 8]: step, scale, then loss, tokens_per_second and
//                                 memory_bytes with a 1 before each that is known
//   overflows, overflow_rows, html, last_step    html: anomalies, exponents, comparisons
// Scores, facts and options are of the run that is told them.
//
// Templates for the reason that GradScaler's are: the archives' headers take long to compile.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const RunReport& report) {
  c10::List<std::string> names, rows, html;
  c10::List<std::int64_t> counts, steps_a_point, last_step;
  std::vector<double> points, last;
  for (const RunReport::Series& one : report.series_) {
    names.push_back(one.name);
    counts.push_back(static_cast<std::int64_t>(one.points.size()));
    steps_a_point.push_back(one.steps_a_point);
    for (const RunReport::Point& point : one.points) {
      points.insert(points.end(),
                    {static_cast<double>(point.first), static_cast<double>(point.last), point.loss,
                     static_cast<double>(point.losses), point.scale, point.norm,
                     static_cast<double>(point.skips), point.learning_rate, point.seconds,
                     point.tokens, point.memory});
    }
    last.insert(last.end(), {static_cast<double>(one.last.step), one.last.scale});
    for (const auto& number : {one.last.loss, one.last.tokens_per_second, one.last.memory_bytes}) {
      last.insert(last.end(), {number ? 1.0 : 0.0, number.value_or(0)});
    }
  }
  for (const std::string& row : report.overflow_rows_) rows.push_back(row);
  for (const std::string* part : {&report.anomalies_, &report.exponents_, &report.comparisons_}) {
    html.push_back(*part);
  }
  if (report.last_step_) last_step.push_back(*report.last_step_);
  archive.write("names", c10::IValue(names));
  archive.write("counts", c10::IValue(counts));
  archive.write("steps_a_point", c10::IValue(steps_a_point));
  archive.write("points", at::tensor(points, at::kDouble), /*is_buffer=*/true);
  archive.write("last", at::tensor(last, at::kDouble), /*is_buffer=*/true);
  archive.write("overflows", c10::IValue(report.overflows_));
  archive.write("overflow_rows", c10::IValue(rows));
  archive.write("html", c10::IValue(html));
  archive.write("last_step", c10::IValue(last_step));
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, RunReport& report) {
  c10::IValue names, counts, steps_a_point, overflows, rows, html, last_step;
  at::Tensor points, last;
  const bool is_read = archive.try_read("names", names) && archive.try_read("counts", counts) &&
                       archive.try_read("steps_a_point", steps_a_point) &&
                       archive.try_read("points", points, /*is_buffer=*/true) &&
                       archive.try_read("last", last, /*is_buffer=*/true) &&
                       archive.try_read("overflows", overflows) &&
                       archive.try_read("overflow_rows", rows) && archive.try_read("html", html) &&
                       archive.try_read("last_step", last_step);
  TORCH_CHECK(is_read,
              "This archive is not that of a RunReport: it lacks \"points\" or another part; load "
              "what torch::save(report, path) wrote");
  RunReport loaded(report.title_);
  loaded.scores_ = report.scores_;
  loaded.facts_ = report.facts_;
  loaded.options_ = report.options_;
  points = points.to(at::kCPU, at::kDouble).contiguous();
  last = last.to(at::kCPU, at::kDouble).contiguous();
  const auto sizes = counts.toIntVector(), widths = steps_a_point.toIntVector();
  const std::size_t size = names.toListRef().size();
  std::int64_t all = 0;
  for (const std::int64_t count : sizes) all += count;
  const std::int64_t members = points.numel() == all * 7 ? 7 : 11;
  TORCH_CHECK(sizes.size() == size && widths.size() == size && points.numel() == all * members &&
                  last.numel() == static_cast<std::int64_t>(size) * 8 &&
                  html.toListRef().size() == 3,
              "The archive of a RunReport is damaged: its points are not as many as it says; load "
              "an earlier file");
  const double* number = points.const_data_ptr<double>();
  const double* known = last.const_data_ptr<double>();
  for (std::size_t i = 0; i < size; ++i) {
    RunReport::Series& one = loaded.series(names.toListRef()[i].toStringRef());
    one.steps_a_point = widths[i];
    for (std::int64_t k = 0; k < sizes[i]; ++k, number += members) {
      one.points.push_back({static_cast<std::int64_t>(number[0]),
                            static_cast<std::int64_t>(number[1]), number[2],
                            static_cast<std::int64_t>(number[3]), number[4], number[5],
                            static_cast<std::int64_t>(number[6])});
      if (members == 7) continue;
      RunReport::Point& point = one.points.back();
      point.learning_rate = number[7];
      point.seconds = number[8];
      point.tokens = number[9];
      point.memory = number[10];
    }
    one.last.step = static_cast<std::int64_t>(known[0]);
    one.last.scale = known[1];
    if (known[2] != 0) one.last.loss = known[3];
    if (known[4] != 0) one.last.tokens_per_second = known[5];
    if (known[6] != 0) one.last.memory_bytes = known[7];
    known += 8;
  }
  loaded.overflows_ = overflows.toInt();
  for (const c10::IValue& row : rows.toListRef()) {
    loaded.overflow_rows_.push_back(row.toStringRef());
  }
  loaded.anomalies_ = html.toListRef()[0].toStringRef();
  loaded.exponents_ = html.toListRef()[1].toStringRef();
  loaded.comparisons_ = html.toListRef()[2].toStringRef();
  const auto step = last_step.toIntVector();
  if (!step.empty()) loaded.last_step_ = step.front();
  report = std::move(loaded);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
