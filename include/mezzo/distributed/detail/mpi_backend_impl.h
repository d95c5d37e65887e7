#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/distributed/watchdog_options.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool mpi_is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

inline bool mpi_is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

/// Returns MPI's message for an error code.
inline std::string mpi_error_words(int code) {
  std::string words(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, words.data(), &length) != MPI_SUCCESS) {
    return "error code " + std::to_string(code);
  }
  words.resize(static_cast<std::size_t>(length));
  return words;
}

/// Throws where an MPI call failed; `context` names the rank and the collective.
inline void check_mpi(int code, const char* call, const std::string& context) {
  TORCH_CHECK(code == MPI_SUCCESS, context, ": ", call, " failed: ", mpi_error_words(code));
}

/// A reduction that keeps a NaN: MPI_MAX and MPI_MIN may drop one, and on one rank only.
template <class T, bool is_max>
void reduce_keeping_nan(void* in, void* inout, int* length, MPI_Datatype* /*type*/) {
  const T* const given = static_cast<const T*>(in);
  T* const kept = static_cast<T*>(inout);
  for (int i = 0; i < *length; ++i) {
    kept[i] = is_max ? max_or_nan(kept[i], given[i]) : -max_or_nan(-kept[i], -given[i]);
  }
}

/// Returns MPI's operation for a reduction of tensors of `dtype`; for an average, the sum.
inline MPI_Op mpi_op(at::ScalarType dtype, c10d::ReduceOp::RedOpType reduction) {
  struct Ops {
    Ops() {
      MPI_Op_create(reduce_keeping_nan<float, true>, 1, &max_float);
      MPI_Op_create(reduce_keeping_nan<double, true>, 1, &max_double);
      MPI_Op_create(reduce_keeping_nan<float, false>, 1, &min_float);
      MPI_Op_create(reduce_keeping_nan<double, false>, 1, &min_double);
    }
    MPI_Op max_float, max_double, min_float, min_double;
  };
  static const Ops& ops = *new Ops;  // threads may outlive static objects
  const bool is_max = reduction == c10d::ReduceOp::MAX;
  if (!is_max && reduction != c10d::ReduceOp::MIN) return MPI_SUM;
  if (dtype == at::kFloat) return is_max ? ops.max_float : ops.min_float;
  if (dtype == at::kDouble) return is_max ? ops.max_double : ops.min_double;
  if (dtype == at::kBool) return is_max ? MPI_LOR : MPI_LAND;
  return is_max ? MPI_MAX : MPI_MIN;
}

inline MPI_Datatype mpi_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return MPI_C_BOOL;
    case at::kByte:
      return MPI_UINT8_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    default:
      TORCH_INTERNAL_ASSERT(false, "no MPI reduction of ", dtype);
  }
}

