/// \file
/// RunReport: a training run as one HTML page.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/flushed_file.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/detail/html.h>
#include <mezzo/diagnostics/step_metrics.h>

#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <ios>
#include <locale>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A MetricsLogger callback that keeps the metrics of all steps, 150 bytes each, and writes them as
/// one HTML page: scores, hyperparameters, charts of loss, loss scale with skipped steps, gradient
/// norm, learning rate, speed and memory, and the output of other tools. The page uses no network
/// and no script, and adapts to dark mode and small screens.
///
/// docs/debugging.md ("What did the run do?") has a loop that writes one.
class RunReport {
 public:
  /// \param title  heading of the page
  explicit RunReport(std::string title) : title_(std::move(title)) {}
  RunReport(const RunReport&) = delete;  // a MetricsLogger would write to its copy: pass std::ref
  RunReport& operator=(const RunReport&) = delete;

  /// Adds a step; called by MetricsLogger.
  void operator()(const StepMetrics& metrics) { steps_.push_back(metrics); }

  /// Sets a score for which higher is better, such as "F1". A score that is not finite and positive
  /// is shown in red, with a warning below the title. Replaces an earlier value.
  void set_score(const std::string& name, double value) { scores_[name] = value; }

  /// Sets a hyperparameter or other property of the run, such as "seed". Replaces an earlier value.
  /// Versions and the date are always shown.
  void set_hparam(const std::string& name, const std::string& value) { hparams_[name] = value; }

  /// Adds a section with what `printable` prints: a string, an AnomalyTrace, an UnderflowReport, a
  /// PrecisionReport.
  template <class Printable>
  void add_section(const std::string& title, const Printable& printable) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << printable;
    sections_ += detail::section_html(title, text.str());
  }

  /// Returns the page.
  std::string to_html() const {
    const std::string title = detail::escape_html(title_);
    return "<!doctype html>\n<html lang=en><meta charset=utf-8>"
           "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
           title + "</title><style>" + detail::kReportCss + "</style>\n<h1>" + title + "</h1>\n" +
           tiles_html() + (steps_.empty() ? "" : charts_html()) + sections_ + hparams_html();
  }

  /// Writes the page to a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const {
    detail::FlushedFile(path, std::ios::trunc).write(to_html());
  }

 private:
  /// Scores and totals.
  std::string tiles_html() const {
    using detail::format_significant;
    std::string tiles, alerts;
    const auto add = [&](const std::string& name, const std::string& value, bool is_bad = false) {
      tiles += std::string(is_bad ? "<div class=bad>" : "<div>") + "<dt>" +
               detail::escape_html(name) + "</dt><dd>" + detail::escape_html(value) + "</dd></div>";
    };
    for (const auto& [name, value] : scores_) {
      const bool is_bad = !(value > 0) || detail::is_nonfinite(value);
      add(name, format_significant(value, 3), is_bad);
      if (!is_bad) continue;
      alerts += (alerts.empty() ? "" : ", ") + detail::escape_html(name) + " is " +
                format_significant(value);
    }
    if (!alerts.empty()) {
      alerts = "<p class=alert>" + alerts + ": the model has learned nothing useful.</p>\n";
    }
    if (!steps_.empty()) {
      double seconds = 0, tokens = 0, memory = 0;
      std::int64_t skipped = 0;
      for (const StepMetrics& step : steps_) {
        skipped += step.skipped ? 1 : 0;
        memory = std::max(memory, step.memory_bytes.value_or(0));
        if (!step.tokens_per_second) continue;
        seconds += step.step_seconds;
        tokens += *step.tokens_per_second * step.step_seconds;
      }
      const StepMetrics& last = steps_.back();
      add("steps", std::to_string(last.step - steps_.front().step + 1));
      add("skipped", std::to_string(skipped));
      if (last.loss) {
        add("last loss", format_significant(*last.loss, 4), detail::is_nonfinite(*last.loss));
      }
      add("loss scale", format_significant(last.scale, 8));
      if (seconds > 0) {
        add("mean tokens/s", format_significant(std::round(tokens / seconds * 10) / 10, 8));
      }
      if (memory > 0) add("peak memory, MiB", format_significant(memory / 1048576, 5));
    }
    return alerts + (tiles.empty() ? "" : "<dl>" + tiles + "</dl>\n");
  }

  std::string charts_html() const {
    const auto mark_nonfinite = [](const StepMetrics& step) {
      const bool is_bad = step.loss && detail::is_nonfinite(*step.loss);
      return is_bad ? "loss is " + detail::format_number(*step.loss) : "";
    };
    const auto mark_skipped = [](const StepMetrics& step) {
      return step.skipped ? "step " + std::to_string(step.step) + " skipped" : "";
    };
    std::string html;
    for (const detail::Chart& chart : std::vector<detail::Chart>{
             {"loss, by step; red: inf or NaN", false, &StepMetrics::loss, mark_nonfinite},
             {"loss scale, by step; red: skipped", true, &StepMetrics::scale, mark_skipped},
             {"gradient norm before clipping, by step; red: skipped", true,
              [](const StepMetrics& step) { return step.skipped ? std::nullopt : step.grad_norm; },
              mark_skipped},
             {"learning rate, by step", false, &StepMetrics::learning_rate},
             {"tokens/s, by step", false, &StepMetrics::tokens_per_second},
             {"memory, MiB, by step", false, [](const StepMetrics& step) {
                return step.memory_bytes ? std::optional(*step.memory_bytes / 1048576)
                                         : std::nullopt;
              }}}) {
      html += detail::chart_html(chart, steps_);
    }
    return "<div class=charts>\n" + html + "</div>\n";
  }

  std::string hparams_html() const {
    const std::tm utc = detail::to_utc(std::time(nullptr));
    std::array<char, 32> date{};
    std::strftime(date.data(), date.size(), "%Y-%m-%d %H:%M UTC", &utc);
    std::string text;
    for (const auto& [name, value] : hparams_) text += name + ": " + value + "\n";
    text +=
        c10::str("mezzo: ", MEZZO_VERSION_MAJOR, ".", MEZZO_VERSION_MINOR, ".", MEZZO_VERSION_PATCH,
                 "\nlibtorch: ", TORCH_VERSION, "\nwritten: ", date.data());
    return detail::section_html("Run", text);
  }

  std::string title_;
  std::map<std::string, double> scores_;
  std::map<std::string, std::string> hparams_;
  std::vector<StepMetrics> steps_;
  std::string sections_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
