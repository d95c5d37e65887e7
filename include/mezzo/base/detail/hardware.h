/// \file
/// Capabilities of this hardware: the low-precision instructions that oneDNN, and thus libtorch,
/// may use on this CPU, and a GPU's compute capability.
#pragma once

#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct CpuFeatures {
  bool known = false;  ///< false on an architecture that this header cannot read
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx_bf16 = false;
  bool amx_fp16 = false;
  std::string capped_by =
      {};  ///< "ONEDNN_MAX_CPU_ISA=AVX2" when the environment hides instructions

  bool bf16() const { return avx512_bf16 || amx_bf16; }
  bool fp16() const { return avx512_fp16 || amx_fp16; }
};

/// The registers of CPUID and XGETBV that describe the CPU's features.
struct CpuidRegisters {
  std::uint32_t leaf1_ecx = 0;
  std::uint32_t leaf7_ebx = 0;
  std::uint32_t leaf7_edx = 0;
  std::uint32_t leaf7_1_eax = 0;
  std::uint64_t xcr0 = 0;  ///< which register files the operating system saves
};

inline CpuFeatures decode(const CpuidRegisters& cpu) {
  const auto bit = [](std::uint64_t word, int index) { return ((word >> index) & 1) != 0; };
  const auto saved = [&cpu](std::uint64_t mask) { return (cpu.xcr0 & mask) == mask; };
  const bool xgetbv = bit(cpu.leaf1_ecx, 27);
  // F, DQ, BW and VL together are what oneDNN calls avx512_core.
  const bool core = bit(cpu.leaf7_ebx, 16) && bit(cpu.leaf7_ebx, 17) && bit(cpu.leaf7_ebx, 30) &&
                    bit(cpu.leaf7_ebx, 31);
  const bool vectors = xgetbv && core && saved(0xE6);
  const bool tiles = xgetbv && bit(cpu.leaf7_edx, 24) && saved(0x60000);
  return {.known = true,
          .avx512 = vectors,
          .avx512_bf16 = vectors && bit(cpu.leaf7_1_eax, 5),
          .avx512_fp16 = vectors && bit(cpu.leaf7_edx, 23),
          .amx_bf16 = tiles && bit(cpu.leaf7_edx, 22),
          .amx_fp16 = tiles && bit(cpu.leaf7_1_eax, 21)};
}

/// The highest instruction set that a cap lets oneDNN use. oneDNN ignores case, and ignores a cap
/// with an unknown value.
enum class OnednnLevel { below_avx512, avx512, avx512_bf16, avx512_fp16, amx, all };

inline OnednnLevel onednn_level(std::string_view cap) {
  using Rung = std::pair<std::string_view, OnednnLevel>;
  constexpr std::array<Rung, 13> ladder = {{{"SSE41", OnednnLevel::below_avx512},
                                            {"AVX", OnednnLevel::below_avx512},
                                            {"AVX2", OnednnLevel::below_avx512},
                                            {"AVX2_VNNI", OnednnLevel::below_avx512},
                                            {"AVX2_VNNI_2", OnednnLevel::below_avx512},
                                            {"AVX512_CORE", OnednnLevel::avx512},
                                            {"AVX512_CORE_VNNI", OnednnLevel::avx512},
                                            {"AVX512_CORE_BF16", OnednnLevel::avx512_bf16},
                                            {"AVX512_CORE_FP16", OnednnLevel::avx512_fp16},
                                            {"AVX10_1_512", OnednnLevel::avx512_fp16},
                                            {"AVX10_2_512", OnednnLevel::avx512_fp16},
                                            {"AVX512_CORE_AMX", OnednnLevel::amx},
                                            {"AVX10_1_512_AMX", OnednnLevel::amx}}};
  std::string upper(cap);
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  const auto* rung = std::find_if(ladder.begin(), ladder.end(),
                                  [&upper](const Rung& entry) { return entry.first == upper; });
  return rung == ladder.end() ? OnednnLevel::all : rung->second;
}

/// Returns the features of `cpu` that remain under oneDNN's cap `name=value`.
inline CpuFeatures capped(const CpuFeatures& cpu, std::string_view name, std::string_view value) {
  const OnednnLevel level = onednn_level(value);
  CpuFeatures left = cpu;
  left.avx512 = cpu.avx512 && level >= OnednnLevel::avx512;
  left.avx512_bf16 = cpu.avx512_bf16 && level >= OnednnLevel::avx512_bf16;
  left.avx512_fp16 = cpu.avx512_fp16 && level >= OnednnLevel::avx512_fp16;
  left.amx_bf16 = cpu.amx_bf16 && level >= OnednnLevel::amx;
  left.amx_fp16 = cpu.amx_fp16 && level >= OnednnLevel::all;
  if (left.bf16() != cpu.bf16() || left.fp16() != cpu.fp16()) {
    left.capped_by = std::string(name) + "=" + std::string(value);
  }
  return left;
}

#if defined(__x86_64__)
inline std::uint64_t read_xcr0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

inline CpuFeatures read_cpu_features() {
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
  CpuidRegisters cpu;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    cpu.leaf1_ecx = ecx;
  }
  std::uint32_t subleaves = 0;
  if (__get_cpuid_count(7, 0, &subleaves, &ebx, &ecx, &edx) != 0) {
    cpu.leaf7_ebx = ebx;
    cpu.leaf7_edx = edx;
  }
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    cpu.leaf7_1_eax = eax;
  }
  if (((cpu.leaf1_ecx >> 27) & 1) != 0) {  // XGETBV is an illegal instruction without this bit
    cpu.xcr0 = read_xcr0();
  }
  return decode(cpu);
}
#else
inline CpuFeatures read_cpu_features() { return {}; }
#endif

/// Returns the features of this CPU under the cap that oneDNN reads from the environment. The
/// variable's new name takes precedence over its old one.
inline CpuFeatures cpu_features() {
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') {
      return capped(read_cpu_features(), name, value);
    }
  }
  return read_cpu_features();
}

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

/// Returns the compute capability of device `ordinal`, as the driver and libtorch number devices
/// (both follow CUDA_VISIBLE_DEVICES). Empty if there is no driver or no such device. Asks the
/// driver's library directly, without CUDA's headers, since libtorch's host-side interface counts
/// devices but does not describe them.
inline std::optional<ComputeCapability> query_compute_capability(
    int ordinal, const char* driver_library = kCudaDriver) {
  // Never closed: a CUDA driver does not expect to be unloaded.
  void* const driver = load_library(driver_library);
  // cuInit, cuDeviceGet and cuDeviceGetAttribute as cuda.h declares them; CUresult, CUdevice and
  // the attribute enum are ints, and 0 is success.
  auto* const init = function_in<int(unsigned)>(driver, "cuInit");
  auto* const get = function_in<int(int*, int)>(driver, "cuDeviceGet");
  auto* const attribute = function_in<int(int*, int, int)>(driver, "cuDeviceGetAttribute");
  if (init == nullptr || get == nullptr || attribute == nullptr) {
    return std::nullopt;
  }
  constexpr int kMajorAttribute = 75;
  constexpr int kMinorAttribute = 76;
  int device = 0;
  ComputeCapability capability;
  const bool known = init(0) == 0 && get(&device, ordinal) == 0 &&
                     attribute(&capability.major, kMajorAttribute, device) == 0 &&
                     attribute(&capability.minor, kMinorAttribute, device) == 0;
  return known ? std::optional(capability) : std::nullopt;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
