// error: autocast cannot lower to this dtype; use torch::kHalf or torch::kBFloat16
#include <mezzo/autocast/autocast_guard.h>

void region_in_float() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard<c10::DeviceType::CUDA, c10::ScalarType::BFloat16> autocast;
#else
  const mezzo::AutocastGuard<c10::DeviceType::CUDA, c10::ScalarType::Float> autocast;
#endif
}
