// error: use of deleted function .*autocast\(
// note: = delete;  // AutocastGuard guard\(device, dtype\)
#include <mezzo/autocast/autocast_guard.h>

void region_by_a_call() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard autocast(c10::DeviceType::CUDA, c10::ScalarType::Half);
#else
  mezzo::autocast(c10::DeviceType::CUDA, c10::ScalarType::Half);
#endif
}
