/// \file
/// Device selection, library defaults and memory measurement.
#pragma once

#include <mezzo/autocast/autocast_options.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/cpu/Utils.h>
#include <torch/torch.h>

#include <malloc.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <unordered_map>

#include "options.h"
#include "text.h"

namespace bert_ner {

/// Returns the device "cpu" or "cuda". \throws InputError if there is no CUDA device
inline torch::Device find_device(const std::string& name) {
  if (name == "cpu") return torch::kCPU;
  if (torch::cuda::is_available()) return {torch::kCUDA, 0};
  throw InputError(
      "--device cuda: libtorch finds no CUDA device; check `nvidia-smi`, build with a CUDA "
      "toolkit and a CUDA libtorch, or use --device cpu");
}

/// Sets environment variables and malloc options that the user has not set, as measured in
/// benchmarks/results/bert_ner.md. Call it before the first op and before other threads start.
/// libgomp reads its variable when it is loaded, so it takes effect in subprocesses.
inline void set_library_defaults() {
  // oneDNN caches 1,024 kernels by default, of up to 0.3 MiB; a step with one length needs 18.
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16", /*overwrite=*/0);
  // libgomp's threads spin 300,000 times by default, which slows other processes.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  // malloc reuses the memory of large tensors: page faults took an eighth of a step.
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) mallopt(M_MMAP_THRESHOLD, 1 << 30);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

using CpuCapabilities = std::unordered_map<std::string, c10::IValue>;

/// Returns whether this device has instructions for float16 products.
inline bool has_float16(torch::Device device,
                        const CpuCapabilities& cpu = at::cpu::get_cpu_capabilities()) {
  const auto has = [&](const char* instructions) {
    const auto found = cpu.find(instructions);
    return found != cpu.end() && found->second == true;
  };
  return !device.is_cpu() || has("avx512_fp16") || has("amx_fp16");
}

/// Returns the autocast options of a row. For Autocast::on, MEZZO_MIXED_PRECISION (no, bf16, fp16,
/// auto) or else the device's default applies: bfloat16 on the CPU, float16 on CUDA.
inline mezzo::AutocastOptions make_autocast_options(const Precision& precision,
                                                    torch::Device device) {
  using enum Precision::Autocast;
  if (precision.autocast == on) return mezzo::autocast_from_env(device);
  if (precision.autocast == off) return {.device_type = device.type(), .enabled = false};
  return {.device_type = device.type(), .dtype = torch::kFloat16};
}

/// Returns "off", "bfloat16" or "float16".
inline std::string describe(const mezzo::AutocastOptions& options) {
  if (!options.enabled) return "off";
  const auto dtype =
      options.dtype.value_or(mezzo::default_autocast_dtype(options.device_type.value()));
  return dtype == torch::kBFloat16 ? "bfloat16" : "float16";
}

/// Returns the peak memory of this process in bytes: its resident set on the CPU, including
/// libraries and mapped files; allocated tensors on CUDA.
inline int64_t peak_memory_bytes(torch::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  }
  // getrusage's maximum would include the parent process before exec.
  const std::string field = "VmHWM:";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::stoll(line.substr(field.size())) * 1024;
  }
  return 0;  // not Linux
}

}  // namespace bert_ner
