/// \file
/// MPI as a backend of libtorch's c10d, for tensors on the CPU. Part of the target mezzo::mpi.
#pragma once

#if !__has_include(<mpi.h>)
#error "this header needs MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class MpiWork;
}  // namespace detail

/// Initialises MPI with MPI_THREAD_MULTIPLE, unless the program has done so, and finalises MPI if
/// it initialised it. Put one at the top of main, before every group:
///
/// \code
///   int main() {
///     mezzo::MpiEnvironment mpi;
///     auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
/// \endcode
///
/// If an exception leaves the scope, the destructor does not finalise MPI, which would wait for
/// ranks that wait for this one: let the exception end the process, and mpirun ends the others.
class MpiEnvironment {
 public:
  /// \throws c10::Error if MPI has been finalised, or has no MPI_THREAD_MULTIPLE
  MpiEnvironment();
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Returns whether this object initialised MPI.
  bool initialised_it() const noexcept { return initialised_it_; }

 private:
  bool initialised_it_ = false;
  int exceptions_;
};

/// Options of MpiBackend.
struct MpiBackendOptions {
  /// The longest time that a rank waits for the others to call a collective. The time must exceed
  /// whatever one rank does alone while the others wait: a checkpoint, an evaluation.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// A c10d backend of the ranks of an MPI communicator. DataParallel and the other classes of mezzo
/// take it, and so does any libtorch program, directly or through a ProcessGroup:
///
/// \code
///   auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
///   group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::MPI, world);
///   group->setDefaultBackend(c10d::ProcessGroup::BackendType::MPI);
/// \endcode
///
/// Every rank makes the same calls in the same order, with tensors of the same dtype and number of
/// elements, from any thread. Ranks compare their calls before any data moves: if they differ, all
/// ranks get an error that names two of them, and the group remains usable. A call returns at once,
/// and the backend's own thread does one collective after another. Do not read or write the tensors
/// of a collective before its work has been waited for.
///
/// Tensors are dense, contiguous, on the CPU, and of fewer than 2^31 elements. Reductions are SUM,
/// AVG (of floating dtypes: the sum, divided), MIN and MAX. bfloat16 and half are added up in float
/// and rounded once; they travel in 16 bits.
///
/// Wrong arguments throw c10::Error at the call. Later errors are thrown by `wait`, and name rank
/// and collective. After a time-out or an error of MPI the group refuses further calls: let the
/// process end, and begin again from a checkpoint. The backend communicates on a duplicate of
/// `communicator`. For a subgroup make a backend of a communicator that MPI_Comm_split returns.
class MpiBackend final : public c10d::Backend {
 public:
  /// All ranks of `communicator` call this together.
  /// \throws c10::Error if MPI is not initialised with MPI_THREAD_MULTIPLE, or for a time-out that
  ///   is not positive
  explicit MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options = {});
  /// Does the collectives that are under way, unless an exception ends the backend's scope.
  ~MpiBackend() override;

  /// Returns "mpi".
  const std::string getBackendName() const override { return "mpi"; }

  /// One collective under way.
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Each rank's tensor becomes the reduction of all ranks'. Takes one tensor.
  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override;
  /// Each rank's tensor becomes the root's. Takes one tensor.
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override;
  /// `outputs[0]`, a tensor a rank, becomes the ranks' `inputs[0]`.
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options = {}) override;
  /// `output` becomes the inputs in the order of the ranks. `input` may be a part of `output`.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options = {}) override;
  /// The work is done when all ranks have called it.
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  struct Operation {
    c10::intrusive_ptr<detail::MpiWork> work;
    std::function<void()> run;
  };

  WorkPtr launch(std::string call, std::vector<at::Tensor> results, std::function<void()> run);
  void work_until_closed();
  void perform(const Operation& operation);
  void meet(const detail::MpiWork& work);
  void check_usable(const detail::MpiWork& work) const;
  std::string checked_call(const std::string& collective, const at::Tensor& tensor) const;
  void gather(const at::Tensor& own, const at::Tensor& all) const;
  void all_reduce_low_precision(const at::Tensor& flat, c10d::ReduceOp::RedOpType reduction) const;

  MPI_Comm communicator_;
  std::chrono::milliseconds timeout_;
  int exceptions_;
  std::thread thread_;
  int64_t calls_ = 0;  // of the thread

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  std::string broken_;  // why the group refuses calls; empty: it does not
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_backend_impl.h>  // IWYU pragma: export