/// One collective of an MpiBackend.
class MpiWork final : public c10d::Work {
 public:
  MpiWork(const CollectiveCall& call, int rank, int size, std::vector<at::Tensor> results)
      : Work(rank, call.collective),
        call_(call),
        size_(size),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    std::unique_lock lock(mutex_);
    const auto is_done = [this] { return completed_; };
    if (timeout <= kNoTimeout) {
      cv_.wait(lock, is_done);
    } else {
      TORCH_CHECK(cv_.wait_for(lock, timeout, is_done), name(), ": it is not done after ",
                  in_seconds(timeout));
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  const CollectiveCall& call() const noexcept { return call_; }
  std::string name() const { return call_.name_on(rank_, size_); }

  /// Called once, by the thread that does the collective.
  void end(const std::exception_ptr& error) {
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  CollectiveCall call_;
  int size_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Threads that may still call MPI, for the MpiEnvironment that finalises it.
class MpiThreads {
 public:
  /// Returns the process's object, which shared libraries share and which is never destroyed.
  C10_EXPORT static MpiThreads& all() {
    static MpiThreads& threads = *new MpiThreads;
    return threads;
  }

  /// Whether an MpiEnvironment finalises MPI, and so waits for the threads.
  void set_is_awaited(bool is_awaited) { is_awaited_ = is_awaited; }
  bool is_awaited() const { return is_awaited_; }

  void begin() {
    change([this] { ++count_; });
  }
  void end() {
    change([this] { --count_; });
  }
  /// Called when a thread has done all of its collectives, and waits for the other ranks.
  void begin_leaving() {
    change([this] { ++leaving_; });
  }
  /// Called when that wait ends. `words` say which ranks have not ended; empty: all have.
  void end_leaving(const std::string& words) {
    change([&] {
      --leaving_;
      if (!words.empty()) trouble_ = words;
    });
  }
  /// Names the collective that a thread is in, after its backend has gone.
  void leaves_behind(const std::string& name) {
    change([&] { left_behind_ = name; });
  }

  /// Waits until no thread is left: up to `timeout` for a collective, and without limit for ranks
  /// that have not ended their groups, as MPI_Finalize does. Returns why MPI cannot be finalised;
  /// empty if it can.
  std::string wait_for_end(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto until = std::chrono::steady_clock::now() + timeout;
    const auto has_ended = [this] { return count_ == 0 || !trouble_.empty(); };
    while (!has_ended()) {
      if (count_ == leaving_) {
        changed_.wait(lock);
      } else if (changed_.wait_until(lock, until) == std::cv_status::timeout && !has_ended()) {
        return (left_behind_.empty() ? "a group that still lives" : left_behind_) +
               " is still under way: other ranks have not called it";
      }
    }
    return trouble_;
  }

 private:
  template <class Change>
  void change(const Change& make) {
    const std::lock_guard lock(mutex_);
    make();
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> is_awaited_ = false;
  int count_ = 0;
  int leaving_ = 0;
  std::string left_behind_, trouble_;
};

/// The thread that does one backend's collectives, in the order of their calls.
///
/// MPI's blocking collectives are much faster than its non-blocking ones, for which Open MPI picks
/// simpler algorithms, but a rank that waits in one keeps a core busy. Ranks therefore announce
/// each call by a small non-blocking all-gather, look for its end now and then, and enter the
/// blocking call when all of them have come. The announcements say what is called, and are
/// compared. A rank that ends its group announces that too, so that ranks which call the group once
/// more throw instead of waiting.
class MpiThread : public std::enable_shared_from_this<MpiThread> {
 public:
  MpiThread(MPI_Comm communicator, bool check_calls)
      : exceptions_(std::uncaught_exceptions()), check_calls_(check_calls) {
    const std::string context = "MpiBackend";
    TORCH_CHECK(mpi_is_initialized() && !mpi_is_finalized(),
                "MpiBackend: MPI is not initialised; put a mezzo::MpiEnvironment before it");
    TORCH_CHECK(communicator != MPI_COMM_NULL,
                "MpiBackend: `communicator` is MPI_COMM_NULL: this process is not one of its "
                "ranks; make the backend on the ranks alone");
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread", context);
    TORCH_CHECK(level >= MPI_THREAD_MULTIPLE,
                "MpiBackend: it calls MPI in a thread of its own, for which MPI was not "
                "initialised; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to "
                "mezzo::MpiEnvironment");
    check_mpi(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup", context);
    check_mpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler",
              context);
    check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank", context);
    check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size", context);
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// For calls in this thread.
  MPI_Comm communicator() const noexcept { return communicator_; }

  void start() {
    MpiThreads::all().begin();
    thread_ = std::thread([self = shared_from_this()] {
      self->work_until_closed();
      if (self->leave() && !mpi_is_finalized()) MPI_Comm_free(&self->communicator_);
      {
        const std::lock_guard lock(self->mutex_);
        self->has_ended_ = true;
        self->changed_.notify_all();
      }
      MpiThreads::all().end();
    });
  }

  /// Tells the thread to end after the queued collectives, and does not wait for that. If an
  /// exception ends the backend's scope, the thread gives up, for other ranks may never come.
  void close() {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    is_abandoned_ = std::uncaught_exceptions() > exceptions_;
    changed_.notify_all();
    const bool is_idle = queue_.empty() && current_ == nullptr;
    if (!is_idle) {
      MpiThreads::all().leaves_behind(current_ ? current_->name() : queue_.front().work->name());
    }
    // A thread that calls no MPI ends at once, and one that waits for an announcement soon.
    const auto patience = (is_idle || is_abandoned_) && !MpiThreads::all().is_awaited()
                              ? std::chrono::seconds(10)
                              : std::chrono::seconds(0);
    const bool has_ended = changed_.wait_for(lock, patience, [this] { return has_ended_; });
    lock.unlock();
    has_ended ? thread_.join() : thread_.detach();
  }

  /// Queues a collective; `run` does it, in the thread.
  c10::intrusive_ptr<c10d::Work> launch(const CollectiveCall& call, std::vector<at::Tensor> results,
                                        std::function<void(const std::string& name)> run) {
    auto work = c10::make_intrusive<MpiWork>(call, rank_, size_, std::move(results));
    const std::lock_guard lock(mutex_);
    check_usable(*work);
    queue_.push_back({work, std::move(run)});
    changed_.notify_all();
    return work;
  }

 private:
  struct Operation {
    c10::intrusive_ptr<MpiWork> work;
    std::function<void(const std::string& name)> run;
  };
  struct GivenUp {};

  void check_usable(const MpiWork& work) const {
    TORCH_CHECK(
        broken_words_.empty(), work.name(),
        ": this group failed earlier, and its ranks are no longer in step: ", broken_words_);
    TORCH_CHECK(!mpi_is_finalized(), work.name(),
                ": MPI has been finalised; let the MpiEnvironment outlive its groups");
  }

  void work_until_closed() {
    const c10::NoGradGuard no_grad;
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
      if (queue_.empty() || is_abandoned_) return;
      Operation operation = std::move(queue_.front());
      queue_.pop_front();
      current_ = operation.work;
      lock.unlock();
      std::exception_ptr error;
      try {
        perform(operation);
      } catch (const GivenUp&) {
        return;
      } catch (...) {
        error = std::current_exception();
      }
      operation.run = nullptr;  // lets go of the tensors before a waiting thread goes on
      lock.lock();
      current_ = nullptr;
      lock.unlock();
      operation.work->end(error);
    }
  }

  void perform(const Operation& operation) {
    if (!broken_words_.empty()) check_usable(*operation.work);
    bool is_comparing = false;  // an error then leaves the ranks in step, if all are there
    try {
      if (check_calls_) {
        announce(*operation.work);
        is_comparing = true;
        compare(*operation.work);
        is_comparing = false;
      }
      operation.run(operation.work->name());
    } catch (const c10::Error& error) {
      if (!is_comparing || has_lost_ranks_) break_down(error);
      throw;
    }
  }

  /// Announces that this rank has ended the group, and waits until all have, which may take until
  /// the MpiEnvironment ends. Announces nothing if the program has initialised MPI, for nothing
  /// would wait for this thread before MPI is finalised. Returns whether the communicator can be
  /// freed.
  bool leave() {
    MpiThreads& threads = MpiThreads::all();
    if (has_given_up_ || !broken_words_.empty()) return false;
    if (!check_calls_ || !threads.is_awaited()) return !is_abandoned_;
    threads.begin_leaving();
    std::string words;
    try {
      const MpiWork end(c10d::OpType::UNKNOWN, rank_, size_, {});
      announce(end);
      compare(end);
    } catch (const c10::Error& error) {
      words = error.what_without_backtrace();
    }
    threads.end_leaving(words);
    return words.empty();
  }

  void break_down(const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    const std::lock_guard lock(mutex_);
    broken_words_ = words.substr(0, words.find('\n'));
  }

  /// Returns when all ranks have called a collective, with what each of them called.
  void announce(const MpiWork& work) {
    const CollectiveCall& call = work.call();
    own_ = {static_cast<int64_t>(call.collective),
            static_cast<int64_t>(call.dtype),
            call.numel,
            static_cast<int64_t>(call.reduction),
            call.root,
            ++calls_};
    all_.resize(own_.size() * static_cast<std::size_t>(size_));
    const int words = static_cast<int>(own_.size());
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallgather(own_.data(), words, MPI_INT64_T, all_.data(), words, MPI_INT64_T,
                             communicator_, &request),
              "MPI_Iallgather of the call", work.name());
    // Ranks in step come within microseconds; a rank that waits for longer leaves its core to
    // others.
    constexpr int kYields = 200;
    auto pause = std::chrono::microseconds(10);
    for (int i = 0, done = 0;; ++i) {
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test", work.name());
      if (done != 0) return;
      if (i < kYields) {
        std::this_thread::yield();
        continue;
      }
      const bool is_end = call.collective == c10d::OpType::UNKNOWN;
      if (!is_end) give_up_if_abandoned();
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(is_end ? 5000 : 160));
    }
  }

  void give_up_if_abandoned() {
    const std::lock_guard lock(mutex_);
    if (!is_abandoned_) return;
    has_given_up_ = true;
    [[maybe_unused]] const auto* kept = new std::shared_ptr<MpiThread>(shared_from_this());
    throw GivenUp();  // MPI may still write to `all_`, which is never freed
  }

  /// Every rank reads the same announcements, so all throw or none does, and the next calls match.
  void compare(const MpiWork& work) {
    const auto call_of = [&](int rank) {
      const int64_t* const words = all_.data() + std::ptrdiff_t{6} * rank;
      CollectiveCall call(static_cast<c10d::OpType>(words[0]));
      call.dtype = static_cast<at::ScalarType>(words[1]);
      call.numel = words[2];
      call.reduction = static_cast<c10d::ReduceOp::RedOpType>(words[3]);
      call.root = static_cast<int>(words[4]);
      return call;
    };
    const CollectiveCall first = call_of(0);
    for (int rank = 1; rank < size_; ++rank) {
      const CollectiveCall other = call_of(rank);
      if (is_end_of(other) != is_end_of(first)) has_lost_ranks_ = true;
      TORCH_CHECK(other == first, work.name(), ": rank ", rank, " called ", other.name(),
                  " where rank 0 called ", first.name(), " (collective number ", calls_,
                  " of this group); every rank must make the same calls in the same order",
                  is_end_of(other) || is_end_of(first)
                      ? ", and as many: has a rank fewer batches, or thrown?"
                      : "");
    }
  }

  static bool is_end_of(const CollectiveCall& call) {
    return call.collective == c10d::OpType::UNKNOWN;
  }

  int rank_ = 0;
  int size_ = 0;
  int exceptions_;
  bool check_calls_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::thread thread_;

  // The thread's
  int64_t calls_ = 0;
  bool has_lost_ranks_ = false;   ///< some have ended the group
  bool has_given_up_ = false;     ///< left an announcement under way
  std::array<int64_t, 6> own_{};  ///< the announcement of this rank
  std::vector<int64_t> all_;      ///< of all ranks

  mutable std::mutex mutex_;  // what follows
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  c10::intrusive_ptr<MpiWork> current_;  ///< null: the thread is idle
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  bool has_ended_ = false;
  std::string broken_words_;  ///< written by the thread alone
};

/// `numel` elements as equal as can be among the ranks, in the form of MPI's v-collectives.
struct MpiShares {
  MpiShares(int64_t numel, int ranks) {
    int begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      counts.push_back(static_cast<int>(numel / ranks + (rank < numel % ranks ? 1 : 0)));
      offsets.push_back(begin);
      begin += counts.back();
    }
  }
  std::vector<int> counts;
  std::vector<int> offsets;
};

/// Some columns of `rows`, which has a row for each rank, as one block of memory: the columns' own
/// memory if that is one block, otherwise a copy.
struct MpiColumns {
  MpiColumns(const at::Tensor& rows, int64_t begin, int64_t length)
      : columns(rows.narrow(1, begin, length)), block(columns.contiguous()) {}

