/// \file
/// NCCL for the processes of a job, one process a GPU. Part of the target mezzo::nccl.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/process_group_environment.h>
#include <mezzo/distributed/rendezvous.h>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <utility>

#if !defined(USE_C10D_NCCL) || !__has_include(<nccl.h>)
#error \
    "this header needs nccl.h: link the target mezzo::nccl, find_package(mezzo COMPONENTS cuda nccl)"
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Makes the GPU of this process's local rank the thread's current one, and returns libtorch's NCCL
/// backend over all processes of `environment`. A program that has a ProcessGroupNCCL already
/// passes that one to DataParallel and the rest, and does not need this function.
///
/// \code
///   const auto environment = mezzo::ProcessGroupEnvironment::read();
///   auto options = c10d::ProcessGroupNCCL::Options::create();
///   options->timeout = std::chrono::minutes(10);      // of a collective; NCCL's watchdog ends it
///   const auto world =
///       mezzo::nccl_backend(environment, mezzo::rendezvous(environment), options);
///   model->to(torch::kCUDA);                          // torchrun --no-python --nproc-per-node 8
///   mezzo::DataParallel ddp(model, world);
/// \endcode
///
/// \throws c10::Error if this machine has fewer GPUs than processes
inline c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_backend(
    const ProcessGroupEnvironment& environment, c10::intrusive_ptr<c10d::Store> store,
    c10::intrusive_ptr<c10d::ProcessGroupNCCL::Options> options =
        c10d::ProcessGroupNCCL::Options::create()) {
  TORCH_CHECK(environment.local_rank < c10::cuda::device_count(), "nccl_backend: rank ",
              environment.rank, " is number ", environment.local_rank,
              " on its machine, which has ", c10::cuda::device_count(),
              " GPUs; start one process a GPU");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(environment.local_rank));
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), environment.rank,
                                                     environment.world_size, std::move(options));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
