#include "ranks.h"

#include <mezzo/distributed/process_group_environment.h>

#ifdef BERT_NER_MPI
#include <mezzo/distributed/mpi_communicator.h>
#include <mezzo/distributed/mpi_rendezvous.h>
#include <mezzo/distributed/watchdog.h>
#endif
#ifdef BERT_NER_NCCL
#include <mezzo/distributed/nccl_communicator.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "input_error.h"

namespace bert_ner {
namespace {

/// torchrun and Kubernetes say RANK; Open MPI and SLURM have names of their own.
bool is_started_by_torchrun() {
  const auto is_set = [](const char* name) {
    return mezzo::ProcessGroupEnvironment::from_env(name).has_value();
  };
  return is_set("RANK") && is_set("WORLD_SIZE") && !is_set("OMPI_COMM_WORLD_RANK");
}

}  // namespace

#ifdef BERT_NER_MPI

namespace {

/// MPI, and who sees to it that no rank waits for one that is gone.
struct MpiJob {
  mezzo::MpiEnvironment environment;
  mezzo::MpiCommunicator world{MPI_COMM_WORLD};
  mezzo::Watchdog watchdog{mezzo::rendezvous(MPI_COMM_WORLD), world.rank(), world.size()};
};

}  // namespace

Ranks::Job Ranks::join_with_mpi() {
  auto job = std::make_shared<MpiJob>();
  MPI_Comm machine = MPI_COMM_NULL;
  int count = 1, place = 0;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, job->world.rank(), MPI_INFO_NULL,
                      &machine);
  MPI_Comm_size(machine, &count);
  MPI_Comm_rank(machine, &place);
  MPI_Comm_free(&machine);
  auto world = job->watchdog.watch(job->world);
  return {std::move(job), std::move(world),
          torch::kCPU,    count,
          place,          [](int status) { MPI_Abort(MPI_COMM_WORLD, status); }};
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
  auto world = mezzo::nccl_communicator(environment);
  const auto here = mezzo::ProcessGroupEnvironment::from_env("LOCAL_WORLD_SIZE");
  return {nullptr,
          std::move(world),
          device,
          here ? std::stoi(*here) : 1,
          environment.local_rank,
          [](int status) { std::_Exit(status); }};
}

#else

Ranks::Job Ranks::join_with_nccl() {
  throw InputError(
      "--distributed: torchrun's processes talk through NCCL, which this program was built "
      "without; "
      "install its headers beside a CUDA libtorch, configure and build again, or use mpirun and "
      "--device cpu");
}

#endif

Ranks Ranks::join() {
  Ranks ranks;
  ranks.job_ = std::make_shared<Job>(is_started_by_torchrun() ? join_with_nccl() : join_with_mpi());
  return ranks;
}

void Ranks::check_device(const std::string& name) const {
  if (!job_ || job_->device.is_cpu() == (name == "cpu")) return;
  throw InputError(name == "cpu"
                       ? "--distributed: torchrun's processes talk through NCCL, which "
                         "serves GPUs; pass --device cuda, or use mpirun"
                       : "--distributed: MPI serves the CPU here; for --device cuda start "
                         "one process a GPU with torchrun --no-python");
}

std::optional<mezzo::Communicator> Ranks::communicator() const {
  if (!job_) return std::nullopt;
  return job_->communicator;
}

void Ranks::together(const std::function<void()>& work) const {
  if (!job_) return work();
  Failure own;
  try {
    work();
  } catch (...) {
    own = failure_of(std::current_exception());
  }
  std::vector<Failure> failures;
  for (const auto& text : texts_of_all(std::to_string(own.status) + ' ' + own.message)) {
    const auto space = text.find(' ');
    failures.push_back({std::stoi(text.substr(0, space)), text.substr(space + 1)});
  }
  const auto failed = [](const Failure& failure) { return failure.status != 0; };
  const auto first = std::ranges::find_if(failures, failed);
  if (first == failures.end()) return;
  const bool is_own = first - failures.begin() == rank();
  const bool is_shared = std::ranges::all_of(
      failures, [&](const Failure& failure) { return failure.message == first->message; });
  const std::string who = is_shared ? "" : "rank " + std::to_string(rank()) + ": ";
  throw RanksFailed{{first->status, is_own ? who + first->message : ""}};
}

std::vector<std::string> Ranks::texts_of_all(const std::string& text) const {
  if (!job_) return {text};
  const auto longest = largest(static_cast<int64_t>(text.size()));
  constexpr int64_t kLengthBytes = sizeof(int64_t);
  const auto own = torch::zeros({kLengthBytes + longest}, torch::kUInt8);
  const auto length = static_cast<int64_t>(text.size());
  std::memcpy(own.mutable_data_ptr(), &length, sizeof length);
  std::memcpy(own.mutable_data_ptr<uint8_t>() + kLengthBytes, text.data(), text.size());
  const auto on_device = own.to(job_->device);
  const auto all_on_device = torch::empty({size(), own.numel()}, on_device.options());
  job_->communicator.all_gather(all_on_device, on_device).wait();
  const auto all = all_on_device.cpu();
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    const auto* const begin = all.const_data_ptr<uint8_t>() + rank * own.numel();
    int64_t bytes = 0;
    std::memcpy(&bytes, begin, sizeof bytes);
    texts.emplace_back(reinterpret_cast<const char*>(begin + kLengthBytes),
                       static_cast<std::size_t>(bytes));
  }
  return texts;
}

int64_t Ranks::largest(int64_t value) const {
  if (!job_) return value;
  const auto largest = torch::full({1}, value, torch::dtype(torch::kInt64).device(job_->device));
  job_->communicator.all_reduce(largest, mezzo::Reduction::max).wait();
  return largest.item<int64_t>();
}

torch::Tensor Ranks::sum(const torch::Tensor& tensor) const {
  if (!job_) return tensor;
  const auto sum = tensor.to(job_->device, /*non_blocking=*/false, /*copy=*/true);
  begin_sum(sum).wait();
  return sum.to(tensor.device());
}

mezzo::Work Ranks::begin_sum(const torch::Tensor& tensor) const {
  if (!job_) return {};
  return job_->communicator.all_reduce(tensor, mezzo::Reduction::sum);
}

void Ranks::end_all(int status) const {
  if (job_) job_->end_all(status);
}

}  // namespace bert_ner
