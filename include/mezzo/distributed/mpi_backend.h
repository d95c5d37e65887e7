/// \file
/// MPI as a backend of libtorch's c10d, for tensors on the CPU. Part of the target mezzo::mpi.
#pragma once

#if !__has_include(<mpi.h>)
#error "this header needs MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
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
#include <array>
#include <bit>
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
namespace detail {

/// Returns what `ask`, MPI_Initialized or MPI_Finalized, says.
inline bool get_mpi_flag(int (*ask)(int*)) {
  int flag = 0;
  ask(&flag);
  return flag != 0;
}

/// Throws where an MPI call failed, with MPI's words.
inline void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  std::string words(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, words.data(), &length);
  words.resize(static_cast<std::size_t>(length));
  TORCH_CHECK(false, function, " failed: ", words);
}

/// Returns what `ask`, MPI_Comm_rank or MPI_Comm_size, says of `communicator`.
inline int query_communicator(MPI_Comm communicator, int (*ask)(MPI_Comm, int*)) {
  TORCH_CHECK(get_mpi_flag(&MPI_Initialized) && !get_mpi_flag(&MPI_Finalized),
              "MpiBackend: MPI is not initialised; put a mezzo::MpiEnvironment before it");
  TORCH_CHECK(communicator != MPI_COMM_NULL,
              "MpiBackend: `communicator` is MPI_COMM_NULL: this process is not one of its ranks; "
              "make the backend on the ranks alone");
  int number = 0;
  check_mpi(ask(communicator, &number), "MPI_Comm_rank or MPI_Comm_size");
  return number;
}

/// Returns MPI's operation for a reduction of tensors of `dtype`; for an average, the sum.
inline MPI_Op to_mpi_op(at::ScalarType dtype, c10d::ReduceOp::RedOpType reduction) {
  if (reduction == c10d::ReduceOp::MAX) return dtype == at::kBool ? MPI_LOR : MPI_MAX;
  if (reduction == c10d::ReduceOp::MIN) return dtype == at::kBool ? MPI_LAND : MPI_MIN;
  return MPI_SUM;
}

/// Returns MPI's type of `dtype`, for reductions.
inline MPI_Datatype to_mpi_datatype(at::ScalarType dtype) {
  const std::pair<at::ScalarType, MPI_Datatype> types[] = {
      {at::kBool, MPI_C_BOOL},   {at::kByte, MPI_UINT8_T}, {at::kChar, MPI_INT8_T},
      {at::kShort, MPI_INT16_T}, {at::kInt, MPI_INT32_T},  {at::kLong, MPI_INT64_T},
      {at::kFloat, MPI_FLOAT},   {at::kDouble, MPI_DOUBLE}};
  for (const auto& [of, type] : types) {
    if (of == dtype) return type;
  }
  return MPI_DATATYPE_NULL;
}

/// Returns MPI's type of an element that is only moved, of 1 to 16 bytes.
inline MPI_Datatype get_opaque_datatype(const at::Tensor& tensor) {
  const std::array<MPI_Datatype, 5> types = {MPI_UINT8_T, MPI_UINT16_T, MPI_UINT32_T, MPI_UINT64_T,
                                             MPI_C_DOUBLE_COMPLEX};
  return types.at(static_cast<std::size_t>(
      std::countr_zero(static_cast<std::uint64_t>(tensor.element_size()))));
}

/// One collective of an MpiBackend.
class MpiWork final : public c10d::Work {
 public:
  /// `call` is what ranks compare: the collective, the number of elements that go in, their dtype.
  MpiWork(std::string call, int rank, int size, std::vector<at::Tensor> results)
      : Work(rank),
        call_(std::move(call)),
        name_(c10::str(call_, " on rank ", rank, " of ", size)),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {}  // tensors are on the CPU

  const std::string& call() const noexcept { return call_; }
  /// Returns the call, with the rank that made it.
  const std::string& name() const noexcept { return name_; }

