/// \file
/// A watchdog that ends all ranks of a job when one of them is lost.
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

/// Ends all ranks of a job when one is killed, stalls, hangs or throws. Each rank writes a line that
/// names the lost rank and the collective. Without a watchdog MPI and NCCL leave the other ranks
/// waiting.
///
/// \code
///   const auto environment = mezzo::ProcessGroupEnvironment::read();
///   mezzo::Watchdog watchdog(mezzo::rendezvous(environment), environment.rank,
///                            environment.world_size);
///   auto world = watchdog.watch(c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD));
///   watchdog.run([&] { train(world); });
/// \endcode
///
/// Two threads of each rank exchange signs of life through the store, over their own connection. A
/// rank that is killed, stopped or cut off is noticed after heartbeat_timeout; a rank that lives
/// but
/// does not call a collective for which others wait, after collective_timeout; a rank that throws out
/// of `run`, or calls `fail`, after an interval. A rank may compute for as long as it likes while
/// no other waits for it longer than collective_timeout. NCCL's `wait` does not wait on the host,
/// so that a watchdog does not see an NCCL collective that does not end.
///
/// docs/data-parallel.md ("When a rank dies") tells the times, what mpirun adds, and the cost.
class Watchdog {
 public:
  /// All ranks construct a watchdog, in any order. Keeps `store`, and makes a second connection to
  /// it.
  /// \throws c10::Error if an argument is out of range, or the store does not answer
  Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
           const WatchdogOptions& options = {});

  /// Tells the other ranks that this one is done, or that it failed if an exception leaves the
  /// scope. Rank 0 waits until the other ranks' watchdogs are destroyed, for all need its store.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Returns a backend that passes every collective on to `group`, and is watched. Use this backend
  /// in place of `group`. All ranks watch the same groups in the same order.
  c10::intrusive_ptr<c10d::Backend> watch(c10::intrusive_ptr<c10d::Backend> group);

  /// Calls `f`, and returns its result. If an exception leaves `f`, the other ranks get its message
  /// and end; the exception is thrown on when they have read it, after four intervals at most.
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

  /// Ends all other ranks with the message `what`. Returns when they have read it, after four
  /// intervals at most (if the store itself has stopped, this process is ended too). This rank is
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
