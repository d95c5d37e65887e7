/// \file
/// HTML of a RunReport: escaping, style, sections and charts.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/step_metrics.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Escapes `text` for HTML, also for attribute values.
inline std::string escape_html(std::string text) {
  const std::pair<const char*, const char*> entities[] = {
      {"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}};
  for (const auto& [from, to] : entities) c10::ReplaceAll(text, from, to);
  return text;
}

inline constexpr const char* kReportCss = R"(
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6575;--line:#dfe3ea;--page:#f6f7f9;
--card:#fff;--curve:#2458c5;--mark:#d2452f}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#98a2b3;--line:#323a48;--page:#12161d;
--card:#1a202a;--curve:#79a6ff;--mark:#ff7d66}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:1.4rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 .6rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div,figure,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
dl div{padding:.6rem .8rem}dt,figcaption,.y{color:var(--soft)}dt{font-size:.85rem}
dd{margin:0;font-size:1.15rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem;
margin-bottom:1rem}
figure,section{margin:0 0 1rem;padding:.8rem 1rem}.charts figure{margin:0}
.charts figure:last-child:nth-child(odd){grid-column:1/-1}figcaption{margin-bottom:.7rem}
.chart{display:grid;grid-template-columns:4.6rem 1fr;font-size:.8rem}
.y{position:relative}.y span{position:absolute;right:.5rem;transform:translateY(50%)}
svg{width:100%;height:11rem;display:block;overflow:visible}
.ticks{grid-column:2;position:relative;height:1.2rem;margin-top:.35rem;color:var(--soft)}
.ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.bad dd,.alert{color:var(--mark)}.alert{font-weight:600;margin:0 0 1rem}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-opacity:.7}
.curve{stroke:var(--curve);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
pre{margin:.6rem 0 0;overflow-x:auto}
)";

inline std::string section_html(const std::string& title, const std::string& text) {
  return "<section><h2>" + escape_html(title) + "</h2><pre>" + escape_html(text) +
         "</pre></section>\n";
}

/// A curve over the steps of a run.
struct Chart {
  std::string title;
  bool is_log2;  ///< log2 scale, which omits values that are not positive
  std::function<std::optional<double>(const StepMetrics&)> value;
  /// Returns the tooltip of a mark at the step; empty for no mark.
  std::function<std::string(const StepMetrics&)> mark = [](const auto&) { return ""; };
};

/// Returns a chart as a figure; empty if no step has a value. Draws at most 1000 points, each the
/// mean of neighboring steps, with gaps for non-finite values. The inline SVG is stretched to the
/// page's width, so that it contains only lines; labels are HTML.
inline std::string chart_html(const Chart& chart, const std::vector<StepMetrics>& steps) {
  constexpr std::size_t kMaxPoints = 1000;
  constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
  const auto first_step = static_cast<double>(steps.front().step);
  const double num_steps = std::max(static_cast<double>(steps.back().step) - first_step, 1.0);
  // Coordinates in a square of 100 by 100; y points down.
  const auto svg_x = [&](double step) {
    return format_significant(100 * (step - first_step) / num_steps, 6);
  };
  const std::size_t steps_per_point = (steps.size() + kMaxPoints - 1) / kMaxPoints;
  std::vector<std::pair<double, double>> points;
  std::string marks;
  bool has_values = false;
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto step = static_cast<double>(steps[i].step);
    const std::optional<double> value = chart.value(steps[i]);
    has_values |= value.has_value();
    if (i % steps_per_point == 0) {
      points.emplace_back(step, kGap);
      sum = count = 0;
    }
    if (value && !is_nonfinite(*value)) points.back().second = (sum += *value) / ++count;
    const std::string tooltip = chart.mark(steps[i]);
    if (tooltip.empty()) continue;
    marks +=
        "<path class=mark d='M" + svg_x(step) + " 0V100'><title>" + tooltip + "</title></path>";
  }
  if (!has_values) return {};
  double low = std::numeric_limits<double>::max(), high = std::numeric_limits<double>::lowest();
  for (auto& [x, y] : points) {
    if (chart.is_log2) y = y > 0 ? std::log2(y) : kGap;
    if (is_nonfinite(y)) continue;
    low = std::min(low, y);
    high = std::max(high, y);
  }
  if (low > high) low = high = 0;
  if (low == high) high = low + 1;
  if (chart.is_log2) {  // grid lines at powers of two
    low = std::floor(low);
    high = low + 4 * std::ceil((high - low) / 4);
  }
  const auto svg_y = [&](double y) {
    return format_significant(100 - 100 * (y - low) / (high - low), 5);
  };
  std::string labels, grid, ticks;
  for (const int quarter : {0, 1, 2, 3, 4}) {
    const double y = low + (high - low) * quarter / 4;
    const double step = std::round(first_step + num_steps * quarter / 4);
    labels += "<span style='bottom:" + std::to_string(25 * quarter) + "%'>" +
              (chart.is_log2 ? "2^" + format_significant(y, 4) : format_significant(y)) + "</span>";
    grid += "<path class=grid d='M0 " + svg_y(y) + "H100'/>";
    ticks += "<span style='left:" + svg_x(step) + "%'>" + format_significant(step, 10) + "</span>";
  }
  std::string curve;
  bool is_drawing = false;
  for (const auto& [x, y] : points) {
    const bool is_gap = is_nonfinite(y);
    // "h0" makes a single point visible, since line caps are round.
    if (!is_gap) curve += (is_drawing ? "L" : "M") + svg_x(x) + " " + svg_y(y) + "h0";
    is_drawing = !is_gap;
  }
  return "<figure><figcaption>" + chart.title + "</figcaption><div class=chart><div class=y>" +
         labels +
         "</div><svg viewBox='0 0 100 100' preserveAspectRatio=none role=img aria-label='" +
         chart.title + "'>" + grid + marks + "<path class=curve d='" + curve +
         "'/></svg><div class=ticks>" + ticks + "</div></div></figure>\n";
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
