// error: use of deleted function .*AutocastGuard
// note: = delete;  // AutocastGuard\(torch::kCUDA\)
#include <mezzo/autocast/autocast_guard.h>

void guard_of_text() {
#ifdef MEZZO_LEGAL
  const mezzo::AutocastGuard autocast(c10::DeviceType::CUDA);
#else
  const mezzo::AutocastGuard autocast("cuda");
#endif
}
