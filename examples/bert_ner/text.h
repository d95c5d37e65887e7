/// \file
/// Text, files, JSON, and the error of this program.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bert_ner {

/// An error in what the user gave: a file, a flag, a text. what() is one line: "FILE:LINE: what is
/// wrong; what to do".
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Formats as std::printf does. (g++ 12 has no std::format.)
[[gnu::format(printf, 1, 2)]] std::string formatted(const char* pattern, ...);

/// "a, b, c"
std::string joined(std::span<const std::string> names);

/// The text without white space at its ends.
std::string_view trimmed(std::string_view text);

/// Offset of the first byte that is no part of well-formed UTF-8.
std::optional<std::size_t> first_invalid_utf8(std::string_view text);

/// "FILE:LINE", the opening of an error message.
std::string place(const std::filesystem::path& path, std::size_t line);

/// A whole file. \throws InputError if it cannot be read
std::string read_file(const std::filesystem::path& path);

/// Calls `take(line, number)` for each line of a UTF-8 file, numbered from 1, without "\n" or
/// "\r\n" and without a byte order mark. \throws InputError, with the line where it is not UTF-8
void for_each_line(const std::filesystem::path& path,
                   const std::function<void(std::string_view, std::size_t)>& take);

/// Replaces a file atomically: `write` fills ".NAME.tmp" beside it, which is then renamed.
/// \throws InputError with the system's reason; the file is then unchanged
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

/// Checks that write_file can create its temporary file. \throws InputError
void check_writable(const std::filesystem::path& path);

/// Parses JSON. \throws InputError that opens with `origin` and says where it is wrong
nlohmann::json parse_json(std::string_view text, const std::string& origin);

}  // namespace bert_ner
