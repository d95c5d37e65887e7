#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_call.h>
#include <mezzo/distributed/detail/mpi_calls.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What MPI is given at one time: one non-blocking collective, and for some dtypes local work and a
/// second one behind it.
struct MpiPart {
  std::function<void(MPI_Request*)> first;
  std::function<void()> between = nullptr;             ///< null: nothing
  std::function<void(MPI_Request*)> second = nullptr;  ///< null: none

  enum class Stage : uint8_t { waiting, first, second, done } stage = Stage::waiting;
  MPI_Request request = MPI_REQUEST_NULL;
};

/// One collective of this rank: its parts and what is to be done when all are there. The closures
/// keep the tensors.
struct MpiOperation {
  explicit MpiOperation(const CollectiveCall& of) : call(of) {}

  CollectiveCall call;
  std::vector<MpiPart> parts;
  std::function<void()> finish;  ///< null: nothing

  enum class Stage : uint8_t { announced, running, done } stage = Stage::announced;
  std::exception_ptr error;
  std::array<int64_t, 6> announcement{};
  std::vector<int64_t> announcements;  ///< of all ranks
  MPI_Request announced = MPI_REQUEST_NULL;
};

/// The collectives of one communicator that are under way, in the order of their calls.
///
/// Ranks reach a later stage of a collective at different times, but MPI matches collectives by the
/// order in which each rank starts them. So each kind of start has a communicator of its own
/// (announcements; first stages; second stages), and each follows the order of the calls: a stage
/// is not started before the same stage of all earlier calls.
class MpiQueue {
 public:
  MpiQueue(MPI_Comm communicator, bool check_calls);
  ~MpiQueue();
  MpiQueue(const MpiQueue&) = delete;
  MpiQueue& operator=(const MpiQueue&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  MPI_Comm first() const noexcept { return first_; }
  MPI_Comm second() const noexcept { return second_; }
  const MpiReductions& reductions() const noexcept { return *reductions_; }

  void launch(const std::shared_ptr<MpiOperation>& operation);
  bool ready(const MpiOperation& operation);
  /// Throws the operation's error.
  void wait(const MpiOperation& operation);

  std::string context(const CollectiveCall& call) const {
    return c10::str(call.name(), " on rank ", rank_, " of ", size_);
  }

 private:
  using Operations = std::list<std::shared_ptr<MpiOperation>>;

  void check_usable(const CollectiveCall& call) const;
  void announce(MpiOperation& operation);
  void compare(const MpiOperation& operation) const;
  void start(MpiOperation& operation);
  void progress() noexcept;
  void start_what_all_have_called();
  void advance_parts();
  bool advance(const MpiOperation& operation, MpiPart& part, bool may_start_second);
  bool test(const MpiOperation& operation, MPI_Request& request) const;
  void complete_what_is_done();
  void break_down(const std::exception_ptr& error, const std::string& words) noexcept;

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

#include <mezzo/distributed/detail/mpi_queue_impl.h>  // IWYU pragma: export
