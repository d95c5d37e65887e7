/// \file
/// Tools that show what low precision does to a model and a run: why steps were skipped, where an
/// inf or NaN began, whether a run diverges, telemetry and its page, the doctor, underflow counts.
#pragma once

#include <mezzo/diagnose/anomaly_trace.h>    // IWYU pragma: export
#include <mezzo/diagnose/doctor.h>           // IWYU pragma: export
#include <mezzo/diagnose/overflow_report.h>  // IWYU pragma: export
#include <mezzo/diagnose/summarize.h>        // IWYU pragma: export
#include <mezzo/diagnose/telemetry.h>        // IWYU pragma: export
