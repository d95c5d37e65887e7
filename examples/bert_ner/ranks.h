/// \file
/// The processes ("ranks") of a run with --distributed. The one place that knows MPI and NCCL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace bert_ner {

/// The processes of one run. Every rank makes the same calls in the same order; in a process alone
/// they cost nothing. Copies share the ranks, and the last copy leaves them. A rank that fails
/// calls end_all, since the others wait for it.
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

  /// The number of ranks on this machine, which share its cores.
  int on_this_machine() const { return job_ ? job_->on_this_machine : 1; }

  /// The device of this rank: its GPU under NCCL; `name` ("cpu" or "cuda") for a process alone.
  /// \throws InputError if there is no such device, or the ranks cannot exchange its tensors
  torch::Device device(const std::string& name) const;

  /// The ranks, for mezzo; null for a process alone.
  c10::intrusive_ptr<c10d::Backend> group() const;

  /// Checks that all ranks have the same text. \throws InputError on all ranks, naming `what`
  void require_same(const std::string& what, const std::string& text) const;

  /// The largest of the ranks' values.
  int64_t largest(int64_t value) const;

  /// The sum of the ranks' tensors.
  torch::Tensor sum(const torch::Tensor& tensor) const;

  /// Begins to add up the ranks' tensors, in place, on the device that the ranks compute on. Null
  /// for a process alone.
  c10::intrusive_ptr<c10d::Work> begin_sum(const torch::Tensor& tensor) const;

  /// Ends all ranks at once, whatever they are doing. Returns in a process alone.
  void end_all(int status) const;

 private:
  struct Job {
    std::shared_ptr<void> launched;  ///< what must outlive the group
    c10::intrusive_ptr<c10d::Backend> group;
    torch::Device device;  ///< of the tensors that the ranks exchange
    int on_this_machine;
    std::function<void(int)> end_all;
  };

  static Job join_with_mpi();
  static Job join_with_nccl();

  std::shared_ptr<Job> job_;
};

}  // namespace bert_ner
