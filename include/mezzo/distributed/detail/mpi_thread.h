#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
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

/// MPI's own words for an error code.
inline std::string mpi_error_words(int code) {
  std::string words(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, words.data(), &length) != MPI_SUCCESS) {
    return "error code " + std::to_string(code);
  }
  words.resize(static_cast<std::size_t>(length));
  return words;
}

/// `context` names the rank and the collective.
inline void check_mpi(int code, const char* call, const std::string& context) {
  TORCH_CHECK(code == MPI_SUCCESS, context, ": ", call, " failed: ", mpi_error_words(code));
}

/// MPI_MAX and MPI_MIN may drop a NaN, and on one rank only.
template <class T, bool is_max>
void reduce_keeping_nan(void* in, void* inout, int* length, MPI_Datatype* /*type*/) {
  const T* const given = static_cast<const T*>(in);
  T* const kept = static_cast<T*>(inout);
  for (int i = 0; i < *length; ++i) {
    kept[i] = is_max ? max_or_nan(kept[i], given[i]) : -max_or_nan(-kept[i], -given[i]);
  }
}

/// MPI's operation for a reduction of tensors of `dtype`. Of an average it is the sum.
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

/// One collective of MpiBackend's.
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

  /// Once, by the thread that does the collective.
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
  /// The process's. Exported, so that shared libraries count the same threads; never destroyed.
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
  /// A thread has done all of its collectives, and waits until the other ranks have.
  void begin_leaving() {
    change([this] { ++leaving_; });
  }
  /// `words` say who has not ended; empty: all ranks have.
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

  /// Waits until no thread is left: for a collective for `timeout`, for other ranks that have not
  /// ended their groups as long as they take, as MPI_Finalize does. Returns why MPI cannot be
  /// finalised; empty if it can.
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
/// MPI's blocking collectives are much faster than its non-blocking ones (Open MPI picks simpler
/// algorithms for the latter), but a rank that waits in one keeps a core busy. So ranks announce
/// each call by a small non-blocking all-gather, look for its end now and then, and enter the
/// blocking call when all of them have come. The announcements say what is called, and are
/// compared. A rank that ends its group announces that too, so that ranks which call it once more
/// throw instead of waiting.
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

  /// Ends the thread when it has done what is queued, without waiting for that. Where an exception
  /// ends the backend's scope, other ranks may never come: the thread gives up.
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
    const std::string name = operation.work->name();
    if (!broken_words_.empty()) check_usable(*operation.work);
    try {
      if (check_calls_) announce(*operation.work);
    } catch (const c10::Error& error) {
      break_down(error);
      throw;
    }
    try {
      if (check_calls_) compare(*operation.work);
    } catch (const c10::Error& error) {
      if (has_lost_ranks_) break_down(error);
      throw;
    }
    try {
      operation.run(name);
    } catch (const c10::Error& error) {
      break_down(error);
      throw;
    }
  }

  /// Announces that this rank has ended the group, and waits until all have, which may take until
  /// the MpiEnvironment ends. Where MPI is the program's, it announces nothing: nobody would wait
  /// for this thread before MPI is finalised. Returns whether the communicator can be freed.
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
