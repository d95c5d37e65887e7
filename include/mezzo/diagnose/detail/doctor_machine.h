/// \file
/// What the doctor asks the machine: cores, memory, who else uses it, and how fast it multiplies.
#pragma once

#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/diagnose/detail/gemm_times_impl.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/doctor.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/StringUtil.h>

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The number that a file of the kernel's begins with; unset where there is none, or "max".
inline std::optional<double> number_in(const char* path) {
  std::ifstream file(path);
  double number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

/// Cores that this process may use: what it is pinned to, or a container's quota (cgroup v2).
inline int usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int cores = ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                  ? CPU_COUNT(&allowed)
                  : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  std::ifstream quota("/sys/fs/cgroup/cpu.max");
  double share = 0;
  double period = 0;
  if (quota >> share >> period && share > 0 && period > 0) {
    cores = std::min(cores, static_cast<int>(share / period + 0.99));
  }
  return std::max(cores, 1);
}

/// Bytes that can still be had: of a CUDA device what is free, of the CPU what the kernel calls
/// available, within a container's limit.
inline std::int64_t free_bytes(c10::Device device) {
  if (!device.is_cpu()) {
    const auto index = device.has_index() ? device.index() : at::accelerator::getDeviceIndex();
    return static_cast<std::int64_t>(
        at::getDeviceAllocator(device.type())->getMemoryInfo(index).first);
  }
  std::ifstream info("/proc/meminfo");
  std::string field;
  std::int64_t kibibytes = 0;
  while (info >> field && field != "MemAvailable:") info.ignore(1000, '\n');
  info >> kibibytes;
  std::int64_t free = kibibytes * 1024;
  const auto limit = number_in("/sys/fs/cgroup/memory.max");
  const auto used = number_in("/sys/fs/cgroup/memory.current");
  if (limit && used) free = std::min(free, static_cast<std::int64_t>(*limit - *used));
  return free;
}

/// How many cores other programs use while it lives. Linux counts hundredths of a second.
class OtherPrograms {
 public:
  OtherPrograms() : began_(std::chrono::steady_clock::now()), busy_(all_busy()), own_(own_time()) {}

  double cores() const {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began_;
    const double others = (all_busy() - busy_) - (own_time() - own_);
    return passed.count() > 0 ? std::max(others, 0.0) / passed.count() : 0;
  }

 private:
  /// Seconds that all cores of the machine have worked.
  static double all_busy() {
    std::ifstream stat("/proc/stat");
    std::string name;
    double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
    stat >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
    return (user + nice + system + irq + softirq + steal) /
           static_cast<double>(::sysconf(_SC_CLK_TCK));
  }

  static double own_time() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
  }

  std::chrono::steady_clock::time_point began_;
  double busy_, own_;
};

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

/// `others` is how many cores other programs use.
inline std::vector<DoctorFinding> thread_findings(int threads, int cores, int all_cores,
                                                  double others) {
  std::vector<DoctorFinding> findings;
  DoctorFinding finding{.topic = FindingTopic::threads, .where = "cpu"};
  finding.remedy = c10::str("at::set_num_threads(", cores, ");  // or OMP_NUM_THREADS=", cores);
  if (threads > cores) {
    finding.severity = FindingSeverity::warning;
    finding.reason = c10::str("libtorch has ", threads, " threads and this process ", cores,
                              cores == 1 ? " core" : " cores", ": they wait for one another");
    findings.push_back(finding);
  } else if (threads < cores) {
    finding.reason = c10::str("libtorch has ", threads, threads == 1 ? " thread" : " threads",
                              " and this process ", cores, " cores");
    findings.push_back(finding);
  }
  if (others + std::min(threads, cores) > all_cores + 0.25) {
    findings.push_back(
        {.severity = FindingSeverity::warning,
         .topic = FindingTopic::threads,
         .where = "cpu",
         .reason = c10::str("other programs used ", digits(others, 2), " of ", all_cores,
                            " cores meanwhile: speeds are too low, and not by the same factor"),
         .remedy = "top -b -n 1 | head -15  # end them, or come back later"});
  }
  return findings;
}

/// Times the hardware, where it is to be, and looks at threads and at who else is there.
inline void examine_machine(Diagnosis& diagnosis, bool measure) {
  diagnosis.free_bytes = free_bytes(diagnosis.device);
  if (!measure) return;
  const OtherPrograms others;
  diagnosis.speeds = measured_speeds(diagnosis.device);
  diagnosis.findings.push_back(hardware_finding(diagnosis));
  if (!diagnosis.device.is_cpu()) return;
  const auto all_cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  for (DoctorFinding& finding :
       thread_findings(at::get_num_threads(), usable_cores(), all_cores, others.cores())) {
    diagnosis.findings.push_back(std::move(finding));
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
