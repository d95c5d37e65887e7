#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_test {

/// How many kernels `work` puts on the device: the nodes of a graph that it is captured into, and
/// not run. Copies are no launches.
template <class Work>
int64_t count_launches(const Work& work) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  at::cuda::CUDAGraph graph(/*keep_graph=*/true);
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
}

}  // namespace cuda_test
