#include "ranks.h"

#include <mezzo/distributed/process_group_environment.h>

#include <c10/util/Exception.h>

#ifdef BERT_NER_MPI
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/distributed/mpi_rendezvous.h>
#include <mezzo/distributed/watchdog.h>
#endif
#ifdef BERT_NER_NCCL
#include <mezzo/distributed/nccl_backend.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "options.h"
#include "table.h"
#include "text.h"

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

/// MPI, and the watchdog that ends a rank which waits for one that is gone.
struct MpiJob {
  mezzo::MpiEnvironment environment;
  c10::intrusive_ptr<c10d::Backend> world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
  mezzo::Watchdog watchdog{mezzo::rendezvous(MPI_COMM_WORLD), world->getRank(), world->getSize()};
};

}  // namespace

Ranks::Job Ranks::join_with_mpi() {
  auto job = std::make_shared<MpiJob>();
  MPI_Comm machine = MPI_COMM_NULL;
  int count = 1, place = 0;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, job->world->getRank(), MPI_INFO_NULL,
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
  auto world = mezzo::nccl_backend(environment, mezzo::rendezvous(environment));
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

c10::intrusive_ptr<c10d::Backend> Ranks::group() const { return job_ ? job_->group : nullptr; }

Failure failure_of(const std::exception_ptr& exception) {
  constexpr int kFailure = 1, kUsage = 2;
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  try {
    std::rethrow_exception(exception);
  } catch (const RowFailed& row) {
    return {.status = row.status, .message = ""};
  } catch (const RanksFailed& ranks) {
    return ranks.failure;
  } catch (const UsageError& error) {
    return {.status = kUsage,
            .message = first_line(error.what()) + " (bert_ner --help lists the flags)"};
  } catch (const c10::Error& error) {
    return {.status = kFailure, .message = first_line(error.what_without_backtrace())};
  } catch (const std::exception& error) {
    return {.status = kFailure, .message = first_line(error.what())};
  }
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
    failures.push_back(
        {.status = std::stoi(text.substr(0, space)), .message = text.substr(space + 1)});
  }
  const auto failed = [](const Failure& failure) { return failure.status != 0; };
  const auto first = std::ranges::find_if(failures, failed);
  if (first == failures.end()) return;
  const bool is_own = first - failures.begin() == rank();
  const bool is_shared = std::ranges::all_of(
      failures, [&](const Failure& failure) { return failure.message == first->message; });
  const std::string who = is_shared ? "" : "rank " + std::to_string(rank()) + ": ";
  throw RanksFailed{{first->status, is_own ? who + first->message : "", true}};
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
  std::vector<std::vector<torch::Tensor>> all_on_device(1);
  for (int rank = 0; rank < size(); ++rank) {
    all_on_device[0].push_back(torch::empty_like(on_device));
  }
  std::vector<torch::Tensor> given = {on_device};
  job_->group->allgather(all_on_device, given)->wait();
  const auto all = torch::stack(all_on_device[0]).cpu();
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