  int row_bytes() const { return static_cast<int>(columns.size(1) * columns.element_size()); }
  void put_back() const {
    if (!block.is_alias_of(columns)) columns.copy_(block);
  }

  at::Tensor columns, block;
};

/// Checks the arguments of one call; errors name the collective and the rank.
class MpiArguments {
 public:
  MpiArguments(const char* collective, const c10d::Backend& group)
      : collective_(collective), rank_(group.getRank()), size_(group.getSize()) {}

  const at::Tensor& one(const std::vector<at::Tensor>& tensors) const {
    TORCH_CHECK(tensors.size() == 1, collective_, " on rank ", rank_,
                ": takes one tensor, but was given ", tensors.size());
    return tensors[0];
  }

  void check(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.defined(), collective_, " on rank ", rank_, ": `", argument,
                "` is undefined; give it a value before the call, on every rank");
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
                    tensor.is_contiguous(),
                collective_, " on rank ", rank_, ": `", argument,
                "` must be a dense and contiguous tensor, but is ", tensor_words(tensor),
                " with strides ",
                tensor.layout() == at::kStrided ? tensor.strides() : at::IntArrayRef(),
                "; give tensor.to_dense(), contiguous(), resolve_conj() or resolve_neg()");
    TORCH_CHECK(tensor.is_cpu(), collective_, " on rank ", rank_, ": `", argument, "` is on ",
                tensor.device(), ", and MPI takes tensors on the CPU; move it there");
  }

  /// Throws unless `whole` has a part like `part` for each rank.
  void check_parts(const char* whole_name, const at::Tensor& whole, const char* part_name,
                   const at::Tensor& part) const {
    check(whole_name, whole);
    check(part_name, part);
    TORCH_CHECK(whole.scalar_type() == part.scalar_type(), collective_, " on rank ", rank_, ": `",
                whole_name, "` is ", whole.scalar_type(), " and `", part_name, "` ",
                part.scalar_type(), "; they must be of one dtype");
    TORCH_CHECK(whole.numel() == part.numel() * size_, collective_, " on rank ", rank_, ": `",
                whole_name, "` must have ", size_, " times the ", part.numel(), " elements of `",
                part_name, "`, one part a rank, but has ", whole.numel(),
                "; size it by group->getSize()");
  }

  void check_root(int64_t root) const {
    TORCH_CHECK(root >= 0 && root < size_, collective_, " on rank ", rank_,
                ": `rootRank` must be 0 to ", size_ - 1, ", but is ", root);
  }

  /// Throws where MPI here has no such reduction of the dtype.
  void check_reduction(at::ScalarType dtype, c10d::ReduceOp::RedOpType op) const {
    using c10d::ReduceOp;
    const bool is_extremum = op == ReduceOp::MAX || op == ReduceOp::MIN;
    TORCH_CHECK(is_extremum || op == ReduceOp::SUM || op == ReduceOp::AVG, collective_, " on rank ",
                rank_, ": MPI's reductions here are SUM, AVG, MIN and MAX");
    TORCH_CHECK(dtype != at::kBool || is_extremum, collective_, " on rank ", rank_,
                ": bools have no sum; take MAX for \"or\", or count in int64");
    const bool number = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                        dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar ||
                        dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
    TORCH_CHECK(number || dtype == at::kBool, collective_, " on rank ", rank_, ": ", dtype,
                " cannot be reduced; cast it to float or an integer dtype");
    TORCH_CHECK(op != ReduceOp::AVG || at::isFloatingType(dtype), collective_, " on rank ", rank_,
                ": ", dtype, " has no average; cast it to float, or take SUM and divide");
  }

 private:
  const char* collective_;
  int rank_;
  int size_;
};

