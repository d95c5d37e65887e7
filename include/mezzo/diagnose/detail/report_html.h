/// \file
/// The parts of a RunReport's page: its style, charts and tables.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/underflow.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
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
.strip{width:100%;min-width:11rem;height:1.1rem;overflow:hidden}
.bin{fill:var(--curve)}.lost{fill:var(--mark);fill-opacity:.16}.subnormal{fill:var(--mark);fill-opacity:.06}
td.name,th.name{text-align:left}tr.proposed{background:var(--good)}p{margin:.7rem 0 0}pre{margin:.6rem 0 0;overflow-x:auto}
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
      html << "<tr><td>" << html_text(row.setting.name) << "</td><td class=name>" << what << " "
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
            "<tr><th>setting</th><th class=name>in float32</th><th>gradient error</th><th>without "
            "it</th></tr>\n"
         << causes << "</table></div>";
  }
  html << "</section>\n";
  return html.str();
}

/// From `first` to `last`, a bar for each exponent, darker where there are more values, over what
/// the type loses, holds with fewer bits, and holds.
inline std::string exponent_strip(const LayerExponents& layer, const ExponentRange& range,
                                  int first, int last) {
  std::ostringstream svg;
  svg << "<svg class=strip viewBox='" << first << " 0 " << last - first + 1
      << " 1' preserveAspectRatio=none>";
  const auto rect = [&svg](const char* kind, int from, int to, double opacity) {
    if (to <= from) return;
    svg << "<rect class=" << kind << " x='" << from << "' width='" << to - from << "' height='1'";
    if (opacity < 1) svg << " fill-opacity='" << digits(opacity, 2) << "'";
    svg << "/>";
  };
  rect("lost", first, std::min(range.smallest - 1, last + 1), 1);
  rect("subnormal", std::max(range.smallest - 1, first), std::min(range.normal, last + 1), 1);
  rect("lost", std::max(range.largest + 1, first), last + 1, 1);
  const auto most = *std::max_element(layer.histogram.begin(), layer.histogram.end());
  for (std::size_t bin = 0; bin < layer.histogram.size(); ++bin) {
    if (layer.histogram[bin] == 0) continue;
    const int exponent = static_cast<int>(bin) + LayerExponents::kFirst;
    const double share = static_cast<double>(layer.histogram[bin]) / static_cast<double>(most);
    rect("bin", exponent, exponent + 1, 0.08 + 0.92 * std::sqrt(share));
  }
  svg << "</svg>";
  return svg.str();
}

inline std::string exponents_html(const UnderflowReport& report) {
  const ExponentRange range = report.range();
  const LayerExponents all = report.total();
  const int first = std::max(std::min(all.smallest().value_or(0), range.smallest - 4), -60);
  const int last = std::min(std::max(all.largest().value_or(0), range.largest) + 1, 60);
  std::ostringstream html;
  html << "<section><h2>Exponents by layer, in " << dtype_name(report.dtype())
       << "</h2><div class=wide><table><tr><th>layer</th><th><div class=x><span>2^" << first
       << "</span><span>2^" << last
       << "</span></div></th><th>zero</th><th>lost</th><th>overflow</th></tr>\n";
  for (const LayerExponents& layer : report.layers()) {
    html << "<tr><td>" << html_text(layer.layer) << "</td><td>"
         << exponent_strip(layer, range, first, last) << "</td>";
    for (const double share : {layer.zero, layer.lost, layer.overflow + layer.non_finite}) {
      html << "<td>" << digits(100 * share) << " %</td>";
    }
    html << "</tr>\n";
  }
  html << "</table></div><p>Red ground: lost or overflowing in this type; faint: subnormal. Loss "
          "scale "
       << digits(report.options().loss_scale, 6) << ".</p></section>\n";
  return html.str();
}

// A curve as inline SVG. Only lines are in the SVG, which stretches to the page's width; text is
// HTML beside it, and stays readable on a phone.

struct CurvePoint {
  double x = 0;
  double y = 0;  ///< what is not finite is a gap
};

struct Chart {
  std::string title;
  std::vector<CurvePoint> points = {};
  std::vector<std::pair<double, std::string>> marks = {};  ///< vertical lines: where, and why
  bool logarithmic = false;  ///< by powers of two; then a y that is not positive is a gap
  bool steps = false;        ///< y holds until the next point
};

