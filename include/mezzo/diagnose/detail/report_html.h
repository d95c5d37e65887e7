/// \file
/// The parts of a RunReport's page: its style, tables and curves. A curve is inline SVG, in which
/// are only lines, since it stretches to the page's width; text is HTML beside it.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <torch/version.h>

#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <ctime>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `text` as HTML shows it, also inside of an attribute.
inline std::string html_text(std::string_view text) {
  std::string html;
  for (const char c : text) {
    const char* const escaped = c == '&'   ? "&amp;"
                                : c == '<' ? "&lt;"
                                : c == '>' ? "&gt;"
                                : c == '"' ? "&quot;"
                                           : nullptr;
    html += escaped != nullptr ? std::string(escaped) : std::string(1, c);
  }
  return html;
}

inline constexpr const char* kReportStyle = R"(
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6575;--line:#dfe3ea;--page:#f6f7f9;
--card:#fff;--curve:#2458c5;--mark:#d2452f}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#98a2b3;--line:#323a48;--page:#12161d;
--card:#1a202a;--curve:#79a6ff;--mark:#ff7d66}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 .6rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div,figure,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
dl div{padding:.6rem .8rem}dt,figcaption,.y{color:var(--soft)}dt{font-size:.85rem}
dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure,section{margin:0 0 1rem;padding:.8rem 1rem}.charts figure{margin:0}
.charts figure:last-child:nth-child(odd){grid-column:1/-1}
.charts{margin-bottom:1rem}figcaption{margin-bottom:.7rem}
.chart{display:grid;grid-template-columns:4.6rem 1fr;font-size:.8rem;
font-variant-numeric:tabular-nums}
.y{position:relative}.y span{position:absolute;right:.5rem;transform:translateY(50%)}
svg{width:100%;height:11rem;display:block;overflow:visible}
.ticks{grid-column:2;position:relative;height:1.2rem;margin-top:.35rem;color:var(--soft)}
.ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.bad dd,.trouble{color:var(--mark)}.trouble{font-weight:600;margin:0 0 1rem}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-opacity:.7}
.curve{stroke:var(--curve);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;
font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}
td:last-child{white-space:normal;min-width:16rem;color:var(--soft)}
p{margin:.7rem 0 0}pre{margin:.6rem 0 0;overflow-x:auto}
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
  const auto number = [](auto value) { return std::to_string(value); };
  return {{"machine", processor + ", " + number(std::thread::hardware_concurrency()) + " threads"},
          {"mezzo", number(MEZZO_VERSION_MAJOR) + "." + number(MEZZO_VERSION_MINOR) + "." +
                        number(MEZZO_VERSION_PATCH)},
          {"libtorch", TORCH_VERSION},
          {"written", date.data()}};
}

/// A table row; its cells are text.
inline std::string row_html(const std::vector<std::string>& cells) {
  std::string html = "<tr>";
  for (const std::string& cell : cells) html += "<td>" + html_text(cell) + "</td>";
  return html + "</tr>\n";
}

/// A table of rows, which scrolls by itself where it is too wide.
inline std::string table_html(const std::string& rows) {
  return "<div class=wide><table>" + rows + "</table></div>";
}

inline std::string section_html(const std::string& title, const std::string& content) {
  return "<section><h2>" + title + "</h2>" + content + "</section>\n";
}

struct Chart {
  std::string title;
  std::vector<std::pair<double, double>> points = {};      ///< a y that is not finite is a gap
  std::vector<std::pair<double, std::string>> marks = {};  ///< vertical lines: where, and why
  bool logarithmic = false;  ///< by powers of two; then a y that is not positive is a gap
};

/// Returns the next of 1, 2 and 5 times a power of ten, for steps between lines of an axis.
inline double round_step(double step) {
  if (!(step > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(step)));
  for (const double factor : {1, 2, 5}) {
    if (step <= factor * power) return factor * power;
  }
  return 10 * power;
}

