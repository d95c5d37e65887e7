/// \file
/// Diagnostics of mixed-precision training: skipped steps, the origin of inf and NaN, divergence,
/// step metrics, underflow, and a precision check before training.
#pragma once

#include <mezzo/diagnostics/anomaly_trace.h>       // IWYU pragma: export
#include <mezzo/diagnostics/csv_writer.h>          // IWYU pragma: export
#include <mezzo/diagnostics/divergence_monitor.h>  // IWYU pragma: export
#include <mezzo/diagnostics/finding.h>             // IWYU pragma: export
#include <mezzo/diagnostics/metrics_logger.h>      // IWYU pragma: export
#include <mezzo/diagnostics/named_parameters.h>    // IWYU pragma: export
#include <mezzo/diagnostics/op_observer.h>         // IWYU pragma: export
#include <mezzo/diagnostics/overflow_report.h>     // IWYU pragma: export
#include <mezzo/diagnostics/precision_check.h>     // IWYU pragma: export
#include <mezzo/diagnostics/run_report.h>          // IWYU pragma: export
#include <mezzo/diagnostics/step_metrics.h>        // IWYU pragma: export
#include <mezzo/diagnostics/tensor_summary.h>      // IWYU pragma: export
#include <mezzo/diagnostics/tensorboard_writer.h>  // IWYU pragma: export
#include <mezzo/diagnostics/trace_on_skips.h>      // IWYU pragma: export
#include <mezzo/diagnostics/underflow_report.h>    // IWYU pragma: export
