#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/mpi_calls.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The collectives of one communicator that are under way, in the order of their calls.
///
/// Ranks reach a later stage of a collective at different times, but MPI matches collectives by the
/// order in which each rank starts them. So each kind of start has a communicator of its own
/// (announcements; first stages; second stages), and each follows the order of the calls: a stage
/// is not started before the same stage of all earlier calls.
class MpiQueue {
 public:
  MpiQueue(MPI_Comm communicator, bool check_calls)
      : exceptions_(std::uncaught_exceptions()), check_calls_(check_calls) {
    const std::string context = "MpiCommunicator";
    TORCH_CHECK(mpi_is_initialized() && !mpi_is_finalized(),
                "MpiCommunicator: MPI is not initialised; put a mezzo::MpiEnvironment before it");
    TORCH_CHECK(communicator != MPI_COMM_NULL,
                "MpiCommunicator: `communicator` is MPI_COMM_NULL: this process is not one of its "
                "ranks; make it on those alone");
    const std::lock_guard lock(mpi_mutex());
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread", context);
    any_thread_ = level >= MPI_THREAD_SERIALIZED;
    for (MPI_Comm* duplicate : {&announcements_, &first_, &second_}) {
      check_mpi(MPI_Comm_dup(communicator, duplicate), "MPI_Comm_dup", context);
      check_mpi(MPI_Comm_set_errhandler(*duplicate, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler",
                context);
    }
    check_mpi(MPI_Comm_rank(first_, &rank_), "MPI_Comm_rank", context);
    check_mpi(MPI_Comm_size(first_, &size_), "MPI_Comm_size", context);
    reductions_ = std::make_unique<MpiReductions>();
  }

  ~MpiQueue() {
    const std::lock_guard lock(mpi_mutex());
    if (!queue_.empty() || !broken_.empty()) {
      // Nobody waited for them, and MPI may still write to their tensors: these stay.
      [[maybe_unused]] const auto* kept = new Operations(std::move(queue_));
      [[maybe_unused]] const auto* kept_too = new Operations(std::move(broken_));
      if (!mpi_is_finalized()) static_cast<void>(reductions_.release());
      return;
    }
    // Other ranks may never come to free theirs where an exception ends this one.
    if (mpi_is_finalized() || std::uncaught_exceptions() > exceptions_) return;
    for (MPI_Comm* duplicate : {&announcements_, &first_, &second_}) MPI_Comm_free(duplicate);
  }
  MpiQueue(const MpiQueue&) = delete;
  MpiQueue& operator=(const MpiQueue&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  MPI_Comm first() const noexcept { return first_; }
  MPI_Comm second() const noexcept { return second_; }
  const MpiReductions& reductions() const noexcept { return *reductions_; }

  std::string context(const CollectiveCall& call) const { return call.name_on(rank_, size_); }

  void launch(const std::shared_ptr<MpiOperation>& operation) {
    const std::lock_guard lock(mpi_mutex());
    check_usable(operation->call);
    ++calls_;
    queue_.push_back(operation);
    try {
      if (check_calls_) {
        announce(*operation);
      } else {
        start(*operation);
      }
    } catch (const std::exception& error) {
      break_down(std::current_exception(), error.what());
      throw;
    }
    progress();
  }

  bool ready(const MpiOperation& operation) {
    const std::lock_guard lock(mpi_mutex());
    if (operation.stage != MpiOperation::Stage::done) {
      check_usable(operation.call);
      progress();
    }
    return operation.stage == MpiOperation::Stage::done;
  }

  /// Throws the operation's error.
  void wait(const MpiOperation& operation) {
    // Where ranks share cores, one that waits must not take them from one that computes.
    constexpr int kYields = 10'000;
    for (int i = 0; !ready(operation); ++i) {
      if (i < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    if (operation.error != nullptr) std::rethrow_exception(operation.error);
  }

 private:
  using Operations = std::list<std::shared_ptr<MpiOperation>>;

  void check_usable(const CollectiveCall& call) const {
    TORCH_CHECK(
        broken_words_.empty(), context(call),
        ": this communicator failed earlier, and its ranks are no longer in step: ", broken_words_);
    TORCH_CHECK(!mpi_is_finalized(), context(call),
                ": MPI has been finalised; let the MpiEnvironment outlive its communicators");
    int main = 1;
    if (!any_thread_) MPI_Is_thread_main(&main);
    TORCH_CHECK(
        main, context(call),
        ": MPI was initialised for calls from one thread, and this is another; initialise it "
        "with MPI_THREAD_SERIALIZED or more, as MpiEnvironment does");
  }

  void announce(MpiOperation& operation) {
    const CollectiveCall& call = operation.call;
    operation.announcement = {static_cast<int64_t>(call.collective),
                              static_cast<int64_t>(call.dtype),
                              call.numel,
                              static_cast<int64_t>(call.reduction),
                              call.root,
                              calls_};
    const int words = static_cast<int>(operation.announcement.size());
    operation.announcements.resize(operation.announcement.size() * static_cast<std::size_t>(size_));
    check_mpi(MPI_Iallgather(operation.announcement.data(), words, MPI_INT64_T,
                             operation.announcements.data(), words, MPI_INT64_T, announcements_,
                             &operation.announced),
              "MPI_Iallgather of the call", context(call));
  }

  /// Every rank reads the same announcements, so all throw or none does, and the next calls match.
  void compare(const MpiOperation& operation) const {
    const auto call_of = [&](int rank) {
      const int64_t* const words = operation.announcements.data() + std::ptrdiff_t{6} * rank;
      CollectiveCall call(static_cast<Collective>(words[0]));
      call.dtype = static_cast<at::ScalarType>(words[1]);
      call.numel = words[2];
      call.reduction = static_cast<Reduction>(words[3]);
      call.root = static_cast<int>(words[4]);
      return call;
    };
    const CollectiveCall first = call_of(0);
    for (int rank = 1; rank < size_; ++rank) {
      const CollectiveCall other = call_of(rank);
      TORCH_CHECK(other == first, context(operation.call), ": rank ", rank, " called ",
                  other.name(), " where rank 0 called ", first.name(), " (collective number ",
                  operation.announcement[5],
                  " of this communicator); every rank must make the same calls in the same order");
    }
  }

  void start(MpiOperation& operation) {
    operation.stage = MpiOperation::Stage::running;
    for (MpiPart& part : operation.parts) {
      start(operation, part, part.first);
      part.stage = MpiPart::Stage::first;
    }
  }
  void start(const MpiOperation& operation, MpiPart& part, const MpiCall& call) const {
    check_mpi(call.start(&part.request), call.name, context(operation.call));
  }

  void progress() noexcept {
    const ReturnedMpiErrors returned;
    try {
      start_what_all_have_called();
      advance_parts();
      complete_what_is_done();
    } catch (const std::exception& error) {
      break_down(std::current_exception(), error.what());
    }
  }

  void start_what_all_have_called() {
    for (const auto& operation : queue_) {
      if (operation->stage != MpiOperation::Stage::announced) continue;
      if (!test(*operation, operation->announced)) return;
      try {
        compare(*operation);
      } catch (...) {
        operation->error = std::current_exception();
        operation->stage = MpiOperation::Stage::done;
        continue;
      }
      start(*operation);
    }
  }

  void advance_parts() {
    bool may_start_second = true;
    for (const auto& operation : queue_) {
      if (operation->stage == MpiOperation::Stage::announced) return;
      if (operation->stage == MpiOperation::Stage::done) continue;
      for (MpiPart& part : operation->parts) {
        may_start_second = advance(*operation, part, may_start_second);
      }
    }
  }

  /// \returns whether a later part may start its second stage.
  bool advance(const MpiOperation& operation, MpiPart& part, bool may_start_second) {
    using PartStage = MpiPart::Stage;
    if (part.stage == PartStage::first && test(operation, part.request)) {
      if (part.second.start != nullptr && !may_start_second) return false;
      if (part.between) part.between();
      if (part.second.start != nullptr) start(operation, part, part.second);
      part.stage = part.second.start != nullptr ? PartStage::second : PartStage::done;
    }
    if (part.stage == PartStage::second && test(operation, part.request)) {
      part.stage = PartStage::done;
    }
    return may_start_second && !(part.second.start != nullptr && part.stage == PartStage::first);
  }

  bool test(const MpiOperation& operation, MPI_Request& request) const {
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test", context(operation.call));
    return done != 0;
  }

  void complete_what_is_done() {
    for (auto at = queue_.begin(); at != queue_.end();) {
      MpiOperation& operation = **at;
      bool done = operation.stage != MpiOperation::Stage::announced;
      for (const MpiPart& part : operation.parts) {
        done = done && (operation.error != nullptr || part.stage == MpiPart::Stage::done);
      }
      if (!done) {
        ++at;
        continue;
      }
      if (operation.finish && operation.error == nullptr) operation.finish();
      operation.stage = MpiOperation::Stage::done;
      operation.finish = nullptr;  // lets go of the tensors
      operation.parts.clear();
      at = queue_.erase(at);
    }
  }

  void break_down(const std::exception_ptr& error, const std::string& words) noexcept {
    broken_words_ = words.substr(0, words.find('\n'));
    for (const auto& operation : queue_) {
      operation->error = error;
      operation->stage = MpiOperation::Stage::done;
    }
    broken_.splice(broken_.end(), queue_);
  }

  int rank_ = 0;
  int size_ = 0;
  int exceptions_;
  bool check_calls_;
  bool any_thread_ = false;
  int64_t calls_ = 0;
  MPI_Comm announcements_ = MPI_COMM_NULL;
  MPI_Comm first_ = MPI_COMM_NULL;
  MPI_Comm second_ = MPI_COMM_NULL;
  std::unique_ptr<MpiReductions> reductions_;
  Operations queue_;
  Operations broken_;  ///< MPI may still write to their tensors
  std::string broken_words_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
