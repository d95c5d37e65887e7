/// \file
/// A curve as inline SVG. Only lines are in the SVG, which stretches to the page's width; text is
/// HTML beside it, and stays readable on a phone.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
  bool smooth = false;       ///< of many points a running mean, over the points drawn faintly
};

/// The points' means over as many neighbours on either side as a hundredth of them, of which those
/// that are no numbers are left out.
inline std::vector<CurvePoint> running_means(const std::vector<CurvePoint>& points) {
  const std::size_t reach = points.size() / 100 + 2;
  std::vector<CurvePoint> means;
  for (std::size_t i = 0; i < points.size(); ++i) {
    double sum = 0, count = 0;
    for (std::size_t k = i - std::min(i, reach); k < std::min(i + reach + 1, points.size()); ++k) {
      if (nonfinite_bits(points[k].y)) continue;
      sum += points[k].y;
      ++count;
    }
    means.push_back({points[i].x, nonfinite_bits(points[i].y) ? points[i].y : sum / count});
  }
  return means;
}

/// Round numbers from `first` on, about four, with the places of the curve's x.
inline std::vector<double> round_steps(double first, double width) {
  double step = 1;
  for (int i = 0; width / step > 5; ++i) step *= i % 3 == 1 ? 2.5 : 2;  // 1, 2, 5, 10, ...
  std::vector<double> steps;
  for (double x = std::ceil(first / step) * step; x <= first + width; x += step) steps.push_back(x);
  return steps;
}

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
      const bool is_power = logarithmic_ && (y > 16 || y < -10);
      lines.emplace_back(100.0 * i / number, is_power ? "2^" + digits(y, 5)
                                                      : digits(logarithmic_ ? std::exp2(y) : y, 5));
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
  html << "<figure><figcaption>" << html_text(chart.title) << ", by step</figcaption>";
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
  constexpr std::size_t kMany = 20;
  Chart drawn = chart;
  if (chart.smooth && chart.points.size() >= kMany) {
    html << "<path class=faint d='" << curve_path(chart, axis, first, width) << "'/>";
    drawn.points = running_means(chart.points);
  }
  html << "<path class=curve d='" << curve_path(drawn, axis, first, width)
       << "'/></svg><div class=ticks>";
  for (const double x : round_steps(first, width)) {
    html << "<span style='left:" << digits(100 * (x - first) / width, 4) << "%'>" << digits(x, 10)
         << "</span>";
  }
  html << "</div></div></figure>\n";
  return html.str();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