/// Each rank reduces its share of `run` in float, rounds it once and gives it to all.
inline void all_reduce_in_float(const at::Tensor& run, c10d::ReduceOp::RedOpType op,
                                const MpiThread& mpi, const std::string& name) {
  const int ranks = mpi.size();
  const auto self = static_cast<std::size_t>(mpi.rank());
  const MpiShares whole(run.numel(), ranks);
  const int own = whole.counts[self];
  const MpiShares rows(int64_t{own} * ranks, ranks);
  const at::Tensor received = at::empty({ranks, own}, run.options());
  check_mpi(MPI_Alltoallv(run.const_data_ptr(), whole.counts.data(), whole.offsets.data(),
                          MPI_UINT16_T, received.mutable_data_ptr(), rows.counts.data(),
                          rows.offsets.data(), MPI_UINT16_T, mpi.communicator()),
            "MPI_Alltoallv", name);
  run.narrow(0, whole.offsets[self], own).copy_(reduce_rows(received, op));
  check_mpi(
      MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, run.mutable_data_ptr(),
                     whole.counts.data(), whole.offsets.data(), MPI_UINT16_T, mpi.communicator()),
      "MPI_Allgatherv", name);
}

}  // namespace detail

inline MpiEnvironment::MpiEnvironment() : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!detail::mpi_is_finalized(),
              "MpiEnvironment: MPI has been finalised in this process and cannot be initialised "
              "again; keep one MpiEnvironment for as long as main runs");
  if (detail::mpi_is_initialized()) return;
  int provided = MPI_THREAD_SINGLE;
  detail::check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
                    "MPI_Init_thread", "MpiEnvironment");
  initialised_it_ = true;
  detail::MpiThreads::all().set_is_awaited(true);
  if (provided < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    TORCH_CHECK(false,
                "MpiEnvironment: this MPI library has no MPI_THREAD_MULTIPLE; use a library "
                "that is built with threads");
  }
}

