// error: use of deleted function .*AutocastModule
// note: = delete;  // \{\.device_type = torch::kCUDA\}
#include <mezzo/autocast/autocast_module.h>

#include <torch/nn/modules/linear.h>

void module_on_a_device(torch::nn::Linear linear) {
#ifdef MEZZO_LEGAL
  mezzo::AutocastModule module(linear, {.device_type = c10::DeviceType::CUDA});
#else
  mezzo::AutocastModule module(linear, c10::DeviceType::CUDA);
#endif
}
