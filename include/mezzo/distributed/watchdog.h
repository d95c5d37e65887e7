/// \file
/// A rank that is killed, stalls, hangs or throws ends all ranks, with its number and the
/// collective.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/watchdog_threads.h>
#include <mezzo/distributed/detail/watched_backend.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/Exception.h>
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

/// Watches over the ranks of a job. MPI and NCCL wait for a rank that will never come for ever, or
/// for long without a word; a training loop adds three lines to end instead, on every rank, with an
/// error that says who and where:
///
/// \code
///   const auto environment = mezzo::ProcessGroupEnvironment::read();
///   mezzo::Watchdog watchdog(mezzo::rendezvous(environment), environment.rank,
///                            environment.world_size);
///   auto world = watchdog.watch(c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD));
///   watchdog.run([&] { train(world); });
/// \endcode
///
/// Under mpirun `mezzo::rendezvous(MPI_COMM_WORLD)` (mpi_rendezvous.h) finds a free port by itself.
///
///     mezzo: rank 0 of 4 ends: rank 2 has given no sign of life for 30.2 s (killed, stopped or cut
///     off), when last seen it waited for all_reduce(sum) of 4096 Float (collective 17). This rank
///     is waiting for all_reduce(sum) of 4096 Float (collective 18) since 30.9 s
///
/// Two threads a rank exchange signs of life through a c10d store, TCPStore as `rendezvous` makes
/// it on rank 0, with a connection of their own: nothing that the program, MPI or NCCL do holds
/// them up. Each sign says which collective the rank has called last or waits for. A rank that
///
/// - is killed, is stopped, or whose network stalls, is noticed after heartbeat_timeout (rank 0,
///   if killed: after an interval);
/// - lives, but never calls what others wait for: after collective_timeout;
/// - throws out of `run`, or calls `fail`: after an interval.
///
/// To that come at most four intervals in which the ranks tell each other, so that all of them
/// speak before the first one ends. A rank that computes for hours without a collective is not
/// disturbed as long as nobody waits for it longer than collective_timeout. An error that a
/// transport throws since its peer has died, before that is noticed, counts as the failure of the
/// rank that threw.
///
/// Under Open MPI's mpirun: it notices itself when a process dies, sends the others SIGTERM, and
/// SIGKILL a second later (its parameter odls_base_sigkill_timeout). Each of them then says what it
/// was doing and of whom it has not heard (see `explain_sigterm`), and mpirun names the rank that
/// died and its signal. With
/// `--enable-recovery` mpirun leaves the others alone, and the watchdog speaks after
/// heartbeat_timeout; but mpirun then exits with 0 whatever has happened, and waits for ever for a
/// process that is stopped. Without it a rank that is ended by this class makes mpirun (torchrun,
/// srun --kill-on-bad-exit) end those that are left, stopped ones too.
///
/// Each rank sends a few hundred bytes and reads as many of every other rank each interval; rank 0
/// serves all of them, which takes it 3 microseconds times the square of the number of ranks: with
/// a thousand ranks take an interval of ten seconds or more. A collective costs a quarter of
/// a microsecond more.
///
/// With NCCL `wait` does not wait on the host, so that a collective that does not end is not seen;
/// TORCH_NCCL_ASYNC_ERROR_HANDLING is for those.
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

namespace detail {

inline void check_watchdog_arguments(int rank, int size, const WatchdogOptions& options) {
  using std::chrono::milliseconds;
  TORCH_CHECK(size >= 1 && rank >= 0 && rank < size, "Watchdog: `rank` must be 0 to size - 1, but ",
              "is ", rank, " of ", size);
  TORCH_CHECK(options.interval >= milliseconds(4),
              "Watchdog: `interval` must be 4 ms or more, but ", "is ", options.interval.count(),
              " ms");
  TORCH_CHECK(options.heartbeat_timeout >= 3 * options.interval,
              "Watchdog: `heartbeat_timeout` must be three intervals or more, so that one sign of "
              "life may be late, but is ",
              options.heartbeat_timeout.count(), " ms where `interval` is ",
              options.interval.count(), " ms");
  TORCH_CHECK(options.collective_timeout > milliseconds(0),
              "Watchdog: `collective_timeout` must be positive, but is ",
              options.collective_timeout.count(), " ms");
}

}  // namespace detail

inline Watchdog::Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                          const WatchdogOptions& options)
    : store_(store),
      log_(std::make_shared<detail::CollectiveLog>()),
      exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(store, "Watchdog: `store` is null; mezzo::rendezvous makes one");
  detail::check_watchdog_arguments(rank, size, options);
  threads_ = std::make_shared<detail::WatchdogThreads>(store->clone(), rank, size, options, log_);
  threads_->start();
}

inline Watchdog::~Watchdog() {
  if (std::uncaught_exceptions() > exceptions_) {
    threads_->fail("an exception left the scope of its Watchdog (Watchdog::run quotes it)");
  } else {
    threads_->finish();
  }
  threads_->join();
}

inline c10::intrusive_ptr<c10d::Backend> Watchdog::watch(c10::intrusive_ptr<c10d::Backend> group) {
  return c10::make_intrusive<detail::WatchedBackend>(
      detail::checked(std::move(group), "Watchdog::watch"), log_);
}

inline void Watchdog::fail(const std::string& what) noexcept { threads_->fail(what); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
