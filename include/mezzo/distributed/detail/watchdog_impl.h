#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/rendezvous.h>
#include <mezzo/distributed/watchdog.h>
#include <mezzo/distributed/watchdog_options.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The collectives that a rank has called, and the one for which it waits.
struct RankActivity {
  std::vector<int64_t> calls = {};  ///< by group: how many collectives this rank has called

  // The collective for which the rank has waited longest, or which it has called last.
  bool waits = false;
  int64_t waited_ms = 0;
  int64_t group = 0;
  int64_t sequence = 0;  ///< from 1; 0: the rank has called none
  std::string collective = {};

  bool has_called(int64_t of, int64_t number) const {
    return of < static_cast<int64_t>(calls.size()) && calls[static_cast<std::size_t>(of)] >= number;
  }

  /// Returns "all_reduce(sum) of 8 Float (collective 3)", with the number of any group but the
  /// first.
  std::string place() const {
    std::string where = collective + " (collective " + std::to_string(sequence);
    if (group > 0) where += " of group " + std::to_string(group);
    return where + ')';
  }

  /// Returns "is waiting for ..." or "last called ...".
  std::string doing() const {
    if (waits) {
      return "is waiting for " + place() + " since " +
             in_seconds(std::chrono::milliseconds(waited_ms));
    }
    if (sequence > 0) return "last called " + place();
    return "has called no collective";
  }

  /// Returns what the rank did at its last sign of life: "when last seen it ...".
  std::string did() const {
    if (waits) return "when last seen it waited for " + place();
    if (sequence > 0) return "when last seen it had last called " + place();
    return "when last seen it had called no collective";
  }
};

/// Logs the collectives that this rank calls, and those for which it waits, in the groups that a
/// watchdog watches. Any thread may call it.
class CollectiveLog {
 public:
  /// A call, by its number among the calls of its group.
  struct Entry {
    int64_t group = 0;
    int64_t sequence = 0;
    CollectiveCall call = c10d::OpType::BARRIER;

    bool operator==(const Entry&) const = default;
  };

  int64_t add_group() {
    const std::lock_guard lock(mutex_);
    calls_.push_back(0);
    return static_cast<int64_t>(calls_.size()) - 1;
  }

  Entry called(int64_t group, const CollectiveCall& call) {
    const std::lock_guard lock(mutex_);
    before_last_ = last_;
    last_ = {group, ++calls_[static_cast<std::size_t>(group)], call};
    return last_;
  }

  /// Takes back a call that was refused. Another thread may have called another group meanwhile.
  void refused(const Entry& entry) {
    const std::lock_guard lock(mutex_);
    --calls_[static_cast<std::size_t>(entry.group)];
    if (last_ == entry) last_ = before_last_;
    if (before_last_ == entry) before_last_ = {};
  }

  /// While a Waiting lives, its entry counts as waited for.
  class Waiting {
   public:
    Waiting(CollectiveLog& log, const Entry& entry) : log_(log) {
      const std::lock_guard lock(log_.mutex_);
      place_ = log_.waits_.insert(log_.waits_.end(), {entry, std::chrono::steady_clock::now()});
    }
    ~Waiting() {
      const std::lock_guard lock(log_.mutex_);
      log_.waits_.erase(place_);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    CollectiveLog& log_;
    std::list<std::pair<Entry, std::chrono::steady_clock::time_point>>::iterator place_;
  };

  RankActivity activity() const {
    const std::lock_guard lock(mutex_);
    RankActivity activity{.calls = calls_, .waits = !waits_.empty()};
    Entry entry = last_;
    if (activity.waits) {
      const auto& [longest, since] = waits_.front();
      entry = longest;
      activity.waited_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                               std::chrono::steady_clock::now() - since)
                               .count();
    }
    activity.group = entry.group;
    activity.sequence = entry.sequence;
    activity.collective = entry.sequence > 0 ? entry.call.name() : "";
    return activity;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int64_t> calls_;
  Entry last_;
  Entry before_last_;
  std::list<std::pair<Entry, std::chrono::steady_clock::time_point>> waits_;  ///< the oldest first
};

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

// mpirun leaves a rank a second between SIGTERM and SIGKILL. Ranks that are told to end give signs
// of life quickly, so that a rank that gives none is noticed soon.
inline constexpr std::chrono::milliseconds kIntervalWhenTerminated(50);
inline constexpr std::chrono::milliseconds kSilenceWhenTerminated(250);
inline constexpr std::chrono::milliseconds kExplainAfter(350);

/// Judges the signs of life of the other ranks. It reads no clock: callers give the time between
/// two looks at all ranks. Of a longer time only two intervals count, for then this rank was
/// stopped.
class PeerWatch {
 public:
  using Time = std::chrono::milliseconds;

