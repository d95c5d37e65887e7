// error: autocast cannot lower to this dtype; use torch::kHalf or torch::kBFloat16
#include <mezzo/autocast/autocast_guard.h>

int function_in_double() {
#ifdef MEZZO_LEGAL
  return mezzo::autocast_wrap<c10::DeviceType::CPU, c10::ScalarType::Half>([] { return 1; })();
#else
  return mezzo::autocast_wrap<c10::DeviceType::CPU, c10::ScalarType::Double>([] { return 1; })();
#endif
}