  /// Called once, by the thread that does the collective.
  void complete(const std::exception_ptr& error) {
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  std::string call_, name_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

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
  MpiEnvironment() : exceptions_(std::uncaught_exceptions()) {
    TORCH_CHECK(!detail::get_mpi_flag(&MPI_Finalized),
                "MpiEnvironment: MPI has been finalised in this process and cannot be initialised "
                "again; keep one MpiEnvironment for as long as main runs");
    if (detail::get_mpi_flag(&MPI_Initialized)) return;
    int provided = MPI_THREAD_SINGLE;
    detail::check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
                      "MPI_Init_thread");
    owns_mpi_ = true;
    if (provided < MPI_THREAD_MULTIPLE) {
      MPI_Finalize();
      TORCH_CHECK(false,
                  "MpiEnvironment: this MPI library has no MPI_THREAD_MULTIPLE; use a library "
                  "that is built with threads");
    }
  }

  ~MpiEnvironment() {
    const bool is_unwinding = std::uncaught_exceptions() > exceptions_;
    if (owns_mpi_ && !is_unwinding && !detail::get_mpi_flag(&MPI_Finalized)) MPI_Finalize();
  }

  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Returns whether this object initialised MPI.
  bool owns_mpi() const noexcept { return owns_mpi_; }

 private:
  bool owns_mpi_ = false;
  int exceptions_;
};

