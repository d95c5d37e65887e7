/// \file
/// A run as one HTML page: the loss scale's staircase with skipped steps marked, loss, gradient
/// norm, exponents by layer, and a comparison of precisions. The page needs no network and no
/// script, follows the reader's light or dark setting, and fits a phone.
///
///     mezzo::RunReport report("BERT on tweets, half");
///     telemetry.write_to(std::ref(report));
///     ...                                    // train
///     telemetry.flush();
///     report.save("run.html");
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/underflow.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Of a long run it keeps some thousand points: each is then the mean loss, the last scale, the
/// largest norm and the number of skips of as many steps as it takes.
class RunReport {
 public:
  explicit RunReport(std::string title) : title_(std::move(title)) {}

  /// One more step: a Telemetry's writer.
  void operator()(const TelemetryRecord& record);

  void add(PrecisionComparison comparison) { comparisons_.push_back(std::move(comparison)); }

  /// The exponents of each layer's values against the type's range. Waits for the device.
  void add(const UnderflowReport& report);

  /// The page as it stands.
  std::string html() const;

  /// The page in a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const;

 private:
  struct Point {
    std::int64_t first = 0, last = 0;  // steps
    double loss = 0;                   // summed
    std::int64_t losses = 0;
    double scale = 1;
    double norm = -1;  // none yet
    std::int64_t skips = 0;

    void add(const Point& other);
  };

  static constexpr std::size_t kMostPoints = 4096;

  void thin();
  std::string facts_html() const;
  std::string charts_html() const;

  std::string title_;
  std::vector<Point> points_;
  std::int64_t steps_a_point_ = 1;
  TelemetryRecord last_;
  std::vector<PrecisionComparison> comparisons_;
  std::string exponents_;  // as HTML
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/run_report_impl.h>  // IWYU pragma: export
