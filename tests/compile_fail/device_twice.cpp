// error: no matching function for call to .*AutocastGuard<.*AutocastGuard\(c10::DeviceType\)
#include <mezzo/autocast/autocast_guard.h>

void device_in_type_and_argument() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard<c10::DeviceType::CPU> autocast;
#else
  const mezzo::AutocastGuard<c10::DeviceType::CPU> autocast(c10::DeviceType::CPU);
#endif
}
