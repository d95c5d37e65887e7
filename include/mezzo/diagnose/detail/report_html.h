/// \file
/// The parts of a RunReport's page: its style and tables.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/underflow.h>

#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
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
.charts figure:last-child:nth-child(odd){grid-column:1/-1}
.charts{margin-bottom:1rem}figcaption{margin-bottom:.7rem}
.chart{display:grid;grid-template-columns:4.6rem 1fr;font-size:.8rem;
font-variant-numeric:tabular-nums}
.y{position:relative}.y span{position:absolute;right:.5rem;transform:translateY(50%)}
svg{width:100%;height:11rem;display:block;overflow:visible}
.x{grid-column:2;display:flex;justify-content:space-between;margin-top:.35rem}
.ticks{grid-column:2;position:relative;height:1.2rem;margin-top:.35rem;color:var(--soft)}
.ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.bad dd,.trouble{color:var(--mark)}.trouble{font-weight:600;margin:0 0 1rem}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-opacity:.7}
.faint{stroke:var(--curve);stroke-opacity:.3}
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

/// A number with its name.
inline std::string tile_html(const std::string& name, const std::string& value,
                             bool is_bad = false) {
  return std::string(is_bad ? "<div class=bad>" : "<div>") + "<dt>" + html_text(name) +
         "</dt><dd>" + html_text(value) + "</dd></div>";
}

/// Versions, machine and date, each with its name. The machine is its processor and its threads, as
/// Linux names them; its host name stays out of a page that is passed on.
inline std::vector<std::pair<std::string, std::string>> where_and_when() {
  std::string processor = "unknown";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    processor = line.substr(std::min(line.find(':') + 2, line.size()));
    break;
  }
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> date{};
  std::strftime(date.data(), date.size(), "%Y-%m-%d %H:%M UTC", &utc);
  return {
      {"machine", c10::str(processor, ", ", std::thread::hardware_concurrency(), " threads")},
      {"mezzo", c10::str(MEZZO_VERSION_MAJOR, ".", MEZZO_VERSION_MINOR, ".", MEZZO_VERSION_PATCH)},
      {"libtorch", TORCH_VERSION},
      {"written", date.data()}};
}

inline std::string td(const std::string& html, const char* attributes = "") {
  return c10::str("<td", attributes, ">", html, "</td>");
}

/// `heads` are the cells of the first row, `rows` the others, all as HTML.
inline std::string table_html(const std::string& heads, const std::string& rows) {
  return "<div class=wide><table><tr>" + heads + "</tr>\n" + rows + "</table></div>";
}

inline std::string section_html(const std::string& title, const std::string& content) {
  return "<section><h2>" + title + "</h2>" + content + "</section>\n";
}

inline std::string comparison_row_html(const PrecisionRow& row, bool is_proposed) {
  std::string cells;
  for (const std::string& cell : comparison_cells(row)) {
    cells += td(html_text(cell));
    if (row.failure.empty()) continue;
    const std::size_t others = comparison_columns().size() - 1;
    cells += td(html_text(row.failure), c10::str(" class=text colspan=", others).c_str());
    break;
  }
  return (is_proposed ? "<tr class=proposed>" : "<tr>") + cells + "</tr>\n";
}

inline std::string causes_html(const PrecisionRow& row) {
  std::string rows;
  const auto add = [&](const char* what, const std::vector<PrecisionCause>& causes) {
    for (const PrecisionCause& cause : worst_causes(causes, row.single_batch_error, 5)) {
      rows +=
          c10::str("<tr>", td(html_text(row.setting.name)),
                   td(html_text(cause_words(what, cause)), " class=name"),
                   td(digits(row.single_batch_error)), td(digits(cause.error_without)), "</tr>\n");
    }
  };
  add("op", row.ops);
  add("module", row.modules);
  return rows;
}

inline std::string comparison_html(const PrecisionComparison& comparison) {
  std::string heads, rows, causes;
  for (const std::string& column : comparison_columns()) heads += "<th>" + column + "</th>";
  const PrecisionRow& proposal = comparison.proposal();
  for (const PrecisionRow& row : comparison.rows) {
    rows += comparison_row_html(row, &row == &proposal);
    causes += causes_html(row);
  }
  std::string html =
      table_html(heads, rows) + "<p>" + html_text(proposal_line(comparison)) + "</p>";
  const std::string edits = proposal.setting.policy.to_string();
  if (!edits.empty()) html += "<pre>" + html_text(edits) + "</pre>";
  if (!causes.empty()) {
    html += "<h2 style='margin-top:1.2rem'>What costs accuracy</h2>" +
            table_html(
                "<th>setting</th><th class=name>what runs in float32</th><th>gradient error</th>"
                "<th>without it</th>",
                causes);
  }
  return section_html(c10::str("Precisions compared on ", comparison.device), html);
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
  std::string rows;
  for (const LayerExponents& layer : report.layers()) {
    rows += "<tr>" + td(html_text(layer.layer)) + td(exponent_strip(layer, range, first, last));
    for (const double share : {layer.zero, layer.lost, layer.overflow + layer.non_finite}) {
      rows += td(digits(100 * share) + " %");
    }
    rows += "</tr>\n";
  }
  const std::string heads =
      c10::str("<th>layer</th><th><div class=x><span>2^", first, "</span><span>2^", last,
               "</span></div></th><th>zero</th><th>lost</th><th>overflow</th>");
  return section_html(
      c10::str("Exponents by layer, in ", dtype_name(report.dtype())),
      c10::str(table_html(heads, rows),
               "<p>Red ground: lost or overflowing in this type; faint: subnormal. Loss scale ",
               digits(report.options().loss_scale, 6), ".</p>"));
}

/// \param step  the first that is not recorded yet: the overflow's or, on a device, one before it;
///   none: nobody told of one
inline std::string overflow_row_html(const Overflow& overflow, std::optional<std::int64_t> step) {
  std::string when = step ? c10::str("about step ", *step) : std::string();
  if (overflow.rank) when += c10::str(step ? ", rank " : "rank ", *overflow.rank);
  const std::string begin = "<tr>" + td(when) + td(digits(overflow.step.scale, 8));
  if (overflow.parameters.empty()) {
    return begin + td(html_text(overflow.cause()), " class=text colspan=6") + "</tr>\n";
  }
  const OverflowedParameter& first = overflow.parameters.front();
  double largest = 0;
  for (const LayerNorm& layer : overflow.layers) largest = std::max(largest, layer.norm);
  return c10::str(
      begin, td(html_text(first.name), " class=name"),
      td(c10::str(number_text(first.value), " at [", c10::Join(", ", first.first), "]")),
      td(std::to_string(first.infs)), td(std::to_string(first.nans)),
      td(c10::str(overflow.overflowed_layers().size(), " of ", overflow.layers.size())),
      td(digits(largest)), "</tr>\n");
}

inline std::string overflows_html(const std::vector<std::string>& rows, std::int64_t all) {
  std::string html = table_html(
      "<th>step</th><th>loss scale</th><th class=name>first parameter</th>"
      "<th>first value</th><th>inf</th><th>NaN</th><th>layers</th><th>largest norm</th>",
      c10::Join("", rows));
  const auto shown = static_cast<std::int64_t>(rows.size());
  if (all > shown) html += c10::str("<p>The first and the last ", shown / 2, " of ", all, ".</p>");
  return section_html("Overflows", html);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
