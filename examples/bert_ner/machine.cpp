#include "machine.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/cpu/Utils.h>

#include <malloc.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "text.h"

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

void set_library_defaults() {
  // oneDNN keeps 1,024 kernels by default, of up to 0.3 MiB each; a step on one length needs 18.
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16", /*overwrite=*/0);
  // libgomp's threads look 300,000 times by default, on cores that other programs may want.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  // malloc keeps what large tensors leave for the next step: page faults were an eighth of a step.
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) mallopt(M_MMAP_THRESHOLD, 1 << 30);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

bool has_float16(torch::Device device) {
  if (!device.is_cpu()) return true;
  const auto can = at::cpu::get_cpu_capabilities();
  const auto found = can.find("avx512_fp16");
  return found != can.end() && found->second.isBool() && found->second.toBool();
}

void set_threads(int threads) {
  if (threads > 0) at::set_num_threads(threads);
}

mezzo::AutocastSetting setting_for(Precision precision, torch::Device device) {
  if (precision == Precision::fp32 || stores_bfloat16(precision)) {
    return {.device = device.type(), .enabled = false};
  }
  if (precision == Precision::fp16) return {.device = device.type(), .dtype = torch::kFloat16};
  return mezzo::autocast_from_env(device);
}

torch::Dtype dtype_of(const mezzo::AutocastSetting& setting) {
  return setting.dtype.value_or(mezzo::default_autocast_dtype(setting.device.value()));
}

std::string describe(const mezzo::AutocastSetting& setting) {
  if (!setting.enabled) return "off";
  return dtype_of(setting) == torch::kBFloat16 ? "bfloat16" : "float16";
}

int64_t peak_memory_bytes(torch::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  }
  // Not getrusage: its maximum outlives exec, so it would include the parent process.
  constexpr std::string_view kField = "VmHWM:";
  constexpr int64_t kKibibyte = 1024;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kField)) return std::stoll(line.substr(kField.size())) * kKibibyte;
  }
  return 0;  // not Linux
}

}  // namespace bert_ner
