/// \file
/// The device a run is on: chosen, described and measured.
#pragma once

#include <mezzo/autocast/autocast_options.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/cpu/Utils.h>
#include <torch/torch.h>

#include <malloc.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "options.h"
#include "text.h"

namespace bert_ner {

/// Returns the device "cpu" or "cuda". \throws InputError where there is no CUDA device, with what
/// to do
inline torch::Device find_device(const std::string& name) {
  if (name == "cpu") return torch::kCPU;
  if (torch::cuda::is_available()) return {torch::kCUDA, 0};
  throw InputError(
      "--device cuda: libtorch finds no CUDA device; check `nvidia-smi`, build with a CUDA "
      "toolkit and a CUDA libtorch, or use --device cpu");
}

/// Sets what benchmarks/results/bert_ner.md has measured, unless the user has set it. Call it
/// before the first op and before other threads run. libgomp reads its variable when it is loaded,
/// so it holds in the rows of the table.
inline void set_library_defaults() {
  // oneDNN keeps 1,024 kernels by default, of up to 0.3 MiB each; a step on one length needs 18.
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16", /*overwrite=*/0);
  // libgomp's threads look 300,000 times by default, on cores that other programs may want.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "10000", 0);
  // malloc keeps what large tensors leave for the next step: page faults were an eighth of a step.
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) mallopt(M_MMAP_THRESHOLD, 1 << 30);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

/// Returns whether this device has instructions for float16 products.
inline bool has_float16(torch::Device device) {
  const auto can = at::cpu::get_cpu_capabilities();
  const auto found = can.find("avx512_fp16");
  return !device.is_cpu() || (found != can.end() && found->second == true);
}

/// Returns autocast for a row of the table. In rows with Autocast::on `MEZZO_MIXED_PRECISION` (no,
/// bf16, fp16, auto) decides; if it is unset, the device's default: bfloat16 on CPU, float16 on
/// CUDA.
inline mezzo::AutocastOptions setting_for(const Precision& precision, torch::Device device) {
  using enum Precision::Autocast;
  if (precision.autocast == on) return mezzo::autocast_from_env(device);
  if (precision.autocast == off) return {.device_type = device.type(), .enabled = false};
  return {.device_type = device.type(), .dtype = torch::kFloat16};
}

/// Returns "off", "bfloat16" or "float16": what ops compute in.
inline std::string describe(const mezzo::AutocastOptions& setting) {
  if (!setting.enabled) return "off";
  const auto dtype =
      setting.dtype.value_or(mezzo::default_autocast_dtype(setting.device_type.value()));
  return dtype == torch::kBFloat16 ? "bfloat16" : "float16";
}

/// Returns the peak memory of this process, in bytes: on the CPU its resident set, with libraries
/// and mapped files; on CUDA what libtorch's allocator gave to tensors.
inline int64_t peak_memory_bytes(torch::Device device) {
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  }
  // Not getrusage: its maximum outlives exec, so it would include the parent process.
  const std::string field = "VmHWM:";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::stoll(line.substr(field.size())) * 1024;
  }
  return 0;  // not Linux
}

}  // namespace bert_ner
