/// \file
/// Who are the processes ("ranks") of this run, and how do they talk? The one place that knows MPI
/// and NCCL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bert_ner {

/// What is said on standard error, if anything, and the status to end with.
struct Failure {
  int status = 0;
  std::string message;           ///< one line; empty where somebody else has said it
  bool is_of_all_ranks = false;  ///< so that none waits for another
};

/// Of an exception that is being handled or was caught: 2 for flags that cannot be, 1 for all else.
Failure failure_of(const std::exception_ptr& exception);

/// Work that all ranks did together failed on at least one of them. The failure of the first that
/// failed, on that rank; the others have its status, and nothing to say.
struct RanksFailed {
  Failure failure;
};

/// The processes of one run. Every rank makes the same calls in the same order; of a process alone
/// they cost nothing. A copy stands for the same ranks; the last one leaves them.
class Ranks {
 public:
  /// This process alone.
  Ranks() = default;

  /// All processes that the launcher started: with MPI (mpirun, srun), which serves the CPU, or
  /// where torchrun started them with NCCL, a GPU for each. Waits for all of them.
  /// \throws InputError where this program was built without what it takes
  static Ranks join();

  bool is_distributed() const { return job_ != nullptr; }
  int rank() const { return job_ ? job_->group->getRank() : 0; }
  int size() const { return job_ ? job_->group->getSize() : 1; }
  bool is_first() const { return rank() == 0; }

  /// Ranks that share this machine's cores, and this one's place among them.
  int on_this_machine() const { return job_ ? job_->on_this_machine : 1; }
  int place_on_this_machine() const { return job_ ? job_->place_on_this_machine : 0; }

  /// \throws InputError if the ranks cannot exchange tensors of this device ("cpu" or "cuda")
  void check_device(const std::string& name) const;

  /// The ranks, for mezzo; null for a process alone.
  c10::intrusive_ptr<c10d::Backend> group() const;

  /// Does `work`, which calls nothing of Ranks, on every rank, and waits until all are done.
  /// \throws RanksFailed on every rank if one of them threw; alone, what `work` throws
  void together(const std::function<void()>& work) const;

  /// `text` of all ranks, in their order.
  std::vector<std::string> texts_of_all(const std::string& text) const;

  int64_t largest(int64_t value) const;

  /// The sum of the ranks' tensors.
  torch::Tensor sum(const torch::Tensor& tensor) const;

  /// Begins to add up the ranks' tensors, in place, on the device that the ranks compute on. Null
  /// for a process alone.
  c10::intrusive_ptr<c10d::Work> begin_sum(const torch::Tensor& tensor) const;

  /// Ends all ranks at once, whatever they are doing: after a failure that the others know nothing
  /// of. A process alone goes on.
  void end_all(int status) const;

 private:
  struct Job {
    std::shared_ptr<void> launched;  ///< what must live as long as the group
    c10::intrusive_ptr<c10d::Backend> group;
    torch::Device device;  ///< of the tensors that the ranks exchange
    int on_this_machine, place_on_this_machine;
    std::function<void(int)> end_all;
  };

  static Job join_with_mpi();
  static Job join_with_nccl();

  std::shared_ptr<Job> job_;
};

}  // namespace bert_ner