/// Options of MpiBackend.
struct MpiBackendOptions {
  /// The longest time that a rank waits for the others to call a collective. The time must exceed
  /// whatever one rank does alone while the others wait: a checkpoint, an evaluation.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// A c10d backend of the ranks of an MPI communicator. DistributedDataParallel and the other
/// classes of mezzo take it, and so does any libtorch program, directly or through a ProcessGroup:
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
  explicit MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options = {})
      : Backend(detail::query_communicator(communicator, &MPI_Comm_rank),
                detail::query_communicator(communicator, &MPI_Comm_size)),
        timeout_(options.timeout),
        exceptions_(std::uncaught_exceptions()) {
    TORCH_CHECK(timeout_.count() > 0, "MpiBackend: `timeout` must be positive, but is ",
                timeout_.count(), " ms");
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    TORCH_CHECK(
        level >= MPI_THREAD_MULTIPLE,
        "MpiBackend: it calls MPI in a thread of its own, for which MPI was not initialised; "
        "call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to "
        "mezzo::MpiEnvironment");
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

  /// Does the collectives that are under way, unless an exception ends the backend's scope.
  ~MpiBackend() override {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
      is_abandoned_ = std::uncaught_exceptions() > exceptions_;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id()) {
      // A callback of a work's future held the last reference to this backend.
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

  /// Returns "mpi".
  const std::string getBackendName() const override { return "mpi"; }

  /// One collective under way.
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Each rank's tensor becomes the reduction of all ranks'. Takes one tensor.
  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override {
    using c10d::ReduceOp;
    const ReduceOp::RedOpType reduction = options.reduceOp;
    const char* const words = reduction == ReduceOp::SUM   ? "sum"
                              : reduction == ReduceOp::AVG ? "average"
                              : reduction == ReduceOp::MIN ? "min"
                                                           : "max";
    TORCH_CHECK(tensors.size() == 1, "all_reduce on rank ", rank_, ": MPI takes one tensor, not ",
                tensors.size());
    std::string call = check_and_describe_call(c10::str("all_reduce(", words, ")"), tensors[0]);
    const at::ScalarType dtype = tensors[0].scalar_type();
    const bool is_low = detail::is_low_precision(tensors[0]);
    const bool is_extremum = reduction == ReduceOp::MIN || reduction == ReduceOp::MAX;
    const bool is_sum =
        reduction == ReduceOp::SUM || (reduction == ReduceOp::AVG && at::isFloatingType(dtype));
    TORCH_CHECK(
        (is_low || detail::to_mpi_datatype(dtype) != MPI_DATATYPE_NULL) &&
            (is_extremum || (is_sum && dtype != at::kBool)),
        "all_reduce on rank ", rank_, ": ", dtype,
        " cannot be reduced so; MPI has sums, minima and maxima of real numbers, averages of "
        "floating dtypes, and minima and maxima of bools");
    return enqueue(std::move(call), tensors,
                   [this, flat = tensors[0].detach().view({-1}), reduction, is_low] {
                     if (is_low) return all_reduce_low_precision(flat, reduction);
                     const at::ScalarType of = flat.scalar_type();
                     detail::check_mpi(
                         MPI_Allreduce(MPI_IN_PLACE, flat.mutable_data_ptr(),
                                       static_cast<int>(flat.numel()), detail::to_mpi_datatype(of),
                                       detail::to_mpi_op(of, reduction), communicator_),
                         "MPI_Allreduce");
                     if (reduction == ReduceOp::AVG) flat.div_(size_);
                   });
  }

  /// Each rank's tensor becomes the root's. Takes one tensor.
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override {
    const int root = static_cast<int>(options.rootRank);
    TORCH_CHECK(tensors.size() == 1 && root >= 0 && root < size_, "broadcast on rank ", rank_,
                ": MPI takes one tensor and a `rootRank` from 0 to ", size_ - 1, ", not ",
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

  /// `output` becomes the inputs in the order of the ranks. `input` may be a part of `output`.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/ = {}) override {
    std::string call = check_and_describe_call("all_gather", input);
    TORCH_CHECK(output.is_cpu() && output.is_contiguous() &&
                    output.scalar_type() == input.scalar_type() &&
                    output.numel() == input.numel() * size_,
                call, " on rank ", rank_,
                ": `output` must be contiguous, on the CPU, of the dtype of `input` and ", size_,
                " times as long, but is ", detail::describe(output));
    const at::Tensor own = input.is_alias_of(output) ? input.detach().clone() : input.detach();
    return enqueue(std::move(call), {output},
                   [this, own, all = output.detach()] { gather(own, all); });
  }

  /// The work is done when all ranks have called it.
  WorkPtr barrier(const c10d::BarrierOptions& /*options*/ = {}) override {
    return enqueue("barrier", {},
                   [this] { detail::check_mpi(MPI_Barrier(communicator_), "MPI_Barrier"); });
  }

 private:
  struct Operation {
    c10::intrusive_ptr<detail::MpiWork> work;
    std::function<void()> run;
  };

  /// Queues a collective; `run` does it, in the thread.
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

  /// Waits for a collective, and does it. Returns whether it did; else the backend is closed, and
  /// nothing is queued. A callback of its work may end the backend.
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
    operation.run = nullptr;  // lets go of the tensors before a waiting thread goes on
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
      const std::string words = operation.work->name() + ": " + error.what_without_backtrace();
      const std::lock_guard lock(mutex_);
      failure_ = words;
      TORCH_CHECK(false, words);
    }
    TORCH_CHECK(difference.empty(), operation.work->name(), ": ", difference);  // all stay in step
  }

  /// Returns when all ranks have called a collective, how their calls differ; empty: they do not.
  /// They announce it by a small non-blocking all-gather, look for its end now and then, and sleep
  /// meanwhile: in a blocking call of MPI, which is faster, a rank that waits would keep a core
  /// busy. All ranks read the same announcements, so that all throw where they differ, or none.
  std::string verify_collective(const detail::MpiWork& work) {
    constexpr int kBytes = 64;  // for the longest call
    // This rank's announcement stands behind those of all.
    auto announced = std::make_unique<std::vector<char>>(kBytes * (std::size_t(size_) + 1));
    char* const all = announced->data();
    char* const own = all + std::ptrdiff_t{kBytes} * size_;
    work.call().copy(own, kBytes - 1);
    ++calls_;
    MPI_Request request = MPI_REQUEST_NULL;
    detail::check_mpi(
        MPI_Iallgather(own, kBytes, MPI_BYTE, all, kBytes, MPI_BYTE, communicator_, &request),
        "MPI_Iallgather of the call");
    const auto give_up = [&announced](const auto&... words) {
      static_cast<void>(announced.release());  // MPI may still write there
      TORCH_CHECK(false, words...);
    };
    // Ranks in step come within microseconds.
    constexpr int kYields = 200;
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
        if (is_abandoned_) give_up("an exception has ended the backend's scope on this rank");
      }
      if (std::chrono::steady_clock::now() > deadline) {
        give_up("not all ranks have called it within ", timeout_.count(),
                " ms: see what the others say (one has thrown, has fewer batches or waits "
                "elsewhere), or raise MpiBackendOptions::timeout");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(160));
    }
    const std::string first = all;
    for (int rank = 1; rank < size_; ++rank) {
      const std::string other = all + std::ptrdiff_t{kBytes} * rank;
      if (other == first) continue;
      return c10::str("rank ", rank, " called ", other, " where rank 0 called ", first,
                      " (collective number ", calls_,
                      " of this group); every rank must make the same calls in the same order");
    }
    return {};
  }

  void check_usable(const detail::MpiWork& work) const {
    TORCH_CHECK(failure_.empty(), work.name(),
                ": this group failed earlier, and its ranks are no longer in step: ", failure_);
    TORCH_CHECK(!detail::get_mpi_flag(&MPI_Finalized), work.name(),
                ": MPI has been finalised; let the MpiEnvironment outlive its groups");
  }

  /// Returns the call as ranks compare it. Throws for a tensor that MPI cannot move.
  std::string check_and_describe_call(const std::string& collective,
                                      const at::Tensor& tensor) const {
    TORCH_CHECK(
        tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
            tensor.is_contiguous() && tensor.numel() <= std::numeric_limits<int>::max(),
        collective, " on rank ", rank_,
        ": a tensor must be dense, contiguous and on the CPU, with fewer than 2^31 elements, "
        "but is ",
        detail::describe(tensor), "; pass tensor.contiguous(), or a part at a time");
    return c10::str(collective, " of ", tensor.numel(), " ", c10::toString(tensor.scalar_type()));
  }

  /// `all` becomes the ranks' `own`.
  void gather(const at::Tensor& own, const at::Tensor& all) const {
    const int count = static_cast<int>(own.numel());
    MPI_Datatype bits = detail::get_opaque_datatype(own);
    detail::check_mpi(MPI_Allgather(own.const_data_ptr(), count, bits, all.mutable_data_ptr(),
                                    count, bits, communicator_),
                      "MPI_Allgather");
  }

  /// Each rank reduces its part of `flat` in float, rounds it once and gives it to all.
  void all_reduce_low_precision(const at::Tensor& flat, c10d::ReduceOp::RedOpType reduction) const {
    const int part = static_cast<int>((flat.numel() + size_ - 1) / size_);
    const at::Tensor parts = at::zeros({size_, part}, flat.options());
    const at::Tensor received = at::empty_like(parts);
    parts.view({-1}).narrow(0, 0, flat.numel()).copy_(flat);
    detail::check_mpi(MPI_Alltoall(parts.const_data_ptr(), part, MPI_UINT16_T,
                                   received.mutable_data_ptr(), part, MPI_UINT16_T, communicator_),
                      "MPI_Alltoall");
    at::Tensor own = received[0].to(at::kFloat);
    for (int64_t rank = 1; rank < size_; ++rank) {  // in the order of the ranks
      const at::Tensor next = received[rank].to(at::kFloat);
      own = reduction == c10d::ReduceOp::MAX   ? own.maximum(next)
            : reduction == c10d::ReduceOp::MIN ? own.minimum(next)
                                               : own.add_(next);
    }
    if (reduction == c10d::ReduceOp::AVG) own.div_(size_);
    own = own.to(flat.scalar_type());
    gather(own, parts);
    flat.copy_(parts.view({-1}).narrow(0, 0, flat.numel()));
  }

  MPI_Comm communicator_;
  std::chrono::milliseconds timeout_;
  int exceptions_;
  std::thread thread_;
  int64_t calls_ = 0;             // of the thread
  bool* is_destroyed_ = nullptr;  // the thread's: whether this backend has ended in it

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  std::string failure_;  // why the group refuses calls; empty: it does not
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
