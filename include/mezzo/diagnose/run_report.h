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
#include <mezzo/diagnose/detail/report_html.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/telemetry_files.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Keeps the records of a run, 150 bytes each, and makes the page of them. Give a Telemetry
/// `std::ref(report)`.
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

  /// Adds one more step: a Telemetry's writer.
  void operator()(const TelemetryRecord& record) { records_.push_back(record); }

  /// Sets a result for which more is better and 0 is nothing: "F1", 0.513. A score that is 0,
  /// negative or not finite is red, and a line below the title says so. A later score, fact or
  /// option of the same name replaces the earlier one.
  void score(const std::string& name, double value) {
    std::erase_if(scores_, [&](const auto& known) { return known.first == name; });
    scores_.emplace_back(name, value);
  }

  /// Sets a tile beside the scores: "ended", "stopped by SIGTERM".
  void fact(const std::string& name, const std::string& value) { set(facts_, name, value); }

  /// Sets a row of the table of what the run was told: "learning rate", "0.0004". Versions, machine
  /// and date are on the page by themselves.
  void option(const std::string& name, const std::string& value) { set(options_, name, value); }

  /// Adds a row to the overflow table, which holds the first 20 and the last 20. An Overflow knows
  /// no step: the row says "about" the one after the last record, and nothing before the first one.
  void add(const Overflow& overflow);

  /// Adds a section with what `printable` prints: an AnomalyTrace, an UnderflowReport, a Diagnosis.
  template <class Printable>
  void add(const std::string& title, const Printable& printable) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << printable;
    sections_ += detail::section_html(detail::html_text(title),
                                      "<pre>" + detail::html_text(text.str()) + "</pre>");
  }

  /// Returns the page as it stands.
  std::string html() const;

  /// Writes the page into a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const {
    detail::RecordFile(path, std::ios::trunc).write(html());
  }

 private:
  static constexpr std::size_t kMostOverflows = 40;

  using Texts = std::vector<std::pair<std::string, std::string>>;

  static void set(Texts& texts, const std::string& name, const std::string& value) {
    const auto known = std::find_if(texts.begin(), texts.end(),
                                    [&](const auto& text) { return text.first == name; });
    if (known != texts.end()) {
      known->second = value;
    } else {
      texts.emplace_back(name, value);
    }
  }
  std::string head_html() const;
  std::string tiles_html() const;
  std::string charts_html() const;
  std::string overflows_html() const;
  std::string options_html() const;

  std::string title_;
  std::vector<std::pair<std::string, double>> scores_;
  Texts facts_, options_;
  std::vector<TelemetryRecord> records_;
  std::int64_t overflows_ = 0;
  std::vector<std::string> overflow_rows_;  // as HTML, as are these
  std::string sections_;
};

#if !defined(MEZZO_LEFT_TO_LIBRARY) || defined(MEZZO_IN_LIBRARY_OF_DIAGNOSE)
MEZZO_INLINE void RunReport::add(const Overflow& overflow) {
  ++overflows_;
  if (overflow_rows_.size() == kMostOverflows) {
    overflow_rows_.erase(overflow_rows_.begin() + kMostOverflows / 2);
  }
  std::string when;
  if (!records_.empty()) when = "about step " + std::to_string(records_.back().step + 1);
  if (overflow.rank) when += (when.empty() ? "rank " : ", rank ") + std::to_string(*overflow.rank);
  overflow_rows_.push_back(
      detail::row_html({when, detail::digits(overflow.step.scale, 8), overflow.cause()}));
}

/// What went wrong in words; scores and facts.
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

MEZZO_INLINE std::string RunReport::tiles_html() const {
  using detail::tile_html;
  double seconds = 0, tokens = 0, memory = 0;
  std::int64_t skipped = 0;
  for (const TelemetryRecord& record : records_) {
    skipped += record.skipped ? 1 : 0;
    memory = std::max(memory, record.memory_bytes.value_or(0));
    if (!record.tokens_per_second) continue;
    seconds += record.seconds;
    tokens += *record.tokens_per_second * record.seconds;
  }
  const TelemetryRecord& last = records_.back();
  std::string html = "<dl>" +
                     tile_html("steps", std::to_string(last.step - records_.front().step + 1)) +
                     tile_html("skipped", std::to_string(skipped));
  if (last.loss) {
    html +=
        tile_html("last loss", detail::digits(*last.loss, 4), detail::nonfinite_bits(*last.loss));
  }
  html += tile_html("loss scale", detail::digits(last.scale, 8));
  if (seconds > 0) {
    html += tile_html("mean tokens/s", detail::digits(std::round(tokens / seconds * 10) / 10, 8));
  }
  if (memory > 0) {
    html += tile_html("most memory at a step, MiB", detail::digits(memory / 1048576, 5));
  }
  return html + "</dl>\n";
}

MEZZO_INLINE std::string RunReport::charts_html() const {
  detail::Chart loss{.title = "loss"};
  detail::Chart scale{.title = "loss scale", .logarithmic = true};
  detail::Chart norm{.title = "gradient norm before clipping", .logarithmic = true};
  detail::Chart rate{.title = "learning rate"}, speed{.title = "tokens/s"};
  detail::Chart memory{.title = "memory, MiB"};
  constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
  for (const TelemetryRecord& record : records_) {
    const auto step = static_cast<double>(record.step);
    loss.points.emplace_back(step, record.loss.value_or(kGap));
    if (record.loss && detail::nonfinite_bits(*record.loss)) {
      loss.marks.emplace_back(step, "loss is " + detail::number_text(*record.loss));
    }
    if (!scale.points.empty()) scale.points.emplace_back(step, scale.points.back().second);
    scale.points.emplace_back(step, record.scale);
    norm.points.emplace_back(step, record.skipped ? kGap : record.grad_norm.value_or(kGap));
    if (record.learning_rate) rate.points.emplace_back(step, *record.learning_rate);
    if (record.tokens_per_second) speed.points.emplace_back(step, *record.tokens_per_second);
    if (record.memory_bytes) memory.points.emplace_back(step, *record.memory_bytes / 1048576);
    if (record.skipped) {
      scale.marks.emplace_back(step, "step " + std::to_string(record.step) + " skipped");
    }
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

MEZZO_INLINE std::string RunReport::overflows_html() const {
  if (overflows_ == 0) return {};
  std::string rows = "<tr><th>step</th><th>loss scale</th><th>cause</th></tr>\n", note;
  for (const std::string& row : overflow_rows_) rows += row;
  const auto shown = static_cast<std::int64_t>(overflow_rows_.size());
  if (overflows_ > shown) {
    note = "<p>The first and the last " + std::to_string(shown / 2) + " of " +
           std::to_string(overflows_) + ".</p>";
  }
  return detail::section_html("Overflows", detail::table_html(rows) + note);
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
  const std::string run = records_.empty() ? std::string() : tiles_html() + charts_html();
  return "<!doctype html>\n<html lang=en><meta charset=utf-8>"
         "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
         title + "</title><style>" + detail::kReportStyle + "</style>\n<h1>" + title + "</h1>\n" +
         head_html() + run + overflows_html() + sections_ + options_html();
}
#endif

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
