#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/watchdog_options.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A rank's sign of life.
struct Heartbeat {
  enum class State : uint8_t {
    running,
    terminated,  ///< a signal told it to end
    failed,
    finished,  ///< done; its process may be gone
    ended,     ///< has reported a fault
  };

  int64_t count = 0;
  State state = State::running;
  RankActivity activity = {};
};

inline std::string names_of(const std::vector<int>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) names += i + 1 == ranks.size() ? " and " : ", ";
    names += std::to_string(ranks[i]);
  }
  return names;
}

// mpirun leaves a rank a second between SIGTERM and SIGKILL. Those that are told to end give signs
// of life quickly, so that who gives none shows soon.
inline constexpr std::chrono::milliseconds kIntervalWhenTerminated(50);
inline constexpr std::chrono::milliseconds kSilenceWhenTerminated(250);
inline constexpr std::chrono::milliseconds kExplainAfter(350);

/// What one rank makes of the signs of life of the others. It knows no clock: time is what has
/// passed between two looks at all of them, and of a longer one only so much counts, for then it
/// was this rank that was stopped.
class PeerWatch {
 public:
  using Time = std::chrono::milliseconds;

  /// `agent_serves`: no rank serves the store, but torchrun's agent.
  PeerWatch(int rank, int size, const WatchdogOptions& options, bool agent_serves = false)
      : rank_(rank),
        options_(options),
        agent_serves_(agent_serves),
        peers_(static_cast<std::size_t>(size)) {}

  /// The store has answered. All that is in `heartbeats` (an element a rank, empty: it has not
  /// come) was there at one time.
  void look(Time passed, const std::vector<std::optional<Heartbeat>>& heartbeats) {
    passed = std::min(passed, 2 * options_.interval);
    store_silence_ = Time(0);
    for (std::size_t number = 0; number < peers_.size(); ++number) {
      Peer& peer = peers_[number];
      if (!heartbeats[number]) continue;
      const bool alive = !peer.last || peer.last->count != heartbeats[number]->count;
      peer.silence = alive ? Time(0) : peer.silence + passed;
      peer.last = heartbeats[number];
    }
    wait(passed);
  }

  /// The store has not answered for so long more. \returns the fault, if it has been too long
  std::optional<WatchdogFault> look_without_answer(Time passed) {
    store_silence_ += std::min(passed, 2 * options_.interval);
    if (store_silence_ <= options_.heartbeat_timeout) return std::nullopt;
    WatchdogFault fault{WatchdogFault::Kind::unresponsive, {}, ""};
    blame_server(fault, "",
                 " has not answered for " + in_seconds(store_silence_) + " (stopped or cut off)");
    return fault;
  }

  /// The connection to the store broke, in these words of c10d's.
  WatchdogFault connection_broke(const std::string& words) const {
    WatchdogFault fault{WatchdogFault::Kind::unresponsive, {}, ""};
    blame_server(fault, "the connection to ", " broke (killed, or ended without a word): " + words);
    return fault;
  }

  /// Peers that may still answer: all that are not known to be dead, done, or through with it.
  std::vector<int> others_to_report(const WatchdogFault& fault) const {
    std::vector<int> others;
    for (int rank = 0; rank < size(); ++rank) {
      const Peer& peer = peers_[static_cast<std::size_t>(rank)];
      const bool accused = fault.kind == WatchdogFault::Kind::unresponsive &&
                           std::count(fault.ranks.begin(), fault.ranks.end(), rank) > 0;
      const bool speaks = peer.last && (peer.last->state == Heartbeat::State::running ||
                                        peer.last->state == Heartbeat::State::terminated);
      if (rank != rank_ && speaks && !accused) others.push_back(rank);
    }
    return others;
  }

  bool all_others_finished() const {
    for (int rank = 0; rank < size(); ++rank) {
      const auto& last = peers_[static_cast<std::size_t>(rank)].last;
      if (rank != rank_ && last && last->state != Heartbeat::State::finished) return false;
    }
    return true;
  }

  std::optional<WatchdogFault> judge() const {
    if (auto fault = find_silent()) return fault;
    return find_missing();
  }

  /// A while after SIGTERM: who is not there any more? `store_silence` is by the clock.
  WatchdogFault explain_end(Time store_silence) const {
    WatchdogFault fault{WatchdogFault::Kind::terminated, {}, "a signal (SIGTERM) told it to"};
    if (store_silence >= kSilenceWhenTerminated) {  // and so there is no news of any other rank
      blame_server(fault, "; ", " has not answered for " + in_seconds(store_silence));
      return fault;
    }
    for (int rank = 0; rank < size(); ++rank) {
      const Peer& peer = peers_[static_cast<std::size_t>(rank)];
      const bool expected = rank != rank_ && peer.last && !is_done(*peer.last);
      if (!expected || peer.silence < kSilenceWhenTerminated) continue;
      fault.ranks.push_back(rank);
      fault.what += "; rank " + std::to_string(rank) + " has not been heard of for " +
                    in_seconds(peer.silence) + ", " + peer.last->activity.did();
    }
    if (fault.ranks.empty()) fault.what += "; all other ranks are alive";
    return fault;
  }

