/// \file
/// The language of mezzo's kernels: CUDA's threadIdx, blockIdx, blockDim, __syncthreads,
/// __syncthreads_or and
/// __shfl_down_sync with a full mask, and what is below. No atomics, no cooperative groups, no
/// shared memory whose size is known only at the launch. So little that a host can run it: tests
/// compile the kernels with the host's compiler and MEZZO_DEVICE_ON_HOST, the header that has all
/// of it for a CPU.
#pragma once

#include <mezzo/base/version.h>

#ifdef MEZZO_DEVICE_ON_HOST
#include MEZZO_DEVICE_ON_HOST
#else

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime.h>

#include <cstdint>

/// A kernel's parameter that is too large to be copied by each thread.
#define MEZZO_ARGUMENT(Type) const __grid_constant__ Type

/// Before a loop whose arrays are to stay in registers.
#define MEZZO_UNROLL _Pragma("unroll")

/// Before a loop that takes long to compile unrolled, and is no faster.
#define MEZZO_NO_UNROLL _Pragma("unroll 1")

/// `Type& name` in the block's shared memory, for its threads to give a value: none has been
/// constructed there.
#define MEZZO_SHARED(Type, name)                                     \
  __shared__ alignas(Type) unsigned char name##_bytes[sizeof(Type)]; \
  Type& name = *reinterpret_cast<Type*>(name##_bytes)

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

using Stream = cudaStream_t;
using DeviceGuard = c10::cuda::CUDAGuard;

inline c10::Device current_device() { return {c10::kCUDA, c10::cuda::current_device()}; }

/// Of the current device.
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }

/// The number of the capture into a graph that this stream is part of; 0: of none.
inline uint64_t capture_id() {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(current_stream(), &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

/// Puts `blocks` blocks of `threads` threads of a kernel on `stream`, and does not wait for them.
/// \throws c10::Error if CUDA refuses the launch
template <auto kKernel, class... Args>
static void launch(int64_t blocks, int threads, Stream stream, const Args&... args) {
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(static_cast<unsigned>(threads));
  // clang-format off
  kKernel<<<grid, block, 0, stream>>>(args...);
  // clang-format on
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#endif
