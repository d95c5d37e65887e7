/// \file
/// A run as one HTML page: its scores and options, the loss scale's staircase with skipped steps
/// marked, loss, gradient norm, learning rate, speed and memory, overflows, and what other tools
/// print. The page needs no network and no script, follows the reader's light or dark setting, and
/// fits a phone.
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
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/report_chart.h>
#include <mezzo/diagnose/detail/report_html.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/telemetry_files.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <bit>
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
  RunReport(const RunReport&) = delete;  // a Telemetry would write to its copy: give std::ref
  RunReport& operator=(const RunReport&) = delete;
  /// Takes the report over. A Telemetry that writes to the other one goes on writing there.
  RunReport(RunReport&&) = default;
  /// Takes the report over, and drops its own.
  RunReport& operator=(RunReport&&) = default;

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

  /// A row of the overflow table, which holds the first 20 and the last 20. An Overflow knows no
  /// step: the row says "about" the one after the last record, and nothing before the first record.
  void add(const Overflow& overflow);

  /// A section with what `finding` prints: an AnomalyTrace, an UnderflowReport, a
  /// Diagnosis.
  template <class Finding>
  void add(const std::string& title, const Finding& finding) {
    std::ostringstream text;
    text << finding;
    sections_ += detail::section_html(detail::html_text(title),
                                      "<pre>" + detail::html_text(text.str()) + "</pre>");
  }

  /// The page as it stands.
  std::string html() const;

  /// The page in a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const;

 private:
  /// What one or more steps in a row came to; an archive holds the numbers in this order.
  struct Point {
    double first = 0, last = 0;      // steps
    double loss = 0, losses = 0;     // summed, and how many
    double scale = 1;                // the last
    double norm = -1;                // the largest; none yet
    double skips = 0;                // summed
    double learning_rate = -1;       // the last; none yet
    double seconds = 0, tokens = 0;  // summed
    double memory = 0;               // bytes, the most

    void add(const Point& other);
  };
  using PointNumbers = std::array<double, sizeof(Point) / sizeof(double)>;

  /// The records of one name.
  struct Series {
    std::string name;
    std::vector<Point> points = {};
    std::int64_t steps_a_point = 1;

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
  std::string sections_;

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

MEZZO_INLINE void RunReport::add(const Overflow& overflow) {
  ++overflows_;
  if (overflow_rows_.size() == kMostOverflows) {
    overflow_rows_.erase(overflow_rows_.begin() + kMostOverflows / 2);
  }
  std::string when = last_step_ ? c10::str("about step ", *last_step_ + 1) : std::string();
  if (overflow.rank) when += c10::str(last_step_ ? ", rank " : "rank ", *overflow.rank);
  overflow_rows_.push_back(
      detail::row_html({when, detail::digits(overflow.step.scale, 8), overflow.cause()}));
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
  const auto step = static_cast<double>(record.step);
  Point point{
      .first = step, .last = step, .scale = record.scale, .skips = record.skipped ? 1.0 : 0.0};
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
  const bool joins = !points.empty() && step >= points.back().first &&
                     step - points.back().first < static_cast<double>(steps_a_point);
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
    const bool joins =
        !kept.empty() && point.last - kept.back().first < static_cast<double>(steps_a_point);
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
  const Point& last = points.back();
  html += detail::tile_html("steps", detail::digits(all.last - all.first + 1, 15));
  html += detail::tile_html("skipped", detail::digits(all.skips, 15));
  if (last.losses > 0) {
    const double loss = last.loss / last.losses;
    html += detail::tile_html("last loss", detail::digits(loss, 4), detail::nonfinite_bits(loss));
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
    const double step = point.first;
    const double mean = point.loss / point.losses;  // 0 / 0 is a gap
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
    scale.marks.emplace_back(step, "step " + detail::digits(point.last, 15) + " skipped");
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
  for (const auto& [name, value] : rows) html += detail::row_html({name, value});
  return detail::section_html("The run", detail::table_html(html));
}

MEZZO_INLINE std::string RunReport::html() const {
  const std::string title = detail::html_text(title_);
  std::string page =
      "<!doctype html>\n<html lang=en><meta charset=utf-8>"
      "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
      title + "</title><style>" + detail::kReportStyle + "</style>\n<h1>" + title + "</h1>\n" +
      head_html();
  for (const Series& one : series_) page += one.html();
  if (overflows_ > 0) {
    std::string rows;
    for (const std::string& row : overflow_rows_) rows += row;
    const auto shown = static_cast<std::int64_t>(overflow_rows_.size());
    std::string note;
    if (overflows_ > shown) {
      note = c10::str("<p>The first and the last ", shown / 2, " of ", overflows_, ".</p>");
    }
    const char* const heads = "<tr><th>step</th><th>loss scale</th><th>cause</th></tr>\n";
    page += detail::section_html("Overflows", detail::table_html(heads + rows) + note);
  }
  return page + sections_ + options_html();
}

MEZZO_INLINE void RunReport::save(const std::string& path) const {
  detail::RecordFile(path, std::ios::trunc).write(html());
}
#endif

// The archive of a RunReport:
//   names, counts, steps_a_point  of each name: the name, how many points, and steps a point
//   points                        double [sum of counts, 11], the members of Point in their order;
//                                 7 of them in files of before 0.2
//   overflows, overflow_rows, html, last_step    html: the sections
// Scores, facts and options are of the run that is told them.
//
// Templates for the reason that GradScaler's are: the archives' headers take long to compile.
/// Writes the RunReport into a checkpoint.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const RunReport& report) {
  c10::List<std::string> names, rows, html;
  c10::List<std::int64_t> counts, steps_a_point, last_step;
  std::vector<double> points;
  for (const RunReport::Series& one : report.series_) {
    names.push_back(one.name);
    counts.push_back(static_cast<std::int64_t>(one.points.size()));
    steps_a_point.push_back(one.steps_a_point);
    for (const RunReport::Point& point : one.points) {
      const auto numbers = std::bit_cast<RunReport::PointNumbers>(point);
      points.insert(points.end(), numbers.begin(), numbers.end());
    }
  }
  for (const std::string& row : report.overflow_rows_) rows.push_back(row);
  html.push_back(report.sections_);
  if (report.last_step_) last_step.push_back(*report.last_step_);
  archive.write("names", c10::IValue(names));
  archive.write("counts", c10::IValue(counts));
  archive.write("steps_a_point", c10::IValue(steps_a_point));
  archive.write("points", at::tensor(points, at::kDouble), /*is_buffer=*/true);
  archive.write("overflows", c10::IValue(report.overflows_));
  archive.write("overflow_rows", c10::IValue(rows));
  archive.write("html", c10::IValue(html));
  archive.write("last_step", c10::IValue(last_step));
  return archive;
}

/// Reads what `operator<<` wrote. \throws c10::Error for another archive
template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, RunReport& report) {
  c10::IValue names, counts, steps_a_point, overflows, rows, html, last_step;
  at::Tensor points;
  const bool is_read = archive.try_read("names", names) && archive.try_read("counts", counts) &&
                       archive.try_read("steps_a_point", steps_a_point) &&
                       archive.try_read("points", points, /*is_buffer=*/true) &&
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
  const auto sizes = counts.toIntVector(), widths = steps_a_point.toIntVector();
  const std::size_t size = names.toListRef().size();
  std::int64_t all = 0;
  for (const std::int64_t count : sizes) all += count;
  const std::int64_t members = points.numel() == all * 7 ? 7 : 11;
  TORCH_CHECK(sizes.size() == size && widths.size() == size && points.numel() == all * members,
              "The archive of a RunReport is damaged: its points are not as many as it says; load "
              "an earlier file");
  const double* number = points.const_data_ptr<double>();
  for (std::size_t i = 0; i < size; ++i) {
    RunReport::Series& one = loaded.series(names.toListRef()[i].toStringRef());
    one.steps_a_point = widths[i];
    for (std::int64_t k = 0; k < sizes[i]; ++k, number += members) {
      auto numbers = std::bit_cast<RunReport::PointNumbers>(RunReport::Point());
      std::copy_n(number, members, numbers.begin());
      one.points.push_back(std::bit_cast<RunReport::Point>(numbers));
    }
  }
  loaded.overflows_ = overflows.toInt();
  for (const c10::IValue& row : rows.toListRef()) {
    loaded.overflow_rows_.push_back(row.toStringRef());
  }
  for (const c10::IValue& section : html.toListRef()) loaded.sections_ += section.toStringRef();
  const auto step = last_step.toIntVector();
  if (!step.empty()) loaded.last_step_ = step.front();
  report = std::move(loaded);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
