/// \file
/// How a watchdog ends its process, and how it hears that somebody else does.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/watchdog_options.h>

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What there is one of a process: whether SIGTERM came, and who asked for it to be noticed.
struct TerminationState {
  std::atomic<bool> received{false};
  std::mutex mutex;
  int users = 0;
  void (*installed)(int) = nullptr;  // the handler that notes it, of whichever library came first
};

__attribute__((visibility("default"))) inline TerminationState& termination_state() {
  static TerminationState state;
  return state;
}

inline void note_termination(int /*signal*/) {
  termination_state().received.store(true);  // made before the handler was installed
}

/// While one lives SIGTERM is noticed and does nothing else, unless the program has a handler of
/// its own, or ignores it.
class TerminationSignal {
 public:
  explicit TerminationSignal(bool wanted) : wanted_(wanted) {
    if (!wanted_) return;
    TerminationState& state = termination_state();
    const std::lock_guard lock(state.mutex);
    if (state.users++ > 0) return;
    struct sigaction present {};
    sigaction(SIGTERM, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) != 0 || present.sa_handler != SIG_DFL) return;
    struct sigaction noting {};
    noting.sa_handler = note_termination;
    noting.sa_flags = SA_RESTART;
    sigemptyset(&noting.sa_mask);
    if (sigaction(SIGTERM, &noting, nullptr) == 0) state.installed = note_termination;
  }
  ~TerminationSignal() {
    if (!wanted_) return;
    TerminationState& state = termination_state();
    const std::lock_guard lock(state.mutex);
    if (--state.users == 0) restore(state);
  }
  TerminationSignal(const TerminationSignal&) = delete;
  TerminationSignal& operator=(const TerminationSignal&) = delete;

  bool received() const { return wanted_ && termination_state().received.load(); }

  /// As if nobody had noticed it.
  static void obey() {
    TerminationState& state = termination_state();
    {
      const std::lock_guard lock(state.mutex);
      restore(state);
    }
    raise(SIGTERM);
  }

 private:
  /// The program may have put a handler of its own there meanwhile: that stays.
  static void restore(TerminationState& state) {
    struct sigaction present {};
    sigaction(SIGTERM, nullptr, &present);
    if (state.installed != nullptr && present.sa_handler == state.installed) {
      signal(SIGTERM, SIG_DFL);
    }
    state.installed = nullptr;
  }

  bool wanted_;
};

/// What a program has printed so far, unless a thread that is stuck holds stdio.
inline void try_to_flush() {
  const auto flushed = std::make_shared<std::promise<void>>();
  std::thread([flushed] {
    std::fflush(nullptr);
    flushed->set_value();
  }).detach();
  flushed->get_future().wait_for(std::chrono::milliseconds(200));
}

/// The last line of a rank: why it ends, and what it was `doing`.
inline void report_end(const WatchdogOptions& options, const WatchdogFault& fault, int rank,
                       int size, const std::string& doing) {
  const std::string line = "mezzo: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                           " ends: " + fault.what + ". This rank " + doing + '\n';
  if (options.report) {
    options.report(fault, line);
  } else {
    std::cerr << line << std::flush;
  }
}

/// Returns only if `options.end` does.
inline void end_process(const WatchdogOptions& options, const WatchdogFault& fault) {
  if (options.end) return options.end(fault);
  try_to_flush();
  std::_Exit(kWatchdogExitStatus);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