inline MpiEnvironment::~MpiEnvironment() {
  if (!initialised_it_ || std::uncaught_exceptions() > exceptions_) return;
  if (detail::mpi_is_finalized()) return;
  const std::string trouble = detail::MpiThreads::all().wait_for_end(std::chrono::seconds(30));
  if (!trouble.empty()) {
    std::cerr << "mezzo: MpiEnvironment ends, but " + trouble + ". MPI_Abort ends all ranks\n"
              << std::flush;
    std::this_thread::sleep_for(std::chrono::seconds(2));  // in which they say where they are
    MPI_Abort(MPI_COMM_WORLD, kWatchdogExitStatus);
  }
  MPI_Finalize();
}

inline MpiBackend::MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options)
    : MpiBackend(std::make_shared<detail::MpiThread>(communicator, options.check_calls), options) {}

inline MpiBackend::MpiBackend(std::shared_ptr<detail::MpiThread> thread,
                              const MpiBackendOptions& options)
    : Backend(thread->rank(), thread->size()),
      thread_(std::move(thread)),
      max_bytes_(options.max_bytes) {
  TORCH_CHECK(max_bytes_ >= 1 && max_bytes_ <= int64_t{1} << 30,
              "MpiBackend: `max_bytes` must be 1 to 2^30, but is ", max_bytes_);
  thread_->start();
}

