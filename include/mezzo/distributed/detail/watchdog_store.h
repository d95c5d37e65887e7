#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/peer_watch.h>
#include <mezzo/distributed/rendezvous.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <istream>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A line, so that words from elsewhere do not look like another field: control characters become
/// blanks, and backtraces are cut off.
inline std::string one_line(std::string_view words) {
  constexpr std::size_t kMost = 1000;
  const std::size_t backtrace = words.find("\nException raised from ");
  std::string line(words.substr(0, std::min(backtrace, kMost)));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return line;
}

// Signs of life and faults as text: numbers, and words of one line.

template <class Number>
void write_all(std::ostream& to, const std::vector<Number>& values) {
  to << values.size() << ' ';
  for (const Number value : values) to << value << ' ';
}
template <class Number>
void read_all(std::istream& from, std::vector<Number>& values) {
  std::size_t left = 0;
  for (from >> left; left > 0 && from; --left) from >> values.emplace_back();
}

inline std::string encode(const WatchdogFault& fault) {
  std::ostringstream to;
  to << static_cast<int>(fault.kind) << ' ';
  write_all(to, fault.ranks);
  to << '\n' << one_line(fault.what) << '\n';
  return to.str();
}
inline std::string encode(const Heartbeat& own) {
  const RankActivity& activity = own.activity;
  std::ostringstream to;
  to << own.count << ' ' << static_cast<int>(own.state) << ' ';
  write_all(to, activity.calls);
  to << activity.waits << ' ' << activity.waited_ms << ' ' << activity.group << ' '
     << activity.sequence << '\n'
     << one_line(activity.collective) << '\n';
  return to.str();
}

inline void read(std::istream& from, WatchdogFault& fault) {
  int kind = 0;
  from >> kind;
  fault.kind = static_cast<WatchdogFault::Kind>(kind);
  read_all(from, fault.ranks);
  std::getline(from >> std::ws, fault.what);
}
inline void read(std::istream& from, Heartbeat& other) {
  RankActivity& activity = other.activity;
  int state = 0;
  from >> other.count >> state;
  other.state = static_cast<Heartbeat::State>(state);
  read_all(from, activity.calls);
  from >> activity.waits >> activity.waited_ms >> activity.group >> activity.sequence;
  from.ignore();
  std::getline(from, activity.collective);
}

template <class Value>
Value decode(const std::string& text) {
  std::istringstream from(text);
  Value value;
  read(from, value);
  TORCH_CHECK(!from.fail(),
              "Watchdog: the store holds something else under a key of the watchdog's; give it a "
              "store of its own, as mezzo::rendezvous makes");
  return value;
}

/// What the ranks' watchdogs tell each other through the store. One thread's at a time.
class WatchdogStore {
 public:
  /// Several watchdogs may use one store in turn: each has keys of its own.
  WatchdogStore(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), has_come_(static_cast<std::size_t>(size), false) {
    const std::string all = "mezzo/watchdog/";
    const int64_t number = store_->add(all + "starts/" + std::to_string(rank_), 1);
    prefix_ = all + std::to_string(number) + '/';
    store_->compareSet(fault_key(), "", kNoFault);
    agent_serves_ = store_->check({kAgentServes});
  }

  /// Is it torchrun's agent that serves the store, and not rank 0?
  bool agent_serves() const noexcept { return agent_serves_; }

  /// Gives a sign of life.
  void put(const Heartbeat& own) { store_->set(key_of(rank_), encode(own)); }

  struct News {
    std::vector<std::optional<Heartbeat>> heartbeats;  ///< an element a rank, empty: not yet come
    std::optional<WatchdogFault> fault;                ///< that one of them has found
  };

  /// `own` is this rank's sign of life, which need not be fetched.
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
      if (has_come_[rank]) news.heartbeats[rank] = decode<Heartbeat>(text(i++));
    }
    news.heartbeats[static_cast<std::size_t>(rank_)] = own;
    if (text(0) != kNoFault) news.fault = decode<WatchdogFault>(text(0));
    return news;
  }

  /// \returns the fault that was published first, by whichever rank.
  WatchdogFault publish(const WatchdogFault& fault) {
    return decode<WatchdogFault>(store_->compareSet(fault_key(), kNoFault, encode(fault)));
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
