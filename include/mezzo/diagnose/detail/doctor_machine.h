/// \file
/// What the doctor asks the machine: cores, and how fast it multiplies.
#pragma once

#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/doctor.h>

#include <ATen/BlasBackend.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <c10/util/StringUtil.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
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
  bool bfloat16 = false;
  bool float16 = false;

  static NativeDtypes of(c10::Device device) {
    if (device.is_cpu()) {
      const CpuFeatures cpu = cpu_features();
      return {.known = cpu.known, .bfloat16 = cpu.bf16(), .float16 = cpu.fp16()};
    }
    const auto gpu = compute_capability(device);
    const int major = gpu ? gpu->major : 0;
    return {.known = gpu.has_value(), .bfloat16 = major >= 8, .float16 = major >= 7};
  }

  bool has(at::ScalarType dtype) const { return dtype == at::kHalf ? float16 : bfloat16; }
};

/// Returns the seconds of one product of square matrices, the fastest of some: what else the
/// machine does only adds.
inline double product_seconds(c10::Device device, at::ScalarType dtype, std::int64_t size) {
  constexpr double kSeconds = 0.03;
  const at::Tensor factor = at::full({size, size}, 0.5, at::TensorOptions(device).dtype(dtype));
  at::Tensor product = at::empty_like(factor);
  double fastest = std::numeric_limits<double>::infinity(), spent = 0;
  for (int round = 0; round < 4 || (spent < kSeconds && fastest < kSeconds); ++round) {
    const auto begin = std::chrono::steady_clock::now();
    at::mm_out(product, factor, factor);  // autocast does not touch it
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    spent += passed.count();
    if (round > 0) fastest = std::min(fastest, passed.count());  // the first one sets up
  }
  return fastest;
}

/// Times one square product in each dtype.
inline std::vector<DtypeSpeed> measured_speeds(c10::Device device) {
  const at::NoGradGuard no_grad;
  const std::int64_t size = device.is_cpu() ? 256 : 4096;
  const NativeDtypes native = NativeDtypes::of(device);
  const double float32 = product_seconds(device, at::kFloat, size);
  const double giga_operations = 2e-9 * static_cast<double>(size * size * size);
  std::vector<DtypeSpeed> speeds{
      {.name = "float32", .native = true, .gflops = giga_operations / float32}};
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const double seconds = product_seconds(device, dtype, size);
    // Where the instruction set cannot be read, the clock decides.
    speeds.push_back({.name = std::string(dtype_name(dtype)),
                      .native = native.known ? native.has(dtype) : seconds < float32 / 1.2,
                      .gflops = giga_operations / seconds});
  }
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

/// What libtorch tells cuBLAS, and what the environment does.
struct BlasSettings {
  std::string workspace{};  ///< CUBLAS_WORKSPACE_CONFIG; empty where it is not set
  bool is_deterministic = false;
  bool adds_in_half = false;  ///< partial sums of half products are added in half
  bool adds_in_bfloat16 = false;
  at::BlasBackend backend = at::BlasBackend::Default;

  static BlasSettings of_process() {
    at::Context& context = at::globalContext();
    const char* const workspace = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    const auto reduces = [](auto option) {
      return option == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
    };
    return {.workspace = workspace != nullptr ? workspace : "",
            .is_deterministic = context.deterministicAlgorithms(),
            .adds_in_half = reduces(context.allowFP16ReductionCuBLAS()),
            .adds_in_bfloat16 = reduces(context.allowBF16ReductionCuBLAS()),
            .backend = context.blasPreferredBackend()};
  }
};

/// How cuBLAS computes the products of a run in `dtype` on `device`.
inline std::vector<DoctorFinding> blas_findings(const BlasSettings& settings, at::ScalarType dtype,
                                                c10::Device device) {
  std::vector<DoctorFinding> findings;
  const auto add = [&](FindingSeverity severity, std::string reason, std::string remedy) {
    findings.push_back({.severity = severity,
                        .topic = FindingTopic::blas,
                        .where = c10::str(device),
                        .reason = std::move(reason),
                        .remedy = std::move(remedy)});
  };
  const bool repeats = settings.workspace == ":4096:8" || settings.workspace == ":16:8";
  if (settings.is_deterministic && !repeats) {
    add(FindingSeverity::error,
        c10::str("deterministic algorithms are on, and CUBLAS_WORKSPACE_CONFIG is ",
                 settings.workspace.empty() ? "not set" : "\"" + settings.workspace + "\"",
                 ": libtorch refuses products whose bits may differ from run to run"),
        "CUBLAS_WORKSPACE_CONFIG=:4096:8  // in the environment, before the program starts");
  } else if (repeats && !settings.is_deterministic) {
    add(FindingSeverity::note,
        c10::str("CUBLAS_WORKSPACE_CONFIG is ", settings.workspace,
                 ": products repeat to the bit, and other ops may not"),
        "at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);");
  }
  if (dtype == at::kHalf && settings.adds_in_half) {
    add(FindingSeverity::note,
        "cuBLAS may add partial sums of half products in half: a sum above 65504 on the way is inf",
        "at::globalContext().setAllowFP16ReductionCuBLAS(false);");
  }
  if (dtype == at::kBFloat16 && settings.adds_in_bfloat16) {
    add(FindingSeverity::note,
        "cuBLAS may add partial sums of bfloat16 products in bfloat16, which has 8 binary digits",
        "at::globalContext().setAllowBF16ReductionCuBLAS(false);");
  }
  if (settings.backend != at::BlasBackend::Default) {
    add(FindingSeverity::note,
        c10::str("products go to ", at::BlasBackendToString(settings.backend),
                 ", which the program or TORCH_BLAS_PREFER_CUBLASLT chose: speed and last bits are "
                 "that library's"),
        "");
  }
  return findings;
}

/// Times the hardware, where it is to be, and looks at threads, or at cuBLAS.
inline void examine_machine(Diagnosis& diagnosis, bool measure) {
  if (diagnosis.device.is_cuda()) {
    auto findings = blas_findings(BlasSettings::of_process(), diagnosis.dtype, diagnosis.device);
    std::move(findings.begin(), findings.end(), std::back_inserter(diagnosis.findings));
  }
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