inline MpiBackend::~MpiBackend() { thread_->close(); }

template <class Run>
MpiBackend::WorkPtr MpiBackend::launch(const detail::CollectiveCall& call,
                                       std::vector<at::Tensor> results, int64_t numel,
                                       int64_t bytes_each, Run run) {
  for (const at::Tensor& result : results) detail::note_write(result);
  const int64_t longest = std::max<int64_t>(1, max_bytes_ / bytes_each);
  return thread_->launch(call, std::move(results),
                         [numel, longest, run = std::move(run)](const std::string& name) {
                           for (int64_t begin = 0; begin < numel; begin += longest) {
                             run(begin, std::min(longest, numel - begin), name);
                           }
                         });
}

inline MpiBackend::WorkPtr MpiBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                 const c10d::AllreduceOptions& options) {
  const detail::MpiArguments arguments("all_reduce", *this);
  const at::Tensor tensor = arguments.one(tensors);
  const c10d::ReduceOp::RedOpType op = options.reduceOp;
  arguments.check("tensor", tensor);
  arguments.check_reduction(tensor.scalar_type(), op);
  return launch({c10d::OpType::ALLREDUCE, tensor, op}, tensors, tensor.numel(),
                tensor.element_size(),
                [mpi = thread_.get(), flat = tensor.detach().view({-1}), op](
                    int64_t begin, int64_t length, const std::string& name) {
                  const at::Tensor run = flat.narrow(0, begin, length);
                  if (detail::is_low_precision(run)) {
                    return detail::all_reduce_in_float(run, op, *mpi, name);
                  }
                  const at::ScalarType dtype = run.scalar_type();
                  detail::check_mpi(MPI_Allreduce(MPI_IN_PLACE, run.mutable_data_ptr(),
                                                  static_cast<int>(length), detail::mpi_type(dtype),
                                                  detail::mpi_op(dtype, op), mpi->communicator()),
                                    "MPI_Allreduce", name);
                  // After the sum: divided before it, the smallest floats would lose their last
                  // bits.
                  if (op == c10d::ReduceOp::AVG) detail::divide_by(run, mpi->size());
                });
}

