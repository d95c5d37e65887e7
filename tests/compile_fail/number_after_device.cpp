// error: use of deleted function .*GradScaler\(const auto
// note: = delete;  // \{\.init_scale = 1024\}
#include <mezzo/scaling/grad_scaler.h>

void scaler_of_a_device_and_a_number() {
#ifdef MEZZO_LEGAL
  const mezzo::GradScaler scaler("cuda", {.init_scale = 1024.0});
#else
  const mezzo::GradScaler scaler("cuda", 1024.0);
#endif
}
