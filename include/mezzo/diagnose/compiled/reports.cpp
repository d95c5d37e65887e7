// Reports of a run, compiled once: see mezzo/optim/compiled.h.
#define MEZZO_IN_LIBRARY_OF_DIAGNOSE  // the headers below keep their definitions
#include <mezzo/diagnose/divergence_watch.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>
