/// \file
/// The parts of a RunReport's page: its style and tables.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <time.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
.faint{stroke:var(--curve);stroke-opacity:.3}
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
  return {
      {"machine", c10::str(processor, ", ", std::thread::hardware_concurrency(), " threads")},
      {"mezzo", c10::str(MEZZO_VERSION_MAJOR, ".", MEZZO_VERSION_MINOR, ".", MEZZO_VERSION_PATCH)},
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
