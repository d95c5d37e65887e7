/// \file
/// Capabilities of this hardware: the low-precision instructions of this CPU, and a GPU's compute
/// capability.
#pragma once

#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>

#include <cstdint>
#include <optional>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct CpuFeatures {
  bool known = false;  ///< false on an architecture that this header cannot read
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx_bf16 = false;
  bool amx_fp16 = false;

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
          .avx512_bf16 = vectors && bit(cpu.leaf7_1_eax, 5),
          .avx512_fp16 = vectors && bit(cpu.leaf7_edx, 23),
          .amx_bf16 = tiles && bit(cpu.leaf7_edx, 22),
          .amx_fp16 = tiles && bit(cpu.leaf7_1_eax, 21)};
}

#if defined(__x86_64__)
inline std::uint64_t read_xcr0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

inline CpuFeatures cpu_features() {
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
inline CpuFeatures cpu_features() { return {}; }
#endif

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
