/// \file
/// The subset of CUDA that mezzo's kernels use: threadIdx, blockIdx, blockDim, __syncthreads,
/// __syncthreads_or, __shfl_down_sync and __shfl_xor_sync with a full mask, __launch_bounds__, and
/// the macros and host functions below. No atomics, cooperative groups or dynamic shared memory.
/// Tests compile the kernels with the host's compiler: the header MEZZO_CUDA_EMULATION implements
/// this subset on a CPU.
#pragma once

#include <mezzo/base/version.h>

#ifdef MEZZO_CUDA_EMULATION
#include MEZZO_CUDA_EMULATION
#else

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime.h>

#include <cstdint>

/// Type of a kernel parameter that is too large for a copy per thread.
#define MEZZO_GRID_CONSTANT(Type) const __grid_constant__ Type

/// Unrolls the next loop, so that its arrays stay in registers.
#define MEZZO_UNROLL _Pragma("unroll")

/// Keeps the next loop rolled: unrolled it compiles slowly and runs no faster.
#define MEZZO_NO_UNROLL _Pragma("unroll 1")

/// Declares `Type& name` in shared memory, unconstructed: assign to it.
#define MEZZO_SHARED(Type, name)                                     \
  __shared__ alignas(Type) unsigned char name##_bytes[sizeof(Type)]; \
  Type& name = *reinterpret_cast<Type*>(name##_bytes)

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// Returns whether mezzo's kernels support tensors of `device`.
inline bool supports(c10::Device device) { return device.is_cuda(); }
/// Returns whether `device` has graph captures.
inline bool has_captures(c10::Device device) { return device.is_cuda(); }

using Stream = cudaStream_t;
using DeviceGuard = c10::cuda::CUDAGuard;

inline c10::Device current_device() { return {c10::kCUDA, c10::cuda::current_device()}; }

/// Returns the current stream of the current device.
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }

/// Returns the id of the graph capture of the current stream, or 0: also in a thread without a CUDA
/// context, which cannot capture.
inline uint64_t capture_id() {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(current_stream(), &status, &id);
  if (error == cudaErrorDeviceUninitialized) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  C10_CUDA_CHECK(error);
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

/// Sets this thread's capture mode. Returns the previous mode.
inline int exchange_thread_capture_mode(int mode) {
  auto capture_mode = static_cast<cudaStreamCaptureMode>(mode);
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&capture_mode));
  return static_cast<int>(capture_mode);
}

/// Permits calls in this thread that invalidate a capture by default, such as allocations.
struct RelaxedCaptureModeGuard {
  c10::cuda::CUDAStreamCaptureModeGuard guard{cudaStreamCaptureModeRelaxed};
};

/// Returns the device address of pinned host memory.
inline void* device_address(void* pinned) {
  const RelaxedCaptureModeGuard relaxed;
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, pinned, 0));
  return address;
}

/// Launches a kernel asynchronously on `stream`.
/// \throws c10::Error if the launch fails
template <auto kKernel, class... Args>
static void launch(int64_t blocks, int threads, Stream stream, const Args&... args) {
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(static_cast<unsigned>(threads));
  // clang-format off
  kKernel<<<grid, block, 0, stream>>>(args...);
  // clang-format on
  constexpr std::size_t kBytes = (sizeof(Args) + ... + 0);
  const cudaError_t error = cudaGetLastError();
  TORCH_CHECK(kBytes <= 4096 || error != cudaErrorInvalidValue,
              "CUDA error: invalid argument: this driver does not support kernel arguments of ",
              kBytes,
              " bytes; update it to R530 (CUDA 12.1) or newer, or link mezzo::mezzo instead "
              "of mezzo::cuda");
  C10_CUDA_CHECK(error);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#endif
