#include "machine.h"

#include <ATen/DeviceAccelerator.h>

#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "input_error.h"

namespace bert_ner {

torch::Device find_device(const std::string& name) {
  if (name == "cpu") return torch::kCPU;
  if (!torch::cuda::is_available()) {
    throw InputError(
        "--device cuda: libtorch finds no CUDA device; check `nvidia-smi`, build with a CUDA "
        "toolkit and a CUDA libtorch, or use --device cpu");
  }
  return {torch::kCUDA, 0};
}

void set_threads(int threads) {
  if (threads > 0) at::set_num_threads(threads);
}

mezzo::AutocastSetting setting_for(Precision precision, torch::Device device) {
  if (precision == Precision::fp32) return {.device = device.type(), .enabled = false};
  return mezzo::autocast_from_env(device);
}

std::string describe(const mezzo::AutocastSetting& setting) {
  if (!setting.enabled) return "off";
  return setting.dtype == torch::kBFloat16 ? "bfloat16" : "float16";
}

int64_t peak_memory_bytes(torch::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  }
  // Not getrusage: its maximum outlives exec, so it would remember whoever started this process.
  constexpr std::string_view kField = "VmHWM:";
  constexpr int64_t kKibibyte = 1024;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kField)) return std::stoll(line.substr(kField.size())) * kKibibyte;
  }
  throw std::runtime_error("/proc/self/status has no VmHWM: peak memory cannot be measured here");
}

}  // namespace bert_ner