inline MpiBackend::WorkPtr MpiBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                 const c10d::BroadcastOptions& options) {
  const detail::MpiArguments arguments("broadcast", *this);
  const at::Tensor tensor = arguments.one(tensors);
  const int root = static_cast<int>(options.rootRank);
  arguments.check("tensor", tensor);
  arguments.check_root(options.rootRank);
  const bool writes = root != rank_;
  auto work =
      launch({c10d::OpType::BROADCAST, tensor, c10d::ReduceOp::SUM, root},
             writes ? tensors : std::vector<at::Tensor>(), tensor.numel(), tensor.element_size(),
             [mpi = thread_.get(), flat = tensor.detach().view({-1}), root](
                 int64_t begin, int64_t length, const std::string& name) {
               const at::Tensor run = flat.narrow(0, begin, length);
               detail::check_mpi(MPI_Bcast(run.mutable_data_ptr(), static_cast<int>(run.nbytes()),
                                           MPI_BYTE, root, mpi->communicator()),
                                 "MPI_Bcast", name);
             });
  return work;
}

inline MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& /*options*/) {
  detail::MpiArguments("all_gather", *this).check_parts("output", output, "input", input);
  const at::Tensor rows = output.detach().view({size_, input.numel()});
  const at::Tensor row = input.detach().view({-1});
  const bool in_place = row.numel() > 0 && row.const_data_ptr() == rows[rank_].const_data_ptr();
  const at::Tensor given = in_place || !row.is_alias_of(rows) ? row : row.clone();
  return launch(
      {c10d::OpType::_ALLGATHER_BASE, input}, {output}, input.numel(), input.element_size() * size_,
      [mpi = thread_.get(), rows, given](int64_t begin, int64_t length, const std::string& name) {
        const detail::MpiColumns to(rows, begin, length);
        const at::Tensor from = given.narrow(0, begin, length);
        const bool is_own = from.const_data_ptr() == to.block[mpi->rank()].const_data_ptr();
        detail::check_mpi(MPI_Allgather(is_own ? MPI_IN_PLACE : from.const_data_ptr(),
                                        to.row_bytes(), MPI_BYTE, to.block.mutable_data_ptr(),
                                        to.row_bytes(), MPI_BYTE, mpi->communicator()),
                          "MPI_Allgather", name);
        to.put_back();
      });
}

inline MpiBackend::WorkPtr MpiBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::AllgatherOptions& /*options*/) {
  const detail::MpiArguments arguments("all_gather", *this);
  const at::Tensor input = arguments.one(inputs);
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(size_),
              "all_gather on rank ", rank_, ": `outputs` must be one list of ", size_,
              " tensors, one a rank");
  arguments.check("input", input);
  for (const at::Tensor& output : outputs[0]) {
    arguments.check("output", output);
    TORCH_CHECK(output.numel() == input.numel() && output.scalar_type() == input.scalar_type(),
                "all_gather on rank ", rank_, ": each of `outputs` must be like `input`, ",
                detail::tensor_words(input), ", but one is ", detail::tensor_words(output));
  }
  return launch({c10d::OpType::ALLGATHER, input}, outputs[0], input.numel(),
                input.element_size() * size_,
                [mpi = thread_.get(), row = input.detach().view({-1}), to = outputs[0]](
                    int64_t begin, int64_t length, const std::string& name) {
                  const at::Tensor all = at::empty({mpi->size(), length}, row.options());
                  const at::Tensor from = row.narrow(0, begin, length);
                  const int bytes = static_cast<int>(from.nbytes());
                  detail::check_mpi(
                      MPI_Allgather(from.const_data_ptr(), bytes, MPI_BYTE, all.mutable_data_ptr(),
                                    bytes, MPI_BYTE, mpi->communicator()),
                      "MPI_Allgather", name);
                  for (int rank = 0; rank < mpi->size(); ++rank) {
                    const at::Tensor& output = to[static_cast<std::size_t>(rank)];
                    output.detach().view({-1}).narrow(0, begin, length).copy_(all[rank]);
                  }
                });
}

