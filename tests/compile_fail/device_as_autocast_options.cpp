// error: use of deleted function .*autocast\(
// note: = delete;  // \{\.device_type = \.\.\.\}
#include <mezzo/autocast/autocast_guard.h>

int call_on_a_device() {
#ifdef MEZZO_LEGAL
  return mezzo::autocast({.device_type = c10::DeviceType::CUDA}, [] { return 1; });
#else
  mezzo::autocast(c10::DeviceType::CUDA, [] { return 1; });
  return 0;
#endif
}
