// error: this device type has no autocast; use that of the model
#include <mezzo/autocast/autocast_guard.h>

void region_on_meta() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard<c10::DeviceType::CPU> autocast;
#else
  const mezzo::AutocastGuard<c10::DeviceType::Meta> autocast;
#endif
}
