// error: a MetricsLogger would write to its copy: pass std::ref
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/run_report.h>

#include <functional>

void write_copied(mezzo::MetricsLogger& logger, mezzo::RunReport& report) {
#ifdef MEZZO_LEGAL
  logger.add_callback(std::ref(report));
#else
  logger.add_callback(report);  // the copy would receive the metrics
#endif
}
