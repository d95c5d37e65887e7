/// \file
/// A rank that is killed, stalls, hangs or throws ends all ranks, with its number and the
/// collective.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <concepts>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class CollectiveLog;
class WatchdogThreads;
}  // namespace detail

/// Ends all ranks of a job when one is killed, stalls, hangs or throws, each with a line that names
/// the rank and the collective. Without it MPI and NCCL leave the other ranks waiting.
///
/// \code
///   const auto environment = mezzo::ProcessGroupEnvironment::read();
///   mezzo::Watchdog watchdog(mezzo::rendezvous(environment), environment.rank,
///                            environment.world_size);
///   auto world = watchdog.watch(c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD));
///   watchdog.run([&] { train(world); });
/// \endcode
///
/// Two threads a rank exchange signs of life through the store, over a connection of their own. A
/// rank that is killed, stopped or cut off is noticed after heartbeat_timeout; one that lives but
/// does not call what others wait for, after collective_timeout; one that throws out of `run`, or
/// calls `fail`, after an interval. Ranks that compute are left alone as long as nobody waits for
/// them longer than collective_timeout. With NCCL `wait` does not wait on the host, so that a
/// collective that does not end is not seen.
///
/// docs/data-parallel.md tells the times, what mpirun adds, and what it costs ("When a rank dies").
class Watchdog {
 public:
  /// All ranks construct it, in any order. Keeps `store`, and makes a second connection to it.
  /// \throws c10::Error if an argument is out of range, or the store does not answer
  Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
           const WatchdogOptions& options = {});

  /// Says that this rank is done; left by an exception: that it failed. Rank 0, whose store all
  /// need, waits for the other ranks' to be destroyed.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Returns a backend that passes every collective on to `group`, and is watched: give it to
  /// whatever calls collectives in place of `group`. All ranks watch the same groups in the same
  /// order.
  c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> group);

  /// Calls `f`; of an exception that leaves it the other ranks get the words, and end. It goes on
  /// its way when they have, four intervals later at most.
  template <std::invocable F>
  std::invoke_result_t<F> run(F&& f) {
    try {
      return std::forward<F>(f)();
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    } catch (...) {
      fail("an exception that is no std::exception");
      throw;
    }
  }

  /// Ends all other ranks with these words. Returns when they have read them, after four intervals
  /// at most (should the store itself have stopped, this process is ended for that); this rank is
  /// no longer watched, and should end.
  void fail(const std::string& what) noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;  // on rank 0 the server is its own
  std::shared_ptr<detail::CollectiveLog> log_;
  std::shared_ptr<detail::WatchdogThreads> threads_;
  int exceptions_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/watchdog_impl.h>  // IWYU pragma: export
