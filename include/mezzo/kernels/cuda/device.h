/// \file
/// The part of CUDA that mezzo's kernels use: threadIdx, blockIdx, blockDim, __syncthreads,
/// __syncthreads_or, __shfl_down_sync with a full mask, __launch_bounds__, and the macros and host
/// functions below. No atomics, no cooperative groups, and no dynamically sized shared memory. A
/// host can therefore run the kernels: tests compile them with the host's compiler, and the header
/// MEZZO_CUDA_EMULATION implements this part for a CPU.
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

/// Marks a kernel parameter that is too large for each thread to copy.
#define MEZZO_GRID_CONSTANT(Type) const __grid_constant__ Type

/// Unrolls the loop that follows, so that its arrays stay in registers.
#define MEZZO_UNROLL _Pragma("unroll")

/// Keeps the loop that follows rolled: unrolled it compiles slowly and runs no faster.
#define MEZZO_NO_UNROLL _Pragma("unroll 1")

/// Declares `Type& name` in the block's shared memory. No object is constructed: the threads assign
/// one.
#define MEZZO_SHARED(Type, name)                                     \
  __shared__ alignas(Type) unsigned char name##_bytes[sizeof(Type)]; \
  Type& name = *reinterpret_cast<Type*>(name##_bytes)

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// Returns whether mezzo's kernels serve tensors of `device`.
inline bool supports(c10::Device device) { return device.is_cuda(); }
/// Returns whether work on `device` can be captured into a graph.
inline bool has_captures(c10::Device device) { return device.is_cuda(); }

using Stream = cudaStream_t;
using DeviceGuard = c10::cuda::CUDAGuard;

inline c10::Device current_device() { return {c10::kCUDA, c10::cuda::current_device()}; }

/// Returns the current stream of the current device.
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }

/// Returns the number of the graph capture that this stream is part of; 0 for none, and in a thread
/// without a context, which captures nothing.
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

/// Sets this thread's capture mode, and returns the mode before.
inline int exchange_thread_capture_mode(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&exchanged));
  return static_cast<int>(exchanged);
}

/// Lets this thread call what a capture forbids by default, such as allocations.
struct RelaxedCaptureModeGuard {
  c10::cuda::CUDAStreamCaptureModeGuard guard{cudaStreamCaptureModeRelaxed};
};

/// Returns the address that kernels use for pinned memory of the host.
inline void* device_address(void* pinned) {
  const RelaxedCaptureModeGuard allowed;
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, pinned, 0));
  return address;
}

/// Launches `blocks` blocks of `threads` threads of a kernel on `stream`. Does not wait.
/// \throws c10::Error if CUDA refuses the launch
template <auto kKernel, class... Args>
static void launch(int64_t blocks, int threads, Stream stream, const Args&... args) {
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(static_cast<unsigned>(threads));
  // clang-format off
  kKernel<<<grid, block, 0, stream>>>(args...);
  // clang-format on
  constexpr std::size_t kBytes = (sizeof(Args) + ... + 0);
  const cudaError_t error = cudaGetLastError();
  TORCH_CHECK(kBytes <= 4096 || error != cudaErrorInvalidValue, "mezzo passes ", kBytes,
              " bytes of arguments to a kernel, which this CUDA driver does not take; update it to "
              "R530 (CUDA 12.1) or newer, or link mezzo::mezzo instead of mezzo::cuda");
  C10_CUDA_CHECK(error);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#endif