  /// `agent_serves`: no rank serves the store, but torchrun's agent.
  PeerWatch(int rank, int size, const WatchdogOptions& options, bool agent_serves = false)
      : rank_(rank),
        options_(options),
        agent_serves_(agent_serves),
        peers_(static_cast<std::size_t>(size)) {}

  /// Called when the store has answered. `heartbeats` has an element for each rank, empty if the
  /// rank has not come, all read at one time.
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

  /// Called when the store has not answered for the time `passed`. Returns a fault, if it has not
  /// answered for too long.
  std::optional<WatchdogFault> look_without_answer(Time passed) {
    store_silence_ += std::min(passed, 2 * options_.interval);
    if (store_silence_ <= options_.heartbeat_timeout) return std::nullopt;
    WatchdogFault fault{WatchdogFault::Kind::unresponsive, {}, ""};
    blame_server(fault, "",
                 " has not answered for " + in_seconds(store_silence_) + " (stopped or cut off)");
    return fault;
  }

  /// Returns the fault of a broken connection to the store; `words` are c10d's message.
  WatchdogFault connection_broke(const std::string& words) const {
    WatchdogFault fault{WatchdogFault::Kind::unresponsive, {}, ""};
    blame_server(fault, "the connection to ", " broke (killed, or ended without a word): " + words);
    return fault;
  }

  /// Returns the ranks that may still report `fault`: all that are not known to be dead or done.
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

  /// Returns, a while after SIGTERM, a fault that names the ranks that are gone. `store_silence` is
  /// the time since the store's last answer.
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

  /// Adds to the fault that something happened to the server of the store, named between `before`
  /// and `after`: rank 0, with what it did when last seen, or torchrun's agent, for which no rank
  /// is blamed.
  void blame_server(WatchdogFault& fault, const char* before, const std::string& after) const {
    fault.what += before + std::string(agent_serves_ ? "torchrun's agent" : "rank 0") +
                  ", which hosts the store," + after;
    if (agent_serves_) return;
    fault.ranks = {0};
    if (const auto& last = peers_[0].last) fault.what += "; " + last->activity.did();
  }

  int size() const noexcept { return static_cast<int>(peers_.size()); }
  /// Returns what this rank does; null until it has given its first sign of life.
  const RankActivity* own() const {
    const auto& last = peers_[static_cast<std::size_t>(rank_)].last;
    return last ? &last->activity : nullptr;
  }
  static bool is_done(const Heartbeat& heartbeat) {
    return heartbeat.state == Heartbeat::State::finished ||
           heartbeat.state == Heartbeat::State::ended ||
           heartbeat.state == Heartbeat::State::failed;
  }

  /// Counts the time that this rank has been waiting for one collective, as the looks saw it.
  void wait(Time passed) {
    if (!own() || !own()->waits) {
      waited_ = Time(0);
      return;
    }
    const std::pair place(own()->group, own()->sequence);
    waited_ = place == waits_for_ ? std::min(waited_ + passed, Time(own()->waited_ms)) : Time(0);
    waits_for_ = place;
  }

  /// Returns a fault that names all ranks that have been silent for too long.
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
    // A rank that is done will not come.
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

/// Returns `words` as one line, so that they cannot look like another field of a message: control
/// characters become blanks, and backtraces are cut off.
inline std::string one_line(std::string_view words) {
  constexpr std::size_t kMost = 1000;
  const std::size_t backtrace = words.find("\nException raised from ");
  std::string line(words.substr(0, std::min(backtrace, kMost)));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return line;
}

/// A sign of life or a fault as the store holds it: numbers, and a line of words.
struct StoredMessage {
  std::vector<int64_t> numbers{};
  std::string words{};

