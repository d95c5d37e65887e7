// error: autocast cannot lower to this dtype; use torch::kHalf or torch::kBFloat16
#include <mezzo/autocast/autocast.h>

void region_in_float() {
#ifdef MEZZO_LEGAL
  const mezzo::Autocast<c10::DeviceType::CUDA, c10::ScalarType::BFloat16> autocast;
#else
  const mezzo::Autocast<c10::DeviceType::CUDA, c10::ScalarType::Float> autocast;
#endif
}