/// Returns at most 1000 points: means of as many neighbours as it takes.
inline std::vector<std::pair<double, double>> few_points(
    const std::vector<std::pair<double, double>>& points) {
  constexpr std::size_t kMost = 1000;
  const std::size_t each = (points.size() + kMost - 1) / kMost;
  if (each <= 1) return points;
  std::vector<std::pair<double, double>> means;
  for (std::size_t begin = 0; begin < points.size(); begin += each) {
    double sum = 0, count = 0;
    for (std::size_t i = begin; i < std::min(begin + each, points.size()); ++i) {
      if (nonfinite_bits(points[i].second)) continue;
      sum += points[i].second;
      ++count;
    }
    means.emplace_back(points[begin].first, sum / count);  // 0 / 0 is a gap
  }
  return means;
}

/// Returns the chart as a figure; of no points a sentence.
inline std::string chart_html(const Chart& chart) {
  const std::string title = html_text(chart.title);
  std::string html = "<figure><figcaption>" + title + ", by step</figcaption>";
  if (chart.points.empty()) return html + "<p>Nothing was recorded.</p></figure>\n";
  auto points = few_points(chart.points);
  double low = std::numeric_limits<double>::max(), high = std::numeric_limits<double>::lowest();
  for (auto& [x, y] : points) {
    if (chart.logarithmic) y = y > 0 ? std::log2(y) : std::numeric_limits<double>::quiet_NaN();
    if (nonfinite_bits(y)) continue;
    low = std::min(low, y);
    high = std::max(high, y);
  }
  if (low > high) low = high = 0;
  const double step =
      chart.logarithmic ? std::max(1.0, std::ceil((high - low) / 3)) : round_step((high - low) / 3);
  low = std::floor(low / step) * step;
  high = std::max(std::ceil(high / step) * step, low + step);
  const double first = chart.points.front().first;
  const double width = std::max(chart.points.back().first - first, 1.0);
  // Places in a square of 100 by 100, which has y downwards.
  const auto across = [&](double x) { return digits(100 * (x - first) / width, 6); };
  const auto down = [&](double y) { return digits(100 - 100 * (y - low) / (high - low), 5); };

  std::string labels, lines, curve, ticks;
  for (int i = 0; low + i * step < high + step / 2; ++i) {
    const double y = low + i * step;
    const bool is_power = chart.logarithmic && (y > 16 || y < -10);
    labels += "<span style='bottom:" + digits(100 * (y - low) / (high - low), 4) + "%'>" +
              (is_power ? "2^" + digits(y, 5) : digits(chart.logarithmic ? std::exp2(y) : y, 5)) +
              "</span>";
    lines += "<path class=grid d='M0 " + down(y) + "H100'/>";
  }
  for (const auto& [where, why] : chart.marks) {
    lines += "<path class=mark d='M" + across(where) + " 0V100'><title>" + html_text(why) +
             "</title></path>";
  }
  bool is_drawing = false;
  for (const auto& [x, y] : points) {
    if (!nonfinite_bits(y)) {
      curve += (is_drawing ? "L" : "M") + across(x) + " " + down(y);
      if (!is_drawing) curve += "h0";  // a lone point is seen, since ends of lines are round
    }
    is_drawing = !nonfinite_bits(y);
  }
  const double tick = std::max(1.0, round_step(width / 5));
  for (double x = std::ceil(first / tick) * tick; x <= first + width; x += tick) {
    ticks += "<span style='left:" + across(x) + "%'>" + digits(x, 10) + "</span>";
  }
  return html + "<div class=chart><div class=y>" + labels +
         "</div><svg viewBox='0 0 100 100' preserveAspectRatio=none role=img aria-label='" + title +
         "'>" + lines + "<path class=curve d='" + curve + "'/></svg><div class=ticks>" + ticks +
         "</div></div></figure>\n";
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