  std::string text() const {
    std::string text;
    for (const int64_t number : numbers) text += std::to_string(number) + ' ';
    return text + '\n' + one_line(words);
  }
  /// \throws c10::Error where that is no message, or has fewer than `least` numbers
  static StoredMessage read(const std::string& text, std::size_t least) {
    StoredMessage message;
    const std::size_t end = text.find('\n');
    std::istringstream numbers(text.substr(0, end));
    for (int64_t number = 0; numbers >> number;) message.numbers.push_back(number);
    TORCH_CHECK(end != std::string::npos && message.numbers.size() >= least,
                "Watchdog: the store holds something else under a key of the watchdog's; give it a "
                "store of its own, as mezzo::rendezvous makes");
    message.words = text.substr(end + 1);
    return message;
  }
};

inline std::string encode(const WatchdogFault& fault) {
  StoredMessage message{{static_cast<int64_t>(fault.kind)}, fault.what};
  message.numbers.insert(message.numbers.end(), fault.ranks.begin(), fault.ranks.end());
  return message.text();
}
inline std::string encode(const Heartbeat& own) {
  const RankActivity& of = own.activity;
  StoredMessage message{{own.count, static_cast<int64_t>(own.state), int64_t{of.waits},
                         of.waited_ms, of.group, of.sequence},
                        of.collective};
  message.numbers.insert(message.numbers.end(), of.calls.begin(), of.calls.end());
  return message.text();
}

inline WatchdogFault decode_fault(const std::string& text) {
  const auto [numbers, words] = StoredMessage::read(text, 1);
  WatchdogFault fault{static_cast<WatchdogFault::Kind>(numbers[0]), {}, words};
  for (std::size_t i = 1; i < numbers.size(); ++i) {
    fault.ranks.push_back(static_cast<int>(numbers[i]));
  }
  return fault;
}
inline Heartbeat decode_heartbeat(const std::string& text) {
  const auto [numbers, words] = StoredMessage::read(text, 6);
  return {.count = numbers[0],
          .state = static_cast<Heartbeat::State>(numbers[1]),
          .activity = {.calls = {numbers.begin() + 6, numbers.end()},
                       .waits = numbers[2] != 0,
                       .waited_ms = numbers[3],
                       .group = numbers[4],
                       .sequence = numbers[5],
                       .collective = words}};
}

/// The messages that the ranks' watchdogs exchange through the store. For one thread at a time.
class WatchdogStore {
 public:
  /// Each watchdog has its own keys, so that several may use one store in turn.
  WatchdogStore(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), has_come_(static_cast<std::size_t>(size), false) {
    const std::string all = "mezzo/watchdog/";
    const int64_t number = store_->add(all + "starts/" + std::to_string(rank_), 1);
    prefix_ = all + std::to_string(number) + '/';
    store_->compareSet(fault_key(), "", kNoFault);
    agent_serves_ = store_->check({kAgentServes});
  }

  /// Returns whether torchrun's agent serves the store, and not rank 0.
  bool agent_serves() const noexcept { return agent_serves_; }

  /// Gives a sign of life.
  void put(const Heartbeat& own) { store_->set(key_of(rank_), encode(own)); }

  struct News {
    std::vector<std::optional<Heartbeat>> heartbeats;  ///< an element a rank, empty: not yet come
    std::optional<WatchdogFault> fault;                ///< the fault that a rank has found
  };

  /// Reads all messages. `own` is this rank's sign of life, which need not be fetched.
  News read(const Heartbeat& own) {
    find_who_has_come();
    std::vector<std::string> keys = {fault_key()};
    for (std::size_t rank = 0; rank < has_come_.size(); ++rank) {
      if (has_come_[rank]) keys.push_back(key_of(static_cast<int>(rank)));
    }
    const std::vector<std::vector<uint8_t>> values = store_->multiGet(keys);
    const auto text = [&](std::size_t i) {
      return std::string(values[i].begin(), values[i].end());
    };
    News news;
    news.heartbeats.resize(has_come_.size());
    for (std::size_t rank = 0, i = 1; rank < has_come_.size(); ++rank) {
      if (has_come_[rank]) news.heartbeats[rank] = decode_heartbeat(text(i++));
    }
    news.heartbeats[static_cast<std::size_t>(rank_)] = own;
    if (text(0) != kNoFault) news.fault = decode_fault(text(0));
    return news;
  }

