/// \file
/// A GPU's compute capability, without CUDA's headers: libtorch's host-side interface counts
/// devices but does not describe them, so the driver is asked directly. Its library is there
/// wherever a GPU is.
#pragma once

#include <dlfcn.h>
#include <mezzo/base/version.h>

#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

/// The capability of the device that the driver, like libtorch, numbers `ordinal` (both follow
/// CUDA_VISIBLE_DEVICES). Empty when there is no driver or no such device.
inline std::optional<ComputeCapability> query_compute_capability(
    int ordinal, const char* driver_library = "libcuda.so.1") {
  // Never closed: a CUDA driver does not expect to be unloaded.
  void* driver = dlopen(driver_library, RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) {
    return std::nullopt;
  }
  // cuInit, cuDeviceGet and cuDeviceGetAttribute as cuda.h declares them; CUresult, CUdevice and
  // the attribute enum are ints, and 0 is success.
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto attribute =
      reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
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
