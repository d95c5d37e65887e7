// error: use of deleted function .*GradScaler::step\(
// note: = delete;  // \{\.max_norm = 1\.0\}
#include <mezzo/scaling/grad_scaler.h>

void step_of_a_number(mezzo::GradScaler& scaler, torch::optim::Optimizer& optimizer) {
#ifdef MEZZO_LEGAL
  scaler.step(optimizer, {.max_norm = 1.0});
#else
  scaler.step(optimizer, 1.0);
#endif
}
