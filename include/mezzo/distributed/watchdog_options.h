/// \file
/// When a Watchdog (distributed/watchdog.h) takes a rank for lost, and what it does then.
#pragma once

#include <mezzo/base/version.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The status with which a watchdog ends its process: EX_TEMPFAIL of sysexits.h, "try again".
inline constexpr int kWatchdogExitStatus = 75;

/// Why the ranks cannot go on.
struct WatchdogFault {
  /// What has happened to a rank.
  enum class Kind : uint8_t {
    unresponsive,  ///< ranks give no sign of life: killed, stopped, or cut off from the network
    missing,       ///< ranks live, but have not called a collective for which others wait
    stuck,         ///< all ranks have called a collective, and it does not end
    failed,        ///< a rank has said that it failed
    terminated,    ///< a signal (SIGTERM) told this process to end
  };
  Kind kind = Kind::unresponsive;
  std::vector<int> ranks = {};  ///< whose fault it is, as far as that is known
  std::string what = {};        ///< a sentence that names ranks and collective, and quotes `fail`
};

/// Time-outs, and what happens after a fault.
struct WatchdogOptions {
  /// How often a rank gives a sign of life, and reads the others'.
  std::chrono::milliseconds interval{1000};

  /// A rank of which nothing has been heard for so long is taken for dead. At least three times the
  /// interval. Signs of life are a thread's of their own: they do not wait for what the program
  /// does, but for the machine to give that thread a moment.
  std::chrono::milliseconds heartbeat_timeout{30'000};

  /// So long a rank waits for a collective that others have not called, or that does not end. It
  /// must exceed whatever one rank does alone while the others wait: a checkpoint, an evaluation,
  /// the slowest batch. The default is NCCL's.
  std::chrono::milliseconds collective_timeout{600'000};

  /// On SIGTERM write what this rank was doing, and which ranks are gone, before the process ends,
  /// a third of a second later: mpirun sends it to all ranks when one has died. Only where the
  /// program has no handler of its own for it when the Watchdog is made. Process-wide.
  bool explain_sigterm = true;

  /// Told at once of a fault, on a thread of the watchdog's. Null: one line to std::cerr.
  std::function<void(const WatchdogFault& fault, const std::string& line)> report = nullptr;

  /// Ends the process, when all live ranks have reported or three intervals have passed. Null:
  /// std::_Exit(kWatchdogExitStatus), after a try to flush stdio. If it returns the program goes on
  /// unwatched.
  std::function<void(const WatchdogFault& fault)> end = nullptr;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