  /// Publishes a fault. Returns the one that was published first, by whichever rank.
  WatchdogFault publish(const WatchdogFault& fault) {
    return decode_fault(store_->compareSet(fault_key(), kNoFault, encode(fault)));
  }

 private:
  static constexpr const char* kNoFault = "none";

  std::string key_of(int rank) const { return prefix_ + std::to_string(rank); }
  std::string fault_key() const { return prefix_ + "fault"; }

  void find_who_has_come() {
    for (int rank = 0; rank < static_cast<int>(has_come_.size()); ++rank) {
      const auto number = static_cast<std::size_t>(rank);
      if (rank != rank_ && !has_come_[number]) has_come_[number] = store_->check({key_of(rank)});
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  bool agent_serves_ = false;
  std::string prefix_;
  std::vector<bool> has_come_;
};

/// The state of SIGTERM in this process: whether it came, and how many watchdogs wait for it.
struct TerminationState {
  std::atomic<bool> received{false};
  std::atomic<int> users{0};
  std::mutex mutex;  // of users that come and go, and of the handler
};

/// Returns the process's state, which shared libraries share.
__attribute__((visibility("default"))) inline TerminationState& termination_state() {
  static TerminationState state;
  return state;
}

/// Ends the process as SIGTERM does where nobody handles it.
inline void obey_termination() {
  signal(SIGTERM, SIG_DFL);
  raise(SIGTERM);
}

/// The handler of SIGTERM. It may stay when no watchdog is left, where several libraries have one.
inline void note_termination(int /*signal*/) {
  TerminationState& state = termination_state();  // made before the handler was installed
  state.received = true;
  if (state.users == 0) obey_termination();
}

/// While a TerminationSignal lives, SIGTERM is noticed and does nothing else, unless the program
/// has its own handler, or ignores the signal.
class TerminationSignal {
 public:
  explicit TerminationSignal(bool wanted) : wanted_(wanted) {
    if (!wanted_) return;
    const std::lock_guard lock(termination_state().mutex);
    ++termination_state().users;
    struct sigaction present {};
    sigaction(SIGTERM, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) != 0 || present.sa_handler != SIG_DFL) return;
    struct sigaction noting {};
    noting.sa_handler = note_termination;
    noting.sa_flags = SA_RESTART;
    sigemptyset(&noting.sa_mask);
    sigaction(SIGTERM, &noting, nullptr);
  }
  ~TerminationSignal() {
    if (!wanted_) return;
    const std::lock_guard lock(termination_state().mutex);
    if (--termination_state().users > 0) return;
    struct sigaction present {};
    sigaction(SIGTERM, nullptr, &present);
    if (present.sa_handler == note_termination) signal(SIGTERM, SIG_DFL);
  }
  TerminationSignal(const TerminationSignal&) = delete;
  TerminationSignal& operator=(const TerminationSignal&) = delete;

  bool received() const { return wanted_ && termination_state().received; }

 private:
  bool wanted_;
};

/// Flushes stdio, unless a thread that is stuck holds it.
inline void try_to_flush() {
  const auto flushed = std::make_shared<std::promise<void>>();
  std::thread([flushed] {
    std::fflush(nullptr);
    flushed->set_value();
  }).detach();
  flushed->get_future().wait_for(std::chrono::milliseconds(200));
}

/// Reports why a rank ends, and what it was `doing`.
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

/// Ends the process. Returns only if `options.end` does.
inline void end_process(const WatchdogOptions& options, const WatchdogFault& fault) {
  if (options.end) return options.end(fault);
  try_to_flush();
  std::_Exit(kWatchdogExitStatus);
}

/// The two threads of a watchdog, and their common state.
///
/// One thread exchanges signs of life, and may be stuck in the store for as long as rank 0 is
/// stopped. The other never uses the store: it watches the first thread, and SIGTERM. The thread
/// that knows of a fault first reports it and ends the process.
class WatchdogThreads : public std::enable_shared_from_this<WatchdogThreads> {
 public:
  using Clock = std::chrono::steady_clock;

  WatchdogThreads(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                  const WatchdogOptions& options, std::shared_ptr<CollectiveLog> log)
      : rank_(rank),
        size_(size),
        options_(options),
        log_(std::move(log)),
        termination_(options.explain_sigterm),
        store_(std::move(store), rank, size),
        peers_(rank, size, options, store_.agent_serves()) {
    store_.put(sign_of_life());
  }

