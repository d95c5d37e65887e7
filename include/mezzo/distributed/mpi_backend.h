/// \file
/// MpiBackend: MPI as c10d backend, for CPU tensors. Part of the target mezzo::mpi.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/mpi_calls.h>
#include <mezzo/distributed/detail/mpi_work.h>
#include <mezzo/distributed/mpi_environment.h>  // IWYU pragma: export

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of MpiBackend.
struct MpiBackendOptions {
  /// How long a rank waits for the others to call a collective. Must exceed the time that one rank
  /// spends alone while others wait, for example in a checkpoint or an evaluation.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// c10d backend over an MPI communicator. Pass it to DistributedDataParallel and the other classes
/// of mezzo, or use it in any libtorch program, directly or through a ProcessGroup:
///
/// \code
///   auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
///   group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::MPI, world);
///   group->setDefaultBackend(c10d::ProcessGroup::BackendType::MPI);
/// \endcode
///
/// All ranks must make the same calls in the same order, with tensors of the same dtype and size.
/// Thread-safe. Ranks compare their calls before data moves: if they differ, all ranks get an error
/// that names two of them, and the backend remains usable. Calls are asynchronous; the backend's
/// thread runs one collective after another. Wait for a collective before accessing its tensors.
///
/// Tensors must be dense, contiguous, on the CPU, and have fewer than 2^31 elements. Reductions are
/// SUM, AVG (of floating-point dtypes: the sum, divided), MIN and MAX. bfloat16 and float16 are
/// accumulated in float32 and rounded once, and transferred as 16-bit values.
///
/// Invalid arguments throw c10::Error at the call; `wait` throws later errors, which name rank and
/// collective. After a timeout or an MPI error the backend rejects further calls: let the process
/// terminate, and restart from a checkpoint. The backend duplicates the communicator. For a
/// subgroup pass a communicator that MPI_Comm_split returns.
class MpiBackend final : public c10d::Backend {
 public:
  /// Collective call of all ranks of `communicator`.
  /// \throws c10::Error if MPI is not initialized with MPI_THREAD_MULTIPLE, or the timeout is not
  ///   positive
  explicit MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options = {})
      : Backend(detail::query_communicator(communicator, &MPI_Comm_rank),
                detail::query_communicator(communicator, &MPI_Comm_size)),
        timeout_(options.timeout),
        uncaught_exceptions_(std::uncaught_exceptions()) {
    TORCH_CHECK(timeout_.count() > 0, "MpiBackend: `timeout` must be positive, but is ",
                timeout_.count(), " ms");
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    TORCH_CHECK(level >= MPI_THREAD_MULTIPLE,
                "MpiBackend: MPI is called from a separate thread, but was not initialized for it; "
                "call MPI_Init_thread with MPI_THREAD_MULTIPLE, or use mezzo::MpiEnvironment");
    detail::check_mpi(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
    detail::check_mpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN),
                      "MPI_Comm_set_errhandler");
    thread_ = std::thread([this] {
      const c10::NoGradGuard no_grad;
      bool is_destroyed = false;
      is_destroyed_ = &is_destroyed;
      while (!is_destroyed && run_next()) continue;
    });
  }

  /// Completes pending collectives, except during stack unwinding.
  ~MpiBackend() override {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
      is_abandoned_ = std::uncaught_exceptions() > uncaught_exceptions_;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) {
      // A callback of a future held the last reference to this backend.
      while (run_next()) continue;
      *is_destroyed_ = true;
      thread_.detach();
    } else {
      thread_.join();
    }
    if (failure_.empty() && !is_abandoned_ && !detail::get_mpi_flag(&MPI_Finalized)) {
      MPI_Comm_free(&communicator_);
    }
  }

  const std::string getBackendName() const override { return "mpi"; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Reduces one tensor in place.
  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override {
    using c10d::ReduceOp;
    const ReduceOp::RedOpType reduction = options.reduceOp;
    const char* const name = reduction == ReduceOp::SUM   ? "sum"
                             : reduction == ReduceOp::AVG ? "average"
                             : reduction == ReduceOp::MIN ? "min"
                                                          : "max";
    TORCH_CHECK(tensors.size() == 1, "all_reduce on rank ", rank_, ": expected one tensor, got ",
                tensors.size());
    std::string call = check_and_describe_call(c10::str("all_reduce(", name, ")"), tensors[0]);
    const at::ScalarType dtype = tensors[0].scalar_type();
    const bool is_low = detail::is_low_precision(tensors[0]);
    const bool is_extremum = reduction == ReduceOp::MIN || reduction == ReduceOp::MAX;
    const bool is_sum =
        reduction == ReduceOp::SUM || (reduction == ReduceOp::AVG && at::isFloatingType(dtype));
    TORCH_CHECK(
        (is_low || detail::to_mpi_datatype(dtype) != MPI_DATATYPE_NULL) &&
            (is_extremum || (is_sum && dtype != at::kBool)),
        "all_reduce on rank ", rank_, ": ", dtype,
        " does not support this reduction; supported are sums, minima and maxima of real numbers, "
        "averages of floating-point dtypes, and minima and maxima of bools");
    return enqueue(
        std::move(call), tensors, [this, flat = tensors[0].detach().view({-1}), reduction, is_low] {
          if (is_low) return all_reduce_low_precision(flat, reduction);
          const at::ScalarType scalar_type = flat.scalar_type();
          detail::check_mpi(
              MPI_Allreduce(MPI_IN_PLACE, flat.mutable_data_ptr(), static_cast<int>(flat.numel()),
                            detail::to_mpi_datatype(scalar_type),
                            detail::to_mpi_op(scalar_type, reduction), communicator_),
              "MPI_Allreduce");
          if (reduction == ReduceOp::AVG) flat.div_(size_);
        });
  }

  /// Broadcasts one tensor in place.
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override {
    const int root = static_cast<int>(options.rootRank);
    TORCH_CHECK(tensors.size() == 1 && root >= 0 && root < size_, "broadcast on rank ", rank_,
                ": expected one tensor and a `rootRank` from 0 to ", size_ - 1, ", got ",
                tensors.size(), " and ", root);
    return enqueue(check_and_describe_call(c10::str("broadcast from rank ", root), tensors[0]),
                   root == rank_ ? std::vector<at::Tensor>() : tensors,
                   [this, tensor = tensors[0].detach(), root] {
                     detail::check_mpi(
                         MPI_Bcast(tensor.mutable_data_ptr(), static_cast<int>(tensor.numel()),
                                   detail::get_opaque_datatype(tensor), root, communicator_),
                         "MPI_Bcast");
                   });
  }

  /// Gathers the inputs of all ranks in `output`, in rank order. `input` may alias `output`.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/ = {}) override {
    std::string call = check_and_describe_call("all_gather", input);
    TORCH_CHECK(output.is_cpu() && output.is_contiguous() &&
                    output.scalar_type() == input.scalar_type() &&
                    output.numel() == input.numel() * size_,
                call, " on rank ", rank_,
                ": `output` must be contiguous, on the CPU, of the dtype of `input` and ", size_,
                " times its size, but is ", detail::describe(output));
    const at::Tensor source = input.is_alias_of(output) ? input.detach().clone() : input.detach();
    return enqueue(std::move(call), {output},
                   [this, source, all = output.detach()] { all_gather(source, all); });
  }

  /// Completes when all ranks have called it.
  WorkPtr barrier(const c10d::BarrierOptions& /*options*/ = {}) override {
    return enqueue("barrier", {},
                   [this] { detail::check_mpi(MPI_Barrier(communicator_), "MPI_Barrier"); });
  }

 private:
  struct Operation {
    c10::intrusive_ptr<detail::MpiWork> work;
    std::function<void()> run;
  };

  /// Queues a collective, which `run` executes on the thread.
  WorkPtr enqueue(std::string call, std::vector<at::Tensor> results, std::function<void()> run) {
    for (const at::Tensor& result : results) {
      if (!result.is_inference()) result.unsafeGetTensorImpl()->bump_version();
    }
    auto work =
        c10::make_intrusive<detail::MpiWork>(std::move(call), rank_, size_, std::move(results));
    const std::lock_guard lock(mutex_);
    check_usable(*work);
    queue_.push_back({work, std::move(run)});
    changed_.notify_all();
    return work;
  }

  /// Waits for a queued collective and executes it. Returns false if the backend is closed and the
  /// queue is empty. A callback of the work's future may destroy the backend.
  bool run_next() {
    Operation operation;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
      if (queue_.empty()) return false;
      operation = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error;
    try {
      execute(operation);
    } catch (...) {
      error = std::current_exception();
    }
    operation.run = nullptr;  // releases the tensors before waiting threads continue
    operation.work->complete(error);
    return true;
  }

  void execute(const Operation& operation) {
    {
      const std::lock_guard lock(mutex_);
      check_usable(*operation.work);
    }
    std::string difference;
    try {
      difference = verify_collective(*operation.work);
      if (difference.empty()) operation.run();
    } catch (const c10::Error& error) {
      const std::string message = operation.work->name() + ": " + error.what_without_backtrace();
      const std::lock_guard lock(mutex_);
      failure_ = message;
      TORCH_CHECK(false, message);
    }
    TORCH_CHECK(difference.empty(), operation.work->name(), ": ", difference);  // on all ranks
  }

  /// Waits until all ranks have called a collective, and returns how their calls differ, or an
  /// empty string. Ranks exchange descriptions of their calls in a small non-blocking all-gather,
  /// and poll for its completion, because blocking MPI calls, although faster, busy-wait. All ranks
  /// compare the same descriptions, so either all throw or none.
  std::string verify_collective(const detail::MpiWork& work) {
    constexpr int kCallBytes = 64;  // for the longest call
    // The calls of all ranks, followed by this rank's.
    auto calls = std::make_unique<std::vector<char>>(kCallBytes * (std::size_t(size_) + 1));
    char* const all_calls = calls->data();
    char* const own_call = all_calls + std::ptrdiff_t{kCallBytes} * size_;
    work.call().copy(own_call, kCallBytes - 1);
    ++num_calls_;
    MPI_Request request = MPI_REQUEST_NULL;
    detail::check_mpi(MPI_Iallgather(own_call, kCallBytes, MPI_BYTE, all_calls, kCallBytes,
                                     MPI_BYTE, communicator_, &request),
                      "MPI_Iallgather of the call");
    const auto give_up = [&calls](const auto&... message) {
      static_cast<void>(calls.release());  // MPI may still write there
      TORCH_CHECK(false, message...);
    };
    constexpr int kYields = 200;  // synchronized ranks arrive within microseconds
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    auto pause = std::chrono::microseconds(10);
    for (int i = 0, done = 0;; ++i) {
      detail::check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done != 0) break;
      if (i < kYields) {
        std::this_thread::yield();
        continue;
      }
      {
        const std::lock_guard lock(mutex_);
        if (is_abandoned_) give_up("an exception destroyed the backend on this rank");
      }
      if (std::chrono::steady_clock::now() > deadline) {
        give_up("not all ranks have called it within ", timeout_.count(),
                " ms: check the output of the other ranks (one threw, has fewer batches or waits "
                "elsewhere), or increase MpiBackendOptions::timeout");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(160));
    }
    const std::string first = all_calls;
    for (int rank = 1; rank < size_; ++rank) {
      const std::string other = all_calls + std::ptrdiff_t{kCallBytes} * rank;
      if (other == first) continue;
      return c10::str("rank ", rank, " called ", other, " where rank 0 called ", first,
                      " (collective number ", num_calls_,
                      " of this backend); all ranks must make the same calls in the same order");
    }
    return {};
  }

  void check_usable(const detail::MpiWork& work) const {
    TORCH_CHECK(failure_.empty(), work.name(),
                ": this backend failed earlier, and its ranks are out of sync: ", failure_);
    TORCH_CHECK(!detail::get_mpi_flag(&MPI_Finalized), work.name(),
                ": MPI has been finalized; the MpiEnvironment must outlive its backends");
  }

  /// Returns the call that ranks compare. Throws for an unsupported tensor.
  std::string check_and_describe_call(const std::string& collective,
                                      const at::Tensor& tensor) const {
    TORCH_CHECK(
        tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
            tensor.is_contiguous() && tensor.numel() <= std::numeric_limits<int>::max(),
        collective, " on rank ", rank_,
        ": a tensor must be dense, contiguous and on the CPU, with fewer than 2^31 elements, "
        "but is ",
        detail::describe(tensor), "; pass tensor.contiguous(), or one chunk at a time");
    return c10::str(collective, " of ", tensor.numel(), " ", c10::toString(tensor.scalar_type()));
  }

  void all_gather(const at::Tensor& source, const at::Tensor& all) const {
    const int numel = static_cast<int>(source.numel());
    MPI_Datatype type = detail::get_opaque_datatype(source);
    detail::check_mpi(MPI_Allgather(source.const_data_ptr(), numel, type, all.mutable_data_ptr(),
                                    numel, type, communicator_),
                      "MPI_Allgather");
  }

  /// Each rank reduces one chunk of `flat` in float32 and rounds it once; an all-gather follows.
  void all_reduce_low_precision(const at::Tensor& flat, c10d::ReduceOp::RedOpType reduction) const {
    const int chunk_numel = static_cast<int>((flat.numel() + size_ - 1) / size_);
    const at::Tensor chunks = at::zeros({size_, chunk_numel}, flat.options());
    const at::Tensor received = at::empty_like(chunks);
    chunks.view({-1}).narrow(0, 0, flat.numel()).copy_(flat);
    detail::check_mpi(
        MPI_Alltoall(chunks.const_data_ptr(), chunk_numel, MPI_UINT16_T,
                     received.mutable_data_ptr(), chunk_numel, MPI_UINT16_T, communicator_),
        "MPI_Alltoall");
    at::Tensor reduced = received[0].to(at::kFloat);
    for (int64_t rank = 1; rank < size_; ++rank) {  // in rank order
      const at::Tensor next = received[rank].to(at::kFloat);
      reduced = reduction == c10d::ReduceOp::MAX   ? reduced.maximum(next)
                : reduction == c10d::ReduceOp::MIN ? reduced.minimum(next)
                                                   : reduced.add_(next);
    }
    if (reduction == c10d::ReduceOp::AVG) reduced.div_(size_);
    reduced = reduced.to(flat.scalar_type());
    all_gather(reduced, chunks);
    flat.copy_(chunks.view({-1}).narrow(0, 0, flat.numel()));
  }

  MPI_Comm communicator_;
  std::chrono::milliseconds timeout_;
  int uncaught_exceptions_;
  std::thread thread_;
  int64_t num_calls_ = 0;         // accessed by the thread only
  bool* is_destroyed_ = nullptr;  // on the thread's stack: set if the thread destroyed this

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  std::string failure_;  // first fatal error, or empty
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
