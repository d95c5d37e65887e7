/// \file
/// The GPU of these tests and of cuda_bench: the first CUDA device, or the emulated one if
/// MEZZO_CUDA_EMULATION is defined. Streams, their guards and events are c10's, for both.
#pragma once

#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <cstdint>

#ifdef MEZZO_CUDA_EMULATION
#include "../cuda_emulation/emulated_gpu.h"
#else
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>
#endif

namespace cuda_test {

#ifdef MEZZO_CUDA_EMULATION
inline constexpr at::DeviceType kGpu = at::kPrivateUse1;
inline constexpr bool kIsEmulated = true;
using Graph = emulated_gpu::Graph;
inline bool has_gpu() { return true; }
inline bool has_memory(double /*gigabytes*/) { return true; }
#else
inline constexpr at::DeviceType kGpu = at::kCUDA;
inline constexpr bool kIsEmulated = false;
using Graph = at::cuda::CUDAGraph;
inline bool has_gpu() { return c10::cuda::device_count() > 0; }
/// Returns whether the GPU has this much free memory.
inline bool has_memory(double gigabytes) {
  std::size_t available = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
  return static_cast<double>(available) >= gigabytes * 1e9;
}
#endif

/// Returns whether this program has mezzo's kernels; otherwise steps use ATen's.
inline bool has_mezzo_kernels() {
  return mezzo::detail::kernel_backend({kGpu, 0}) == mezzo::detail::KernelBackend::cuda;
}

inline c10::impl::VirtualGuardImpl gpu_guard() { return c10::impl::VirtualGuardImpl(kGpu); }
inline c10::Stream current_stream() { return gpu_guard().getStream({kGpu, 0}); }
inline void synchronize() { gpu_guard().synchronizeDevice(0); }

/// Returns a stream other than the default one, which CUDA cannot capture.
inline c10::Stream new_stream() {
#ifdef MEZZO_CUDA_EMULATION
  return emulated_gpu::new_stream();
#else
  return c10::cuda::getStreamFromPool();
#endif
}

/// Keeps the current stream busy: on a GPU for `cycles`, by default a sixth of a second; on the
/// emulated GPU until `end`.
class BusyStream {
 public:
#ifdef MEZZO_CUDA_EMULATION
  explicit BusyStream(int64_t /*cycles*/ = 0) {}
  void end() { blocker_.end(); }

 private:
  emulated_gpu::StreamBlocker blocker_{current_stream()};
#else
  explicit BusyStream(int64_t cycles = 300'000'000) { at::cuda::sleep(cycles); }
  void end() {}
#endif
};

/// Returns the number of kernels in a CUDA graph of `work`, which does not run. Copies do not
/// count, nor do ATen ops on the emulated GPU.
template <class Work>
int64_t count_launches(const Work& work) {
  const c10::StreamGuard guard(new_stream());
#ifdef MEZZO_CUDA_EMULATION
  Graph graph;
  emulated_gpu::capture(graph, work);
  return graph.launches();
#else
  Graph graph(/*keep_graph=*/true);
  graph.capture_begin();
  work();
  graph.capture_end();
  std::size_t count = 0;
  C10_CUDA_CHECK(cudaGraphGetNodes(graph.raw_cuda_graph(), nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  C10_CUDA_CHECK(cudaGraphGetNodes(graph.raw_cuda_graph(), nodes.data(), &count));
  return std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    return type == cudaGraphNodeTypeKernel;
  });
#endif
}

}  // namespace cuda_test