  void start() {
    exchanging_ = std::thread([self = shared_from_this()] {
      self->exchange_until_over();
      const std::lock_guard lock(self->mutex_);
      self->has_stopped_exchanging_ = true;
      self->changed_.notify_all();
    });
    looking_ = std::thread([self = shared_from_this()] { self->look_until_over(); });
  }

  /// Tells the others that this rank is done. Returns when they know, and on rank 0 when they are
  /// done too.
  void finish() {
    std::unique_lock lock(mutex_);
    if (!is_settled_) state_ = Heartbeat::State::finished;
    wait_for_end(lock);
  }

  /// Tells the others that this rank failed. Returns when they have read it, or after four
  /// intervals. If there is another fault, it may end the process.
  void fail(const std::string& what) {
    std::unique_lock lock(mutex_);
    if (!is_settled_) failure_ = what;
    wait_for_end(lock);
  }

  /// Called after `finish` or `fail`. A thread that never comes back from the store is detached,
  /// and keeps this object.
  void join() {
    looking_.join();
    std::unique_lock lock(mutex_);
    const bool stopped =
        changed_.wait_for(lock, 2 * options_.interval, [&] { return has_stopped_exchanging_; });
    lock.unlock();
    if (stopped) {
      exchanging_.join();
    } else {
      exchanging_.detach();
    }
  }

 private:
  void wake() {
    is_woken_ = true;
    changed_.notify_all();
  }

  void wait_for_end(std::unique_lock<std::mutex>& lock) {
    wake();
    changed_.wait(lock, [&] { return is_over_; });
  }

  void over() {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }

  static std::chrono::milliseconds since(Clock::time_point then) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then);
  }

  Heartbeat sign_of_life() {
    RankActivity activity = log_->activity();
    const std::lock_guard lock(mutex_);
    return {.count = ++count_, .state = state_, .activity = std::move(activity)};
  }

  void exchange_until_over() {
    try {
      exchange_until_done();
    } catch (const std::exception& error) {
      std::unique_lock lock(mutex_);
      const WatchdogFault fault = peers_.connection_broke(one_line(error.what()));
      // Rank 0 goes when all are done.
      const bool expected = state_ == Heartbeat::State::finished || failure_;
      lock.unlock();
      expected ? over() : settle(fault, false);
    }
  }

  void exchange_until_done() {
    for (;;) {
      const std::optional<WatchdogFault> fault = exchange();
      std::unique_lock lock(mutex_);
      if (is_over_) return;
      // This rank has said so, and on rank 0 all others have too.
      const bool is_done = state_ == Heartbeat::State::finished && !is_woken_ &&
                           (rank_ != 0 || peers_.all_others_finished());
      if (failure_ || fault || is_done) {
        const std::optional<std::string> failure = failure_;
        lock.unlock();
        if (failure) return publish_failure(*failure);
        return fault ? settle(*fault, true) : over();
      }
      const bool terminated = state_ == Heartbeat::State::terminated;
      changed_.wait_for(lock, terminated ? kIntervalWhenTerminated : options_.interval,
                        [&] { return is_woken_; });
      is_woken_ = false;
    }
  }

  /// Gives a sign of life, and reads those of the others. Returns the fault, the same on all ranks,
  /// if this rank or another has found one.
  std::optional<WatchdogFault> exchange() {
    const Heartbeat own = sign_of_life();
    store_.put(own);
    // Rank 0 may end now, if this was the last rank, and its store with it.
    if (own.state == Heartbeat::State::finished && rank_ != 0) return std::nullopt;
    const WatchdogStore::News news = store_.read(own);
    std::unique_lock lock(mutex_);
    const auto passed = since(last_answer_);
    last_answer_ += passed;
    peers_.look(passed, news.heartbeats);
    if (is_settled_ || failure_) return std::nullopt;
    if (news.fault) return news.fault;
    const std::optional<WatchdogFault> found = peers_.judge();
    lock.unlock();
    return found ? std::optional(store_.publish(*found)) : std::nullopt;
  }

