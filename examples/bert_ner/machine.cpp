#include "machine.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/cpu/Utils.h>

#include <malloc.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "text.h"

namespace bert_ner {

torch::Device find_device(const std::string& name, int index) {
  if (name == "cpu") return torch::kCPU;
  if (!torch::cuda::is_available()) {
    throw InputError(
        "--device cuda: libtorch finds no CUDA device; check `nvidia-smi`, build with a CUDA "
        "toolkit and a CUDA libtorch, or use --device cpu");
  }
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

void set_library_defaults() {
  // A step on one length takes about 18 kernels, 12 of them in backward, which all layers share.
  // Each holds up to 0.3 MiB, and the peak is at the end of backward. Compiling them anew for
  // another length takes too little to be seen beside the step.
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16", /*overwrite=*/0);
  // In place of 300,000; threads that never look (OMP_WAIT_POLICY=passive) are woken for each op.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  // The gradient of the word embeddings is 47 MB in float32, and freed each step. By default malloc
  // asks the kernel for that much anew, and each page of it faults: an eighth of the step.
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) mallopt(M_MMAP_THRESHOLD, 1 << 30);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

int cores_of_this_process() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

bool has_float16(torch::Device device) {
  if (!device.is_cpu()) return true;
  const auto can = at::cpu::get_cpu_capabilities();
  const auto found = can.find("avx512_fp16");
  return found != can.end() && found->second.isBool() && found->second.toBool();
}

void set_threads(int threads, int processes) {
  if (threads > 0) return at::set_num_threads(threads);
  if (processes == 1 || std::getenv("OMP_NUM_THREADS") != nullptr) return;
  const auto part = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) / processes;
  // mpirun may have bound this process to fewer than its part.
  at::set_num_threads(std::max(1, std::min(part, cores_of_this_process())));
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
  // Not getrusage: its maximum outlives exec, so it would remember whoever started this process.
  constexpr std::string_view kField = "VmHWM:";
  constexpr int64_t kKibibyte = 1024;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kField)) return std::stoll(line.substr(kField.size())) * kKibibyte;
  }
  throw std::runtime_error("/proc/self/status has no VmHWM: peak memory cannot be measured here");
}

void restart_peak_memory(torch::Device device) {
  if (!device.is_cpu()) {
    at::accelerator::emptyCache();
    at::accelerator::resetPeakStats(device.index());
    return;
  }
  malloc_trim(0);
  constexpr const char* kForgetThePeak = "5";  // man 5 proc, /proc/pid/clear_refs
  std::ofstream file("/proc/self/clear_refs");
  file << kForgetThePeak << std::flush;
  if (file) return;
  throw std::runtime_error(
      "/proc/self/clear_refs cannot be written: the peak memory of one row after another cannot be "
      "measured here; run them alone, with --precision");
}

}  // namespace bert_ner