 private:
  struct Peer {
    std::optional<Heartbeat> last;
    Time silence{0};
  };

  /// Adds to the fault that something happened to whoever serves the store, between `before` and
  /// `after`: rank 0, and what it did when last seen, or torchrun's agent, and then no rank.
  void blame_server(WatchdogFault& fault, const char* before, const std::string& after) const {
    fault.what += before + std::string(agent_serves_ ? "torchrun's agent" : "rank 0") +
                  ", which hosts the store," + after;
    if (agent_serves_) return;
    fault.ranks = {0};
    if (const auto& last = peers_[0].last) fault.what += "; " + last->activity.did();
  }

  int size() const noexcept { return static_cast<int>(peers_.size()); }
  /// Null until it has given its first sign of life.
  const RankActivity* own() const {
    const auto& last = peers_[static_cast<std::size_t>(rank_)].last;
    return last ? &last->activity : nullptr;
  }
  static bool is_done(const Heartbeat& heartbeat) {
    return heartbeat.state == Heartbeat::State::finished ||
           heartbeat.state == Heartbeat::State::ended ||
           heartbeat.state == Heartbeat::State::failed;
  }

  /// For how long this rank has been waiting, of which only seen time counts too.
  void wait(Time passed) {
    if (!own() || !own()->waits) {
      waited_ = Time(0);
      return;
    }
    const std::pair place(own()->group, own()->sequence);
    waited_ = place == waits_for_ ? std::min(waited_ + passed, Time(own()->waited_ms)) : Time(0);
    waits_for_ = place;
  }

  /// Of those that have been silent for too long all, the one that has been so longest first.
  std::optional<WatchdogFault> find_silent() const {
    WatchdogFault fault{WatchdogFault::Kind::unresponsive, {}, ""};
    for (int rank = 0; rank < size(); ++rank) {
      const Peer& peer = peers_[static_cast<std::size_t>(rank)];
      const bool silent = rank != rank_ && peer.last && !is_done(*peer.last) &&
                          peer.silence > options_.heartbeat_timeout;
      if (!silent) continue;
      fault.what += (fault.ranks.empty() ? "" : "; ") + names_of({rank}) +
                    " has given no sign of life for " + in_seconds(peer.silence) +
                    " (killed, stopped or cut off), " + peer.last->activity.did();
      fault.ranks.push_back(rank);
    }
    if (fault.ranks.empty()) return std::nullopt;
    return fault;
  }

  std::optional<WatchdogFault> find_missing() const {
    if (!own() || !own()->waits) return std::nullopt;
    const bool too_long = waited_ > options_.collective_timeout;
    WatchdogFault fault{WatchdogFault::Kind::missing, {}, ""};
    bool finished = false;
    std::string each;
    for (int rank = 0; rank < size(); ++rank) {
      const auto& last = peers_[static_cast<std::size_t>(rank)].last;
      if (rank == rank_ || (last && last->activity.has_called(own()->group, own()->sequence))) {
        continue;
      }
      finished = finished || (last && last->state == Heartbeat::State::finished);
      fault.ranks.push_back(rank);
      each += "; " + names_of({rank}) + ' ' + whereabouts(last);
    }
    // Who is done will not come.
    if (!too_long && !(finished && waited_ > options_.heartbeat_timeout)) return std::nullopt;
    if (fault.ranks.empty()) {
      fault.kind = WatchdogFault::Kind::stuck;
      fault.what = "all ranks have called " + own()->place() + ", for which " + names_of({rank_}) +
                   " has been waiting for " + in_seconds(waited_) + ", but it does not end";
    } else {
      fault.what = names_of(fault.ranks) + (fault.ranks.size() == 1 ? " has" : " have") +
                   " not called " + own()->place() + ", for which " + names_of({rank_}) +
                   " has been waiting for " + in_seconds(waited_) + each;
    }
    return fault;
  }

  static std::string whereabouts(const std::optional<Heartbeat>& last) {
    if (!last) return "has never given a sign of life";
    if (last->state == Heartbeat::State::finished) return "is done, and " + last->activity.doing();
    return "is alive, and " + last->activity.doing();
  }

  int rank_;
  WatchdogOptions options_;
  bool agent_serves_;
  std::vector<Peer> peers_;
  Time store_silence_{0};
  std::pair<int64_t, int64_t> waits_for_{-1, -1};
  Time waited_{0};
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