  void publish_failure(const std::string& words) {
    const WatchdogFault fault = store_.publish({WatchdogFault::Kind::failed,
                                                {rank_},
                                                names_of({rank_}) + " failed: " + one_line(words) +
                                                    "; it " + sign_of_life().activity.doing()});
    if (!claim(Heartbeat::State::failed, std::nullopt)) return;
    linger(fault, true);
    over();
  }

  /// Returns whether the calling thread is the one that deals with the end; only one is. `to_end`
  /// is the fault for which the process must be ended.
  bool claim(Heartbeat::State state, const std::optional<WatchdogFault>& to_end) {
    const std::lock_guard lock(mutex_);
    if (is_settled_) return false;
    is_settled_ = true;
    settled_at_ = Clock::now();
    state_ = state;
    to_end_ = to_end;
    return true;
  }

  void look_until_over() {
    const auto tick = std::min(options_.interval / 4, std::chrono::milliseconds(50));
    auto last = Clock::now();
    for (;;) {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, tick, [&] { return is_over_; })) return;
      const auto passed = since(last);
      last += passed;
      if (look(passed, lock)) return;
    }
  }

  /// Returns whether there is nothing more to look for.
  bool look(std::chrono::milliseconds passed, std::unique_lock<std::mutex>& lock) {
    if (termination_.received() && state_ == Heartbeat::State::running) {
      state_ = Heartbeat::State::terminated;
      wake();
      explain_termination(lock);
      return true;
    }
    if (is_settled_) {
      // The thread that deals with the end may be stuck in a store that has stopped since.
      if (Clock::now() < settled_at_ + 6 * options_.interval) return false;
      lock.unlock();
      conclude();
      return true;
    }
    const auto fault = peers_.look_without_answer(passed);
    if (!fault) return false;
    lock.unlock();
    settle(*fault, false);
    return true;
  }

  void explain_termination(std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, kExplainAfter, [&] { return is_over_; });
    const bool mine = !std::exchange(is_settled_, true);
    settled_at_ = Clock::now();
    const WatchdogFault fault = peers_.explain_end(since(last_answer_));
    lock.unlock();
    if (mine) report(fault);
    obey_termination();
  }

  void settle(const WatchdogFault& fault, bool store_answers) {
    if (!claim(Heartbeat::State::ended, fault)) return;
    report(fault);
    linger(fault, store_answers);
    conclude();
  }

  void conclude() {
    std::unique_lock lock(mutex_);
    const std::optional<WatchdogFault> fault = std::exchange(to_end_, std::nullopt);
    lock.unlock();
    if (fault) end_process(options_, *fault);
    over();
  }

  /// Waits until all ranks have reported, for a launcher ends the others when the first one goes.
  void linger(const WatchdogFault& fault, bool store_answers) {
    const auto until = Clock::now() + 3 * options_.interval;
    const auto pause = std::clamp(options_.interval / 4, std::chrono::milliseconds(5),
                                  std::chrono::milliseconds(250));
    try {
      while (store_answers && Clock::now() < until) {
        exchange();
        {
          const std::lock_guard lock(mutex_);
          if (peers_.others_to_report(fault).empty()) return;
        }
        std::this_thread::sleep_for(pause);
      }
      if (store_answers) return;
    } catch (const std::exception&) {  // rank 0 has gone, and the store with it
    }
    // Each rank notices within an interval that the store is gone.
    std::this_thread::sleep_for(options_.interval * 3 / 2);
  }

  void report(const WatchdogFault& fault) {
    report_end(options_, fault, rank_, size_, sign_of_life().activity.doing());
  }

  const int rank_;
  const int size_;
  const WatchdogOptions options_;
  const std::shared_ptr<CollectiveLog> log_;
  TerminationSignal termination_;

  WatchdogStore store_;  // of the thread that exchanges

  std::mutex mutex_;   // what follows
  int64_t count_ = 0;  ///< signs of life
  std::condition_variable changed_;
  PeerWatch peers_;
  Clock::time_point last_answer_ = Clock::now();  ///< of the store
  Heartbeat::State state_ = Heartbeat::State::running;
  std::optional<std::string> failure_;  ///< what `fail` was told
  bool is_woken_ = false;               ///< the thread that exchanges is to do so at once
  bool is_settled_ = false;             ///< one of the threads reports, or has
  Clock::time_point settled_at_;
  std::optional<WatchdogFault> to_end_;  ///< for which the process is still to be ended
  bool is_over_ = false;                 ///< nothing is watched any more
  bool has_stopped_exchanging_ = false;

  std::thread exchanging_;
  std::thread looking_;
};

