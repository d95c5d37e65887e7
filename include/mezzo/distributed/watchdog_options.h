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
  Kind kind = Kind::unresponsive;  ///< what has happened
  std::vector<int> ranks = {};     ///< the ranks to which it has happened, as far as they are known
  std::string what = {};  ///< a sentence that names ranks and collective, and quotes `fail`
};

/// Options of Watchdog: time-outs, and what happens after a fault.
struct WatchdogOptions {
  /// How often a rank gives a sign of life, and reads those of the others; at least 4 ms.
  std::chrono::milliseconds interval{1000};

  /// The time without a sign of life after which a rank is taken for dead; at least three times the
  /// interval. A thread of the watchdog gives the signs of life, whatever the program does, but it
  /// needs a core now and then.
  std::chrono::milliseconds heartbeat_timeout{30'000};

  /// The longest time that a rank waits for a collective that others have not called, or that does
  /// not end. The time must exceed whatever one rank does alone while the others wait: a
  /// checkpoint, an evaluation, the slowest batch. The default is NCCL's.
  std::chrono::milliseconds collective_timeout{600'000};

  /// Whether a rank that gets SIGTERM, which mpirun sends to all ranks when one has died, writes
  /// what it was doing and which ranks are gone, and ends a third of a second later. A handler of
  /// SIGTERM that the program has when the Watchdog is made stays. Process-wide.
  bool explain_sigterm = true;

  /// Called at once for a fault, on a thread of the watchdog's. Null: writes one line to std::cerr.
  std::function<void(const WatchdogFault& fault, const std::string& line)> report = nullptr;

  /// Called to end the process, when all live ranks have reported or three intervals have passed.
  /// If the function returns, the program goes on unwatched. Null: std::_Exit(kWatchdogExitStatus),
  /// after an attempt to flush stdio.
  std::function<void(const WatchdogFault& fault)> end = nullptr;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
