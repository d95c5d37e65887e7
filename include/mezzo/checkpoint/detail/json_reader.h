#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Reads untrusted JSON without recursion. Throws c10::Error for malformed text, strings that are
/// not UTF-8, duplicate keys, and a next value of another type than the function reads.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : rest_(text), size_(text.size()) {}

  /// Calls `read_element()`, which must read one value, for each element.
  template <class ReadElement>
  void read_array(const ReadElement& read_element, char open = '[', char close = ']') {
    expect(open);
    for (bool is_first = true; peek() != close; is_first = false) {
      if (!is_first) expect(',');
      read_element();
    }
    expect(close);
  }
  /// Calls `read_value(key)`, which must read one value, for each key.
  template <class ReadValue>
  void read_object(const ReadValue& read_value) {
    std::set<std::string> keys;
    const auto read_entry = [&] {
      const auto [key, is_new] = keys.insert(read_string());
      check(is_new, "duplicate key \"", *key, "\"");
      expect(':');
      read_value(*key);
    };
    read_array(read_entry, '{', '}');
  }

  std::string read_string() {
    std::string text;
    expect('"');
    for (unsigned char c = next(); c != '"'; c = next()) {
      check(c >= 0x20, "control character in a string");
      text += c == '\\' ? read_escape() : read_utf8(c);
    }
    return text;
  }
  std::uint64_t read_uint() {
    const bool starts_with_zero = peek() == '0';
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), number);
    const auto length = static_cast<std::size_t>(end - rest_.data());
    check(error == std::errc() && !(starts_with_zero && length > 1),
          "expected an integer from 0 to 2^64 - 1");
    rest_.remove_prefix(length);
    return number;
  }
  /// Skips a value of any type. Counts its brackets, and does not check that they match.
  void skip_value() {
    for (std::size_t depth = 0;; next()) {
      while (peek() == '"') read_string();
      const char c = peek();
      const bool is_close = c == '}' || c == ']';
      if (depth == 0 && (is_close || c == ',')) return;
      depth = depth + (c == '{' || c == '[' ? 1 : 0) - (is_close ? 1 : 0);
    }
  }
  void check_end() { check(peek() == '\0' && rest_.empty(), "expected the end"); }

 private:
  template <class... Message>
  void check(bool condition, const Message&... message) const {
    TORCH_CHECK(condition, "invalid JSON at byte ", size_ - rest_.size(), ": ", message...);
  }
  unsigned char next() {
    check(!rest_.empty(), "unexpected end");
    const auto c = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    return c;
  }
  /// Skips white space. Returns the next character without reading it, or 0 at the end.
  char peek() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size()));
    return rest_.empty() ? '\0' : rest_.front();
  }
  void expect(char c) {
    check(peek() == c, "expected ", c);
    rest_.remove_prefix(1);
  }

  std::string read_escape() {
    const char letter = static_cast<char>(next());
    const std::size_t index = std::string_view("\"\\/bfnrt").find(letter);
    if (index != std::string_view::npos) return {"\"\\/\b\f\n\r\t"[index]};
    check(letter == 'u', "unknown escape");
    std::uint32_t code = read_hex();
    if (code >> 10 == 0x36 && rest_.starts_with("\\u")) {  // a surrogate pair
      rest_.remove_prefix(2);
      const std::uint32_t low = read_hex();
      check(low >> 10 == 0x37, "unpaired surrogate");
      code = 0x10000 + ((code & 0x3FF) << 10) + (low & 0x3FF);
    }
    return to_utf8(code);
  }
  std::uint32_t read_hex() {
    check(rest_.size() >= 4, "unexpected end");
    std::uint32_t code = 0;
    const char* const end = rest_.data() + 4;
    check(std::from_chars(rest_.data(), end, code, 16).ptr == end, "expected four hex digits");
    rest_.remove_prefix(4);
    return code;
  }
  /// Reads the character that begins with `lead`. Encoding it again detects invalid bytes.
  std::string read_utf8(unsigned char lead) {
    std::string bytes{static_cast<char>(lead)};
    if (lead < 0x80) return bytes;
    const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    std::uint32_t code = lead & (0x3FU >> more);
    for (int i = 0; i < more; ++i) {
      bytes += static_cast<char>(next());
      code = code << 6 | (static_cast<unsigned char>(bytes.back()) & 0x3FU);
    }
    check(to_utf8(code) == bytes, "a string is not UTF-8");
    return bytes;
  }
  std::string to_utf8(std::uint32_t code) const {
    check(code < 0x110000 && code >> 11 != 0x1B, "not a Unicode character");  // a surrogate
    if (code < 0x80) return {static_cast<char>(code)};
    const unsigned more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    std::string bytes{static_cast<char>(0x7F80U >> more | code >> 6 * more)};
    for (unsigned i = more; i-- > 0;) bytes += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
    return bytes;
  }

  std::string_view rest_;
  std::size_t size_;
};

/// Returns a JSON string. \throws c10::Error unless `text` is UTF-8
inline std::string quote_json(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      quoted += {'\\', 'u', '0', '0', "01"[c >> 4], "0123456789abcdef"[c & 15]};
      continue;
    }
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  quoted += '"';
  (void)JsonReader(quoted).read_string();
  return quoted;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
