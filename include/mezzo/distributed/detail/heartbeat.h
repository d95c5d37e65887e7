#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string in_seconds(std::chrono::milliseconds time) {
  const auto tenths = (time.count() + 50) / 100;
  return std::to_string(tenths / 10) + '.' + std::to_string(tenths % 10) + " s";
}

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

/// Fields of text, a line each, written and read in one order.
class FieldWriter {
 public:
  void number(int64_t value) { text(std::to_string(value)); }
  void text(std::string_view value) { (all_ += one_line(value)) += '\n'; }
  const std::string& all() const noexcept { return all_; }

 private:
  std::string all_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view all) : rest_(all) {}

  std::string text() {
    const std::size_t end = rest_.find('\n');
    TORCH_CHECK(end != std::string_view::npos,
                "Watchdog: the store holds something else under a key of the watchdog's");
    std::string value(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return value;
  }
  int64_t number() {
    const std::string value = text();
    int64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto [read_to, error] = std::from_chars(value.data(), end, number);
    TORCH_CHECK(error == std::errc() && read_to == end,
                "Watchdog: the store holds something else under a key of the watchdog's");
    return number;
  }

 private:
  std::string_view rest_;
};

/// A rank's sign of life.
struct Heartbeat {
  enum class State : uint8_t {
    running,
    told,  ///< by a signal, to end
    failed,
    finished,  ///< done; its process may be gone
    ended,     ///< has reported a fault
  };

  int64_t count = 0;
  State state = State::running;
  std::vector<int64_t> calls = {};  ///< a communicator: how many collectives this rank has called

  using Waited = std::chrono::milliseconds;

  // The collective that it waits for longest, or has called last.
  bool waits = false;
  int64_t waited_ms = 0;
  int64_t communicator = 0;
  int64_t sequence = 0;  ///< from 1; 0: it has called none
  std::string collective = {};

  bool has_called(int64_t of, int64_t number) const {
    return of < static_cast<int64_t>(calls.size()) && calls[static_cast<std::size_t>(of)] >= number;
  }

  /// "all_reduce(sum) of 8 Float (collective 3)", and of further communicators which.
  std::string place() const {
    std::string where = collective + " (collective " + std::to_string(sequence);
    if (communicator > 0) where += " of communicator " + std::to_string(communicator);
    return where + ')';
  }

  /// "is waiting for ...", "last called ...".
  std::string doing() const {
    if (waits) return "is waiting for " + place() + " since " + in_seconds(Waited(waited_ms));
    if (sequence > 0) return "last called " + place();
    return "has called no collective";
  }

  /// The same of a sign of life after which there were none.
  std::string did() const {
    if (waits) return "when last seen it waited for " + place();
    if (sequence > 0) return "when last seen it had last called " + place();
    return "when last seen it had called no collective";
  }

  std::string encode() const {
    FieldWriter to;
    to.number(count);
    to.number(static_cast<int64_t>(state));
    to.number(static_cast<int64_t>(calls.size()));
    for (const int64_t number : calls) to.number(number);
    to.number(waits ? 1 : 0);
    to.number(waited_ms);
    to.number(communicator);
    to.number(sequence);
    to.text(collective);
    return to.all();
  }

  static Heartbeat decode(std::string_view text) {
    FieldReader from(text);
    Heartbeat heartbeat;
    heartbeat.count = from.number();
    heartbeat.state = static_cast<State>(from.number());
    for (int64_t left = from.number(); left > 0; --left) heartbeat.calls.push_back(from.number());
    heartbeat.waits = from.number() != 0;
    heartbeat.waited_ms = from.number();
    heartbeat.communicator = from.number();
    heartbeat.sequence = from.number();
    heartbeat.collective = from.text();
    return heartbeat;
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
