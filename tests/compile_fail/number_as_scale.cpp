// error: use of deleted function .*GradScaler\(auto
// note: = delete;  // GradScaler\(\{\.init_scale = 1024\}\)
#include <mezzo/scaling/grad_scaler.h>

void scaler_of_a_number() {
#ifdef MEZZO_LEGAL
  const mezzo::GradScaler scaler({.init_scale = 1024.0});
#else
  const mezzo::GradScaler scaler(1024.0);
#endif
}
