#pragma once

#include <mezzo/base/version.h>

#include <signal.h>

#include <atomic>
#include <mutex>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What there is one of a process: whether SIGTERM came, and who asked for it to be noticed.
struct TerminationState {
  std::atomic<bool> received{false};
  std::mutex mutex;
  int users = 0;
  bool installed = false;
};

__attribute__((visibility("default"))) inline TerminationState& termination_state() {
  static TerminationState state;
  return state;
}

extern "C" inline void mezzo_note_termination(int /*signal*/) {
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
    noting.sa_handler = mezzo_note_termination;
    noting.sa_flags = SA_RESTART;
    sigemptyset(&noting.sa_mask);
    state.installed = sigaction(SIGTERM, &noting, nullptr) == 0;
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
    if (state.installed && present.sa_handler == mezzo_note_termination) {
      signal(SIGTERM, SIG_DFL);
    }
    state.installed = false;
  }

  bool wanted_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
