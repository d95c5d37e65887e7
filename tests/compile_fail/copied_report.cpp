// error: a Telemetry would write to its copy: give std::ref
#include <mezzo/diagnose/telemetry.h>

#include <functional>

void write_copied(mezzo::Telemetry& telemetry, mezzo::RunReport& report) {
#ifdef MEZZO_LEGAL
  telemetry.write_to(std::ref(report));
#else
  telemetry.write_to(report);  // a copy would have the page
#endif
}
