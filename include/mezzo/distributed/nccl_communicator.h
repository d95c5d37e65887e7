/// \file
/// Ranks on GPUs, one process a GPU, through libtorch's NCCL process group. Part of the target
/// mezzo::nccl.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/c10d_communicator.h>
#include <mezzo/distributed/process_group_environment.h>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#if !defined(USE_C10D_NCCL) || !__has_include(<nccl.h>)
#error \
    "this header needs nccl.h: link the target mezzo::nccl, find_package(mezzo COMPONENTS cuda nccl)"
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The processes of `environment`, that torchrun, Kubernetes, SLURM or Open MPI has started, as a
/// communicator for tensors on their GPUs; the GPU of this process's local rank becomes the
/// thread's current one. Waits until all have come.
///
/// \code
///   const auto world = mezzo::nccl_communicator(mezzo::ProcessGroupEnvironment::read());
///   model->to(torch::kCUDA);                          // torchrun --no-python --nproc-per-node 8
///   mezzo::DataParallel ddp(model, world);
/// \endcode
///
/// \throws c10::Error if this machine has fewer GPUs than processes, or the others do not come
inline C10dCommunicator nccl_communicator(const ProcessGroupEnvironment& environment) {
  TORCH_CHECK(environment.local_rank < c10::cuda::device_count(), "nccl_communicator: rank ",
              environment.rank, " is number ", environment.local_rank,
              " on its machine, which has ", c10::cuda::device_count(),
              " GPUs; start one process a GPU");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(environment.local_rank));
  return {c10::make_intrusive<c10d::ProcessGroupNCCL>(rendezvous(environment), environment.rank,
                                                      environment.world_size),
          {c10::kCUDA}};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
