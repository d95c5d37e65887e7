// error: ignoring return value of .*Autocast
#include <mezzo/autocast/autocast_guard.h>

void region_of_a_temporary() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard<c10::DeviceType::CPU> autocast;
#else
  mezzo::AutocastGuard<c10::DeviceType::CPU>();
#endif
}
