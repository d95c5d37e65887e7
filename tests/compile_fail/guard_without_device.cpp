// error: use of deleted function .*AutocastGuard\(\)
#include <mezzo/autocast/autocast_guard.h>

void guard_of_nothing() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard<c10::DeviceType::CUDA> autocast;
#else
  const mezzo::AutocastGuard autocast;
#endif
}
