#include "ranks.h"

#include <mezzo/distributed/rendezvous.h>

#ifdef BERT_NER_MPI
#include <mezzo/distributed/mpi_backend.h>
#endif
#ifdef BERT_NER_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>
#include <utility>
#include <vector>

#include "machine.h"
#include "text.h"

namespace bert_ner {
namespace {

/// torchrun and Kubernetes say RANK; Open MPI and SLURM have names of their own.
bool is_started_by_torchrun() {
  const auto is_set = [](const char* name) { return std::getenv(name) != nullptr; };
  return is_set("RANK") && is_set("WORLD_SIZE") && !is_set("OMPI_COMM_WORLD_RANK");
}

}  // namespace

#ifdef BERT_NER_MPI

Ranks::Job Ranks::join_with_mpi() {
  auto environment = std::make_shared<mezzo::MpiEnvironment>();
  MPI_Comm machine = MPI_COMM_NULL;
  int count = 1;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  MPI_Comm_size(machine, &count);
  MPI_Comm_free(&machine);
  auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
  return {std::move(environment), std::move(world), torch::kCPU, count,
          [](int status) { MPI_Abort(MPI_COMM_WORLD, status); }};
}

#else

Ranks::Job Ranks::join_with_mpi() {
  throw InputError(
      "--distributed: this program was built without MPI; install it (apt-get install "
      "libopenmpi-dev), configure and build again, and start it with mpirun");
}

#endif
#ifdef BERT_NER_NCCL

Ranks::Job Ranks::join_with_nccl() {
  const auto environment = mezzo::ProcessGroupEnvironment::read();
  if (environment.local_rank >= static_cast<int>(torch::cuda::device_count())) {
    throw InputError("--distributed: rank " + std::to_string(environment.rank) + " is number " +
                     std::to_string(environment.local_rank) +
                     " on this machine, which has fewer GPUs; start one process a GPU");
  }
  const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank));
  c10::cuda::set_device(device.index());
  auto world = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      mezzo::rendezvous(environment), environment.rank, environment.world_size);
  const char* const here = std::getenv("LOCAL_WORLD_SIZE");
  return {nullptr, std::move(world), device, here != nullptr ? std::atoi(here) : 1,
          [](int status) { std::_Exit(status); }};
}

#else

Ranks::Job Ranks::join_with_nccl() {
  throw InputError(
      "--distributed: torchrun's processes talk through NCCL, which this program was built "
      "without; install its headers beside a CUDA libtorch, configure and build again, or use "
      "mpirun and --device cpu");
}

#endif

Ranks Ranks::join() {
  Ranks ranks;
  ranks.job_ = std::make_shared<Job>(is_started_by_torchrun() ? join_with_nccl() : join_with_mpi());
  return ranks;
}

torch::Device Ranks::device(const std::string& name) const {
  if (!job_) return find_device(name);
  if (job_->device.is_cpu() == (name == "cpu")) return job_->device;
  throw InputError(name == "cpu"
                       ? "--distributed: torchrun's processes talk through NCCL, which "
                         "serves GPUs; pass --device cuda, or use mpirun"
                       : "--distributed: MPI serves the CPU here; for --device cuda start "
                         "one process a GPU with torchrun --no-python");
}

c10::intrusive_ptr<c10d::Backend> Ranks::group() const { return job_ ? job_->group : nullptr; }

void Ranks::require_same(const std::string& what, const std::string& text) const {
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text) / 2);
  if (largest(hash) == -largest(-hash)) return;
  throw InputError("--distributed: the ranks have different " + what +
                   "; give all the same flags, files and environment");
}

int64_t Ranks::largest(int64_t value) const {
  if (!job_) return value;
  std::vector<torch::Tensor> largest = {
      torch::full({1}, value, torch::dtype(torch::kInt64).device(job_->device))};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  job_->group->allreduce(largest, options)->wait();
  return largest[0].item<int64_t>();
}

torch::Tensor Ranks::sum(const torch::Tensor& tensor) const {
  if (!job_) return tensor;
  const auto sum = tensor.to(job_->device, /*non_blocking=*/false, /*copy=*/true);
  begin_sum(sum)->wait();
  return sum.to(tensor.device());
}

c10::intrusive_ptr<c10d::Work> Ranks::begin_sum(const torch::Tensor& tensor) const {
  if (!job_) return nullptr;
  std::vector<torch::Tensor> tensors = {tensor};
  return job_->group->allreduce(tensors);
}

void Ranks::end_all(int status) const {
  if (job_) job_->end_all(status);
}

}  // namespace bert_ner