/// A collective whose waiting is logged.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(WorkPtr under, std::shared_ptr<CollectiveLog> log, const CollectiveLog::Entry& entry)
      : Work(-1, entry.call.collective),
        under_(std::move(under)),
        log_(std::move(log)),
        entry_(entry) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const CollectiveLog::Waiting waiting(*log_, entry_);
    return under_->wait(timeout);
  }
  bool isCompleted() override { return under_->isCompleted(); }
  bool isSuccess() const override { return under_->isSuccess(); }
  std::exception_ptr exception() const override { return under_->exception(); }
  std::vector<at::Tensor> result() override { return under_->result(); }
  void synchronize() override { under_->synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return under_->getFuture(); }

 private:
  WorkPtr under_;
  std::shared_ptr<CollectiveLog> log_;
  CollectiveLog::Entry entry_;
};

/// Passes every collective on to another backend, and logs the calls and the waiting.
class WatchedBackend final : public c10d::Backend {
 public:
  WatchedBackend(GroupPtr under, std::shared_ptr<CollectiveLog> log)
      : Backend(under->getRank(), under->getSize()),
        under_(std::move(under)),
        log_(std::move(log)),
        number_(log_->add_group()) {}

  const std::string getBackendName() const override { return under_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return under_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { under_->setTimeout(timeout); }
  void abort() override { under_->abort(); }
  void shutdown() override { under_->shutdown(); }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override {
    return launch(c10d::OpType::ALLREDUCE, tensors, options.reduceOp, 0,
                  [&] { return under_->allreduce(tensors, options); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override {
    return launch(c10d::OpType::BROADCAST, tensors, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->broadcast(tensors, options); });
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors,
                 const c10d::ReduceOptions& options = {}) override {
    return launch(c10d::OpType::REDUCE, tensors, options.reduceOp, options.rootRank,
                  [&] { return under_->reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options = {}) override {
    return launch(c10d::OpType::ALLGATHER, inputs, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->allgather(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& options = {}) override {
    return launch(c10d::OpType::GATHER, inputs, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->gather(outputs, inputs, options); });
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options = {}) override {
    return launch(c10d::OpType::SCATTER, outputs, c10d::ReduceOp::SUM, options.rootRank,
                  [&] { return under_->scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& options = {}) override {
    return launch(c10d::OpType::REDUCE_SCATTER, outputs, options.reduceOp, 0,
                  [&] { return under_->reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& options = {}) override {
    return launch(c10d::OpType::ALLTOALL, inputs, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->alltoall(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options = {}) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, {input}, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->_allgather_base(output, input, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override {
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, options.reduceOp, 0,
                  [&] { return under_->_reduce_scatter_base(output, input, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options = {}) override {
    return launch(c10d::OpType::ALLTOALL_BASE, {input}, c10d::ReduceOp::SUM, 0, [&] {
      return under_->alltoall_base(output, input, output_sizes, input_sizes, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override {
    return launch(c10d::OpType::BARRIER, {}, c10d::ReduceOp::SUM, 0,
                  [&] { return under_->barrier(options); });
  }

 private:
  template <class Start>
  WorkPtr launch(c10d::OpType collective, const std::vector<at::Tensor>& inputs,
                 c10d::ReduceOp::RedOpType op, int64_t root, const Start& start) {
    CollectiveCall call(collective);
    call.reduction = op;
    call.root = static_cast<int>(root);
    for (const at::Tensor& input : inputs) {
      if (!input.defined()) continue;  // which the backend refuses
      call.dtype = input.scalar_type();
      call.numel += input.numel();
    }
    const CollectiveLog::Entry entry = log_->called(number_, call);
    try {
      // Starting a collective may wait for other ranks, as NCCL's first one does.
      const CollectiveLog::Waiting waiting(*log_, entry);
      return c10::make_intrusive<WatchedWork>(start(), log_, entry);
    } catch (...) {
      log_->refused(entry);
      throw;
    }
  }

  GroupPtr under_;
  std::shared_ptr<CollectiveLog> log_;
  int64_t number_;  ///< in the log
};

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