inline MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const detail::MpiArguments arguments("reduce_scatter", *this);
  const c10d::ReduceOp::RedOpType op = options.reduceOp;
  arguments.check_parts("input", input, "output", output);
  arguments.check_reduction(input.scalar_type(), op);
  return launch(
      {c10d::OpType::_REDUCE_SCATTER_BASE, input, op}, {output}, output.numel(),
      input.element_size() * size_,
      [mpi = thread_.get(), to = output.detach().view({-1}),
       rows = input.detach().view({size_, output.numel()}),
       op](int64_t begin, int64_t length, const std::string& name) {
        const at::ScalarType dtype = rows.scalar_type();
        const at::Tensor from = rows.narrow(1, begin, length).contiguous();
        const int count = static_cast<int>(length);
        if (detail::is_low_precision(from)) {
          const at::Tensor received = at::empty_like(from);
          detail::check_mpi(
              MPI_Alltoall(from.const_data_ptr(), count, MPI_UINT16_T, received.mutable_data_ptr(),
                           count, MPI_UINT16_T, mpi->communicator()),
              "MPI_Alltoall", name);
          to.narrow(0, begin, length).copy_(detail::reduce_rows(received, op));
          return;
        }
        // Not into a part of the input itself, which MPI forbids.
        const at::Tensor sum = at::empty({length}, from.options());
        detail::check_mpi(MPI_Reduce_scatter_block(from.const_data_ptr(), sum.mutable_data_ptr(),
                                                   count, detail::mpi_type(dtype),
                                                   detail::mpi_op(dtype, op), mpi->communicator()),
                          "MPI_Reduce_scatter_block", name);
        if (op == c10d::ReduceOp::AVG) detail::divide_by(sum, mpi->size());
        to.narrow(0, begin, length).copy_(sum);
      });
}

inline MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                     std::vector<int64_t>& output_sizes,
                                                     std::vector<int64_t>& input_sizes,
                                                     const c10d::AllToAllOptions& /*options*/) {
  const detail::MpiArguments arguments("all_to_all", *this);
  TORCH_CHECK(output_sizes.empty() && input_sizes.empty(), "all_to_all on rank ", rank_,
              ": MPI's parts here are equal; leave the lists of sizes empty");
  arguments.check("output", output);
  arguments.check("input", input);
  TORCH_CHECK(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() &&
                  input.numel() % size_ == 0 && !output.is_alias_of(input),
              "all_to_all on rank ", rank_, ": `output` and `input` must be two tensors of one ",
              "dtype and a multiple of ", size_, " elements, but are ",
              detail::tensor_words(output), " and ", detail::tensor_words(input));
  const int64_t part = input.numel() / size_;
  return launch({c10d::OpType::ALLTOALL_BASE, input}, {output}, part, input.element_size() * size_,
                [mpi = thread_.get(), rows = output.detach().view({size_, part}),
                 given = input.detach().view({size_, part})](int64_t begin, int64_t length,
                                                             const std::string& name) {
                  const detail::MpiColumns from(given, begin, length), to(rows, begin, length);
                  detail::check_mpi(MPI_Alltoall(from.block.const_data_ptr(), from.row_bytes(),
                                                 MPI_BYTE, to.block.mutable_data_ptr(),
                                                 to.row_bytes(), MPI_BYTE, mpi->communicator()),
                                    "MPI_Alltoall", name);
                  to.put_back();
                });
}

inline MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  return launch(c10d::OpType::BARRIER, {}, /*numel=*/1, /*bytes_each=*/1,
                [mpi = thread_.get()](int64_t, int64_t, const std::string& name) {
                  detail::check_mpi(MPI_Barrier(mpi->communicator()), "MPI_Barrier", name);
                });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
