/// \file
/// 16-bit instructions of this CPU, and the compute capability of a GPU.
#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>

#include <cstdint>
#include <optional>

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The 16-bit formats that this CPU multiplies natively. CPUs with AMX have both instructions.
struct CpuFeatures {
  bool known = false;  ///< false on an architecture that this header does not support
  bool bf16 = false;   ///< avx512_bf16
  bool fp16 = false;   ///< avx512_fp16
};

inline CpuFeatures cpu_features() {
#if defined(__GNUC__) && defined(__x86_64__)
  // __builtin_cpu_supports also checks that the operating system saves the registers. Clang 14 has
  // no name for avx512_fp16; CPUs with it have avx512_bf16.
  const bool bf16 = __builtin_cpu_supports("avx512bf16") != 0;
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_leaf = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0;
  return {.known = true, .bf16 = bf16, .fp16 = bf16 && has_leaf && ((edx >> 23) & 1) != 0};
#else
  return {};
#endif
}

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

/// Returns the compute capability of device `ordinal` (CUDA_VISIBLE_DEVICES applies); none if there
/// is no driver or no such device. Calls the driver library without CUDA's headers, since
/// libtorch's host-side interface does not have compute capabilities.
inline std::optional<ComputeCapability> query_compute_capability(
    int ordinal, const char* driver_library = kCudaDriver) {
  // Signatures as in cuda.h: CUresult, CUdevice and the attribute enum are ints, 0 is success.
  auto* const init = load_symbol<int(unsigned)>(driver_library, "cuInit");
  auto* const get = load_symbol<int(int*, int)>(driver_library, "cuDeviceGet");
  auto* const attribute = load_symbol<int(int*, int, int)>(driver_library, "cuDeviceGetAttribute");
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
