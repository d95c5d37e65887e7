// error: ignoring return value of .*Autocast
#include <mezzo/autocast/autocast.h>

void region_of_a_temporary() {
#ifdef MEZZO_LEGAL
  const mezzo::Autocast<c10::DeviceType::CPU> autocast;
#else
  mezzo::Autocast<c10::DeviceType::CPU>();
#endif
}