/// The y axis of a chart: from its values to 0 (below) to 100 (above), with lines at round numbers.
class ValueAxis {
 public:
  explicit ValueAxis(const Chart& chart) : logarithmic_(chart.logarithmic) {
    low_ = std::numeric_limits<double>::max();
    high_ = std::numeric_limits<double>::lowest();
    for (const CurvePoint& point : chart.points) {
      const double y = scaled(point.y);
      if (nonfinite_bits(y)) continue;
      low_ = std::min(low_, y);
      high_ = std::max(high_, y);
    }
    if (low_ > high_) low_ = high_ = 0;
    step_ = round_step((high_ - low_) / 3);
    low_ = std::floor(low_ / step_) * step_;
    high_ = std::max(std::ceil(high_ / step_) * step_, low_ + step_);
  }

  std::optional<double> position(double value) const {
    const double y = scaled(value);
    if (nonfinite_bits(y)) return std::nullopt;
    return 100 * (y - low_) / (high_ - low_);
  }

  /// Where lines are, and what they say, from below.
  std::vector<std::pair<double, std::string>> lines() const {
    std::vector<std::pair<double, std::string>> lines;
    const auto number = static_cast<int>(std::lround((high_ - low_) / step_));
    for (int i = 0; i <= number; ++i) {
      const double y = low_ + i * step_;
      lines.emplace_back(100.0 * i / number, digits(logarithmic_ ? std::exp2(y) : y, 5));
    }
    return lines;
  }

 private:
  double scaled(double value) const { return logarithmic_ ? std::log2(value) : value; }

  /// The next of 1, 2, 5, 10, ...; of powers of two whole ones.
  double round_step(double step) const {
    if (logarithmic_) return std::max(1.0, std::ceil(step));
    if (!(step > 0)) return 1;
    const double power = std::pow(10, std::floor(std::log10(step)));
    for (const double factor : {1, 2, 5}) {
      if (step <= factor * power) return factor * power;
    }
    return 10 * power;
  }

  bool logarithmic_;
  double low_, high_, step_;
};

/// The curve's path in a square of 100 by 100, which has y downwards.
inline std::string curve_path(const Chart& chart, const ValueAxis& axis, double first,
                              double width) {
  std::string path;
  bool is_drawing = false;
  std::string before;
  for (const CurvePoint& point : chart.points) {
    const auto y = axis.position(point.y);
    if (!y) {
      is_drawing = false;
      continue;
    }
    const std::string place = digits(100 * (point.x - first) / width, 6);
    const std::string height = digits(100 - *y, 5);
    if (is_drawing && chart.steps) path += "L" + place + " " + before;
    path += (is_drawing ? "L" : "M") + place + " " + height;
    if (!is_drawing) path += "h0";  // a lone point is seen, since ends of lines are round
    is_drawing = true;
    before = height;
  }
  return path;
}

/// The chart as a figure; of no points a sentence.
inline std::string chart_html(const Chart& chart) {
  std::ostringstream html;
  html << "<figure><figcaption>" << html_text(chart.title) << "</figcaption>";
  if (chart.points.empty()) {
    html << "<p>Nothing was recorded.</p></figure>\n";
    return html.str();
  }
  const double first = chart.points.front().x;
  const double width = std::max(chart.points.back().x - first, 1.0);
  const ValueAxis axis(chart);
  html << "<div class=chart><div class=y>";
  for (const auto& [height, text] : axis.lines()) {
    html << "<span style='bottom:" << digits(height, 4) << "%'>" << text << "</span>";
  }
  html << "</div><svg viewBox='0 0 100 100' preserveAspectRatio=none role=img aria-label='"
       << html_text(chart.title) << "'>";
  for (const auto& [height, text] : axis.lines()) {
    html << "<path class=grid d='M0 " << digits(100 - height, 4) << "H100'/>";
  }
  for (const auto& [where, why] : chart.marks) {
    html << "<path class=mark d='M" << digits(100 * (where - first) / width, 6) << " 0V100'><title>"
         << html_text(why) << "</title></path>";
  }
  html << "<path class=curve d='" << curve_path(chart, axis, first, width) << "'/></svg>";
  html << "<div class=x><span>step " << digits(first, 10) << "</span><span>"
       << digits(chart.points.back().x, 10) << "</span></div></div></figure>\n";
  return html.str();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
