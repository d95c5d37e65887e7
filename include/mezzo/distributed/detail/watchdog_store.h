#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/peer_watch.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
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

/// Fields of text, a line each.
class FieldWriter {
 public:
  template <class Number>
  void number(Number value) {
    text(std::to_string(static_cast<int64_t>(value)));
  }
  template <class Number>
  void numbers(const std::vector<Number>& values) {
    number(values.size());
    for (const Number value : values) number(value);
  }
  void text(std::string_view value) { (all_ += one_line(value)) += '\n'; }
  const std::string& all() const noexcept { return all_; }

 private:
  std::string all_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view all) : rest_(all) {}

  void text(std::string& value) {
    const std::size_t end = rest_.find('\n');
    check(end != std::string_view::npos);
    value = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
  }
  template <class Number>
  void number(Number& value) {
    std::string digits;
    text(digits);
    int64_t number = 0;
    const char* const end = digits.data() + digits.size();
    const auto [read_to, error] = std::from_chars(digits.data(), end, number);
    check(error == std::errc() && read_to == end);
    value = static_cast<Number>(number);
  }
  template <class Number>
  void numbers(std::vector<Number>& values) {
    int64_t left = 0;
    for (number(left); left > 0; --left) number(values.emplace_back());
  }

 private:
  static void check(bool is_ours) {
    TORCH_CHECK(is_ours,
                "Watchdog: the store holds something else under a key of the watchdog's; give it a "
                "store of its own, as mezzo::rendezvous makes");
  }

  std::string_view rest_;
};

/// What is written and read of each, in one order.
template <class Fields, class Value>
void visit_fields(Fields& fields, Value& value) {
  if constexpr (std::same_as<std::remove_const_t<Value>, WatchdogFault>) {
    fields.number(value.kind);
    fields.numbers(value.ranks);
    fields.text(value.what);
  } else {
    fields.number(value.count);
    fields.number(value.state);
    fields.numbers(value.activity.calls);
    fields.number(value.activity.waits);
    fields.number(value.activity.waited_ms);
    fields.number(value.activity.group);
    fields.number(value.activity.sequence);
    fields.text(value.activity.collective);
  }
}

template <class Value>
std::string encode(const Value& value) {
  FieldWriter to;
  visit_fields(to, value);
  return to.all();
}

template <class Value>
Value decode(std::string_view text) {
  FieldReader from(text);
  Value value;
  visit_fields(from, value);
  return value;
}

inline WatchdogFault connection_broke(const std::exception& error, const std::string& last_seen) {
  return {WatchdogFault::Kind::unresponsive,
          {0},
          "the connection to rank 0, which hosts the store, broke (killed, or ended without a "
          "word): " +
              one_line(error.what()) + last_seen};
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
  }

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
  std::string prefix_;
  std::vector<bool> has_come_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
