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

// Captures of work into CUDA graphs. Work on a stream that is being captured is recorded, not run;
// it runs at each replay of the graph. Host code runs only once, during the capture.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the id of the capture that `stream` is part of, or 0. Asks the driver, since nothing of
/// CUDA is linked without mezzo::cuda; libtorch has loaded the driver if a CUDA tensor exists.
inline uint64_t capture_id_from_driver(void* stream) {
  using Query = int(void* stream, int* status, uint64_t* id);
  static Query* const query = [] {
    auto* const found = load_symbol<Query>(kCudaDriver, "cuStreamGetCaptureInfo");
    TORCH_CHECK(found != nullptr,
                "mezzo cannot ask CUDA's driver whether a stream is being captured: ", kCudaDriver,
                " has no cuStreamGetCaptureInfo; link the CMake target mezzo::cuda, or update the "
                "driver");
    return found;
  }();
  int status = 0;
  uint64_t id = 0;
  const int error = query(stream, &status, &id);
  TORCH_CHECK(error == 0,
              "CUDA's driver cannot say whether a stream is being captured: cuStreamGetCaptureInfo "
              "returned ",
              error,
              "; an earlier CUDA call failed: run with CUDA_LAUNCH_BLOCKING=1, and "
              "the call that failed throws");
  return status == 0 ? 0 : id;
}

/// The CUstream behind `stream`. libtorch 2.10 does not expose it without linking CUDA.
template <class Stream>
void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    TORCH_CHECK(false,
                "libtorch 2.10 does not tell mezzo whether a stream is being captured; link the "
                "target mezzo::cuda, or update libtorch to 2.11");
  }
}

/// Returns the id of the capture that the device's current stream is part of, or 0.
inline uint64_t current_capture_id(at::Device device) {
  if (const CudaKernels* const cuda = cuda_kernels()) return cuda->current_capture_id(device);
  if (!device.is_cuda()) return 0;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return capture_id_from_driver(native_handle(stream));
}

/// Sets the mode in which the driver treats this thread's calls during captures, and returns the
/// mode before. Does nothing for a device without captures.
inline int exchange_capture_mode(at::Device device, int mode) {
  if (const CudaKernels* const cuda = cuda_kernels()) {
    return cuda->exchange_capture_mode(device, mode);
  }
  if (!device.is_cuda()) return mode;
  static auto* const exchange =
      load_symbol<int(int* mode)>(kCudaDriver, "cuThreadExchangeStreamCaptureMode");
  TORCH_CHECK(
      exchange != nullptr && exchange(&mode) == 0,
      "CUDA's driver cannot set a thread's capture mode: ", kCudaDriver,
      " has no cuThreadExchangeStreamCaptureMode, or an earlier CUDA call failed; update the "
      "driver, or run with CUDA_LAUNCH_BLOCKING=1, and the call that failed throws");
  return mode;
}

/// Sets the relaxed capture mode in this thread, so that it may query and wait for events of
/// `device` while another thread captures a graph. In the default mode that invalidates the
/// capture.
class RelaxedCaptureModeGuard {
 public:
  explicit RelaxedCaptureModeGuard(at::Device device)
      : device_(device), before_(exchange_capture_mode(device, kRelaxed)) {}
  ~RelaxedCaptureModeGuard() {
    try {
      exchange_capture_mode(device_, before_);
    } catch (...) {  // of a device that has failed, which the next call reports
    }
  }
  RelaxedCaptureModeGuard(const RelaxedCaptureModeGuard&) = delete;
  RelaxedCaptureModeGuard& operator=(const RelaxedCaptureModeGuard&) = delete;

 private:
  static constexpr int kRelaxed = 2;

  at::Device device_;
  int before_;
};

/// Returns an uninitialised tensor on the host, pinned if `device` is not the CPU: `device` then
/// reads and writes it without a wait of the host. May be called in a capture: the driver forbids
/// allocations there, and libtorch 2.10 does not ask it for an exception, as mezzo::cuda does and
/// libtorch 2.11 too.
inline at::Tensor empty_host_tensor(at::IntArrayRef sizes, at::ScalarType dtype,
                                    at::Device device) {
  const CudaKernels* const cuda = cuda_kernels();
  if (cuda != nullptr && !device.is_cpu()) return cuda->empty_pinned(sizes, dtype);
  return at::empty(sizes, at::device(at::kCPU).dtype(dtype).pinned_memory(!device.is_cpu()));
}

/// Called before `what`, which must survive from step to step, is created: a captured creation
/// would be repeated by each replay. \throws c10::Error if the device's current stream is being
/// captured
inline void check_not_capturing(at::Device device, const char* what) {
  TORCH_CHECK(current_capture_id(device) == 0, what,
              " would be made in the capture of a CUDA graph, and so begin anew at each replay; "
              "take a whole step (scale, backward, step, update) before the capture");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
