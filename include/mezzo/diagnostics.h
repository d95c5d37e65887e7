/// \file
/// Tools that show what low precision does to a model and a run: why steps were skipped, where an
/// inf or NaN began, whether a run diverges, telemetry and its page, the doctor, underflow counts.
#pragma once

#include <mezzo/diagnostics/anomaly_trace.h>    // IWYU pragma: export
#include <mezzo/diagnostics/metrics_logger.h>   // IWYU pragma: export
#include <mezzo/diagnostics/overflow_report.h>  // IWYU pragma: export
#include <mezzo/diagnostics/precision_check.h>  // IWYU pragma: export
#include <mezzo/diagnostics/tensor_summary.h>   // IWYU pragma: export
