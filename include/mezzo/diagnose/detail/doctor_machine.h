/// \file
/// What the doctor asks the machine: cores, and how fast it multiplies.
#pragma once

#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/diagnose/detail/gemm_times_impl.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/doctor.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Which dtypes the hardware multiplies by instructions of its own.
struct NativeDtypes {
  bool known = false;
  bool tf32 = false;
  bool bfloat16 = false;
  bool float16 = false;

  static NativeDtypes of(c10::Device device) {
    if (device.is_cpu()) {
      const CpuFeatures cpu = cpu_features();
      return {.known = cpu.known, .tf32 = false, .bfloat16 = cpu.bf16(), .float16 = cpu.fp16()};
    }
    const auto gpu = compute_capability(device);
    const int major = gpu ? gpu->major : 0;
    return {.known = gpu.has_value(),
            .tf32 = major >= 8,
            .bfloat16 = major >= 8,
            .float16 = major >= 7};
  }

  bool has(at::ScalarType dtype) const { return dtype == at::kHalf ? float16 : bfloat16; }
};

/// Times one square product in each dtype.
inline std::vector<DtypeSpeed> measured_speeds(c10::Device device) {
  constexpr double kSecondsEach = 0.03;
  const at::NoGradGuard no_grad;
  const std::int64_t size = device.is_cpu() ? 256 : 4096;
  const GemmMicroseconds times =
      GemmStopwatch(device, kSecondsEach).time({.m = size, .n = size, .k = size});
  NativeDtypes native = NativeDtypes::of(device);
  const double giga_operations = 2e-9 * static_cast<double>(size * size * size);
  const auto speed = [&](const char* name, bool is_native, double microseconds) {
    // Who cannot read the instruction set goes by the clock.
    const bool is_fast = microseconds < times.float32 / 1.2;
    return DtypeSpeed{.name = name,
                      .native = native.known ? is_native : is_fast,
                      .gflops = giga_operations / (1e-6 * microseconds)};
  };
  std::vector<DtypeSpeed> speeds{speed("float32", true, times.float32)};
  speeds.front().native = true;
  if (times.tf32) speeds.push_back(speed("tf32", native.tf32, *times.tf32));
  speeds.push_back(speed("bfloat16", native.bfloat16, times.bfloat16));
  speeds.push_back(speed("float16", native.float16, times.float16));
  return speeds;
}

inline DoctorFinding hardware_finding(const Diagnosis& diagnosis) {
  const std::string name(dtype_name(diagnosis.dtype));
  const auto speed =
      std::find_if(diagnosis.speeds.begin(), diagnosis.speeds.end(),
                   [&name](const DtypeSpeed& candidate) { return candidate.name == name; });
  const double ratio = speed->gflops / diagnosis.speeds.front().gflops;
  DoctorFinding finding{.topic = FindingTopic::hardware,
                        .where = c10::str(diagnosis.device),
                        .reason = c10::str("products in ", name, " run at ", digits(ratio, 2),
                                           " times float32's speed")};
  if (ratio > 1.1 && speed->native) return finding;
  finding.severity = FindingSeverity::warning;
  std::string why = "this GPU has no tensor cores for it";
  if (diagnosis.device.is_cpu()) why = lack_of_instructions(cpu_features(), name.c_str());
  finding.reason += speed->native
                        ? "; the hardware has instructions for it, so a larger batch may gain more"
                        : ": " + why + ", and emulates it; autocast saves memory here and no time";
  finding.remedy = c10::str("auto setting = mezzo::recommended(",
                            diagnosis.device.is_cpu() ? "torch::kCPU" : "torch::kCUDA",
                            ");  // float32 where nothing else is fast");
  return finding;
}

/// Where libtorch has more threads than this process has cores, or fewer.
inline std::optional<DoctorFinding> thread_finding(int threads, int cores) {
  if (threads == cores) return std::nullopt;
  DoctorFinding finding{.topic = FindingTopic::threads, .where = "cpu"};
  finding.remedy = c10::str("at::set_num_threads(", cores, ");  // or OMP_NUM_THREADS=", cores);
  finding.reason = c10::str("libtorch has ", threads, threads == 1 ? " thread" : " threads",
                            " and this process ", cores, cores == 1 ? " core" : " cores");
  if (threads > cores) {
    finding.severity = FindingSeverity::warning;
    finding.reason += ": they wait for one another";
  }
  return finding;
}

/// Times the hardware, where it is to be, and looks at threads.
inline void examine_machine(Diagnosis& diagnosis, bool measure) {
  if (!measure) return;
  diagnosis.speeds = measured_speeds(diagnosis.device);
  diagnosis.findings.push_back(hardware_finding(diagnosis));
  if (!diagnosis.device.is_cpu()) return;
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (auto finding = thread_finding(at::get_num_threads(), cores)) {
    diagnosis.findings.push_back(*std::move(finding));
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
