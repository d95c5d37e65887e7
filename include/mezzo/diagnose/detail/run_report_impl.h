#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/comparison_table.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/svg_chart.h>
#include <mezzo/diagnose/run_report.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kReportStyle = R"(
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6575;--line:#dfe3ea;--page:#f6f7f9;
--card:#fff;--curve:#2458c5;--mark:#d2452f;--good:#e5f2e8}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#98a2b3;--line:#323a48;--page:#12161d;
--card:#1a202a;--curve:#79a6ff;--mark:#ff7d66;--good:#1d3527}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 .6rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div,figure,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
dl div{padding:.6rem .8rem}dt,figcaption,.x,.y{color:var(--soft)}dt{font-size:.85rem}
dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure,section{margin:0 0 1rem;padding:.8rem 1rem}.charts figure{margin:0}
.charts{margin-bottom:1rem}figcaption{margin-bottom:.7rem}
.chart{display:grid;grid-template-columns:4.6rem 1fr;font-size:.8rem;
font-variant-numeric:tabular-nums}
.y{position:relative}.y span{position:absolute;right:.5rem;transform:translateY(50%)}
svg{width:100%;height:11rem;display:block;overflow:visible}
.x{grid-column:2;display:flex;justify-content:space-between;margin-top:.35rem}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-opacity:.7}
.curve{stroke:var(--curve);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;
font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left;padding-left:.3rem}th{color:var(--soft);font-weight:500}
td.text{text-align:left;white-space:normal;min-width:16rem;color:var(--soft)}
tr.proposed{background:var(--good)}p{margin:.7rem 0 0}pre{margin:.6rem 0 0;overflow-x:auto}
)";

inline std::string comparison_row_html(const PrecisionRow& row, bool is_proposed) {
  std::ostringstream html;
  html << (is_proposed ? "<tr class=proposed>" : "<tr>");
  const auto cells = comparison_cells(row);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (i > 0 && !row.failure.empty()) {
      html << "<td class=text colspan=" << cells.size() - 1 << ">" << html_text(row.failure)
           << "</td>";
      break;
    }
    html << "<td>" << html_text(cells[i]) << "</td>";
  }
  html << "</tr>\n";
  return html.str();
}

inline std::string causes_html(const PrecisionRow& row) {
  std::ostringstream html;
  const auto add = [&](const char* what, const std::vector<PrecisionCause>& causes) {
    for (const PrecisionCause& cause : worst_causes(causes, row.single_batch_error, 5)) {
      html << "<tr><td>" << html_text(row.setting.name) << "</td><td>" << what << " "
           << html_text(cause.name) << "</td><td>" << digits(row.single_batch_error) << "</td><td>"
           << digits(cause.error_without) << "</td></tr>\n";
    }
  };
  add("op", row.ops);
  add("module", row.modules);
  return html.str();
}

inline std::string comparison_html(const PrecisionComparison& comparison) {
  std::ostringstream html;
  html << "<section><h2>Precisions compared on " << comparison.device
       << "</h2><div class=wide><table><tr>";
  for (const char* column : kComparisonColumns) html << "<th>" << column << "</th>";
  html << "</tr>\n";
  std::string causes;
  const PrecisionRow& proposal = comparison.proposal();
  for (const PrecisionRow& row : comparison.rows) {
    html << comparison_row_html(row, &row == &proposal);
    causes += causes_html(row);
  }
  html << "</table></div><p>" << html_text(proposal_line(comparison)) << "</p>";
  const std::string edits = proposal.setting.policy.to_string();
  if (!edits.empty()) html << "<pre>" << html_text(edits) << "</pre>";
  if (!causes.empty()) {
    html << "<h2 style='margin-top:1.2rem'>What costs accuracy</h2><div class=wide><table>"
            "<tr><th>setting</th><th>in float32</th><th>gradient error</th><th>without "
            "it</th></tr>\n"
         << causes << "</table></div>";
  }
  html << "</section>\n";
  return html.str();
}

}  // namespace detail

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

template <class Value>
auto RunReport::curve(const Value& value) const {
  std::vector<detail::CurvePoint> curve;
  for (const Point& point : points_) {
    curve.push_back({static_cast<double>(point.first), value(point)});
  }
  return curve;
}

inline std::string RunReport::html() const {
  constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
  std::int64_t skips = 0;
  std::vector<std::pair<double, std::string>> marks;
  for (const Point& point : points_) {
    if (point.skips == 0) continue;
    skips += point.skips;
    marks.emplace_back(point.first, "step " + std::to_string(point.last) + " skipped");
  }
  std::ostringstream page;
  page << "<!doctype html>\n<html lang=en><meta charset=utf-8>"
          "<meta name=viewport content='width=device-width,initial-scale=1'><title>"
       << detail::html_text(title_) << "</title><style>" << detail::kReportStyle << "</style>\n<h1>"
       << detail::html_text(title_) << "</h1>\n";
  if (!points_.empty()) {
    page << "<dl>";
    const auto fact = [&page](const char* name, const std::string& value) {
      page << "<div><dt>" << name << "</dt><dd>" << value << "</dd></div>";
    };
    fact("steps", std::to_string(points_.back().last - points_.front().first + 1));
    fact("skipped", std::to_string(skips));
    if (last_.loss) fact("last loss", detail::digits(*last_.loss, 4));
    fact("loss scale", detail::digits(last_.scale, 6));
    if (last_.tokens_per_second) fact("tokens/s", detail::digits(*last_.tokens_per_second, 4));
    if (last_.memory_bytes) fact("MiB", detail::digits(*last_.memory_bytes / 1048576, 5));
    page << "</dl>\n<div class=charts>\n";
    page << detail::chart_html(
        {.title = "loss", .points = curve([](const Point& point) {
                            return point.losses > 0 ? point.loss / static_cast<double>(point.losses)
                                                    : kGap;
                          })});
    page << detail::chart_html({.title = "loss scale; a red line is a skipped step",
                                .points = curve([](const Point& point) { return point.scale; }),
                                .marks = marks,
                                .logarithmic = true,
                                .steps = true});
    page << detail::chart_html(
        {.title = "gradient norm before clipping",
         .points = curve([](const Point& point) { return point.norm < 0 ? kGap : point.norm; }),
         .logarithmic = true});
    page << "</div>\n";
  }
  for (const PrecisionComparison& comparison : comparisons_) {
    page << detail::comparison_html(comparison);
  }
  return page.str();
}

inline void RunReport::save(const std::string& path) const {
  std::ofstream file(path, std::ios::trunc);
  TORCH_CHECK(file.is_open(), path, ": cannot be written; does its folder exist?");
  file << html();
  file.close();
  TORCH_CHECK(file.good(), path, ": could not be written; is the disk full?");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
