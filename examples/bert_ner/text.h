/// \file
/// Files, lines, JSON and errors.
#pragma once

#include <c10/util/Exception.h>

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace bert_ner {

namespace fs = std::filesystem;
using nlohmann::json;

/// An error in the user's input: a file, a flag or text. what() is one line: "FILE:LINE: problem;
/// remedy".
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Returns what() in one line, without libtorch's backtrace.
inline std::string message_of(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// Formats like std::printf (g++ 12 has no std::format).
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  std::array<char, 1024> text{};
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text.data(), text.size(), pattern, arguments);
  va_end(arguments);
  return text.data();
}

/// Removes leading and trailing white space.
inline std::string_view trim(std::string_view text) {
  constexpr std::string_view kWhiteSpace = " \t\v\f\r\n";
  const auto first = text.find_first_not_of(kWhiteSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kWhiteSpace) - first + 1);
}

/// Returns the contents of a file. \throws InputError if it cannot be read
inline std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (file && !fs::is_directory(path)) return {std::istreambuf_iterator<char>(file), {}};
  throw InputError(path.string() + ": cannot be read; pass the path of a file");
}

/// Calls `function(line, location)` for each line of a UTF-8 file, without line end and byte order
/// mark;
/// `location` is "FILE:LINE". \throws InputError for a line that is not UTF-8
inline void for_each_line(
    const fs::path& path,
    const std::function<void(std::string_view, const std::string&)>& function) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  const std::string text = read_file(path);
  std::string_view rest = text;
  if (rest.starts_with(kByteOrderMark)) rest.remove_prefix(kByteOrderMark.size());
  for (std::size_t number = 1; !rest.empty(); ++number) {
    const auto location = path.string() + ":" + std::to_string(number);
    auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const auto* const bytes = reinterpret_cast<const utf8proc_uint8_t*>(line.data());
    const auto size = static_cast<utf8proc_ssize_t>(line.size());
    if (utf8proc_decompose(bytes, size, nullptr, 0, {}) < 0) {
      throw InputError(location + ": is not UTF-8; save the file as UTF-8");
    }
    function(line, location);
  }
}

/// Replaces a file atomically: calls `write` with ".NAME.tmp" in the same directory, and renames
/// it. Without `write`, only checks that the file can be created.
/// \throws InputError with the system's reason; the file is then unchanged
inline void write_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  const auto temporary = path.parent_path() / ("." + path.filename().string() + ".tmp");
  const auto check = [&](bool succeeded, const char* what) {
    if (succeeded) return;
    const auto reason = std::generic_category().message(errno);
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw InputError(path.string() + ": cannot be " + what + " (" + reason +
                     "); check free space, the directory and its permissions" +
                     (fs::exists(path, ignored) ? ": the previous file is unchanged" : ""));
  };
  std::ofstream file(temporary, std::ios::binary);
  check(file.is_open(), "created");
  if (!write) return static_cast<void>(fs::remove(temporary));
  write(file);
  file.close();
  check(file.good(), "written");
  check(std::rename(temporary.c_str(), path.c_str()) == 0, "renamed");
}

/// Parses JSON. \throws InputError that begins with `origin`
inline json parse_json(std::string_view text, const std::string& origin) {
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    throw InputError(origin + ": is not valid JSON (" + error.what() +
                     "); correct the file or download it again");
  }
}

}  // namespace bert_ner
