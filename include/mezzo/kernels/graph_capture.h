#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>

// CUDA graph capture. Work on a capturing stream is recorded, and runs at each replay of the graph;
// host code runs only once, during the capture.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the id of the capture of `stream`, or 0. Calls the driver, since nothing of CUDA is
/// linked without mezzo::cuda; libtorch has loaded the driver if a CUDA tensor exists.
inline uint64_t capture_id_from_driver(void* stream) {
  using Query = int(void* stream, int* status, uint64_t* id);
  static Query* const query = [] {
    auto* const symbol = load_symbol<Query>(kCudaDriver, "cuStreamGetCaptureInfo");
    TORCH_CHECK(symbol != nullptr, "could not load cuStreamGetCaptureInfo from ", kCudaDriver,
                "; link the CMake target mezzo::cuda, or update the driver");
    return symbol;
  }();
  int status = 0;
  uint64_t id = 0;
  const int error = query(stream, &status, &id);
  TORCH_CHECK(error == 0, "CUDA error: cuStreamGetCaptureInfo returned ", error,
              ". CUDA kernel errors might be asynchronously reported at some other API call; run "
              "with CUDA_LAUNCH_BLOCKING=1");
  return status == 0 ? 0 : id;
}

/// Returns the CUstream of `stream`, which libtorch 2.10 does not expose without linking CUDA.
template <class Stream>
void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    TORCH_CHECK(false,
                "libtorch 2.10 does not expose CUDA streams without linking CUDA; link the "
                "CMake target mezzo::cuda, or update libtorch to 2.11");
  }
}

/// Returns the id of the capture of the device's current stream, or 0.
inline uint64_t current_capture_id(at::Device device) {
  if (const CudaKernels* const cuda = cuda_kernels()) return cuda->current_capture_id(device);
  if (!device.is_cuda()) return 0;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return capture_id_from_driver(native_handle(stream));
}

/// Sets this thread's capture mode (cudaThreadExchangeStreamCaptureMode). Returns the previous
/// mode. No-op for a device without captures.
inline int exchange_capture_mode(at::Device device, int mode) {
  if (const CudaKernels* const cuda = cuda_kernels()) {
    return cuda->exchange_capture_mode(device, mode);
  }
  if (!device.is_cuda()) return mode;
  static auto* const exchange =
      load_symbol<int(int* mode)>(kCudaDriver, "cuThreadExchangeStreamCaptureMode");
  TORCH_CHECK(
      exchange != nullptr && exchange(&mode) == 0,
      "CUDA error: cuThreadExchangeStreamCaptureMode failed or is missing in ", kCudaDriver,
      ". CUDA kernel errors might be asynchronously reported at some other API call; update "
      "the driver, or run with CUDA_LAUNCH_BLOCKING=1");
  return mode;
}

/// Puts this thread into relaxed capture mode, in which it may query and synchronize with events of
/// `device` while another thread captures. In the default mode that invalidates the capture.
class RelaxedCaptureModeGuard {
 public:
  explicit RelaxedCaptureModeGuard(at::Device device)
      : device_(device), prev_mode_(exchange_capture_mode(device, kRelaxed)) {}
  ~RelaxedCaptureModeGuard() {
    try {
      exchange_capture_mode(device_, prev_mode_);
    } catch (...) {  // the next call reports an error of the device
    }
  }
  RelaxedCaptureModeGuard(const RelaxedCaptureModeGuard&) = delete;
  RelaxedCaptureModeGuard& operator=(const RelaxedCaptureModeGuard&) = delete;

 private:
  static constexpr int kRelaxed = 2;

  at::Device device_;
  int prev_mode_;
};

/// Returns an uninitialized host tensor, pinned unless `device` is the CPU. May be called during a
/// capture with mezzo::cuda or libtorch 2.11; libtorch 2.10 alone cannot allocate then.
inline at::Tensor empty_host_tensor(at::IntArrayRef sizes, at::ScalarType dtype,
                                    at::Device device) {
  const CudaKernels* const cuda = cuda_kernels();
  if (cuda != nullptr && !device.is_cpu()) return cuda->empty_pinned(sizes, dtype);
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(!device.is_cpu()));
}

/// Call before creating `what`, which must persist across steps: a captured creation is repeated by
/// each replay.
/// \throws c10::Error if the device's current stream is capturing
inline void check_not_capturing(at::Device device, const char* what) {
  TORCH_CHECK(
      current_capture_id(device) == 0, what,
      " cannot be created during CUDA graph capture: each replay would create it again; run "
      "one whole iteration (scale, backward, step, update) before the capture");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
