#include "text.h"

#include <fcntl.h>
#include <unistd.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <vector>

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

fs::path aside_of(const fs::path& path) {
  return path.parent_path() / ("." + path.filename().string() + ".tmp");
}

[[noreturn]] void fail_to_write(const fs::path& path, const char* what, int error) {
  ::unlink(aside_of(path).c_str());
  const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw InputError(path.string() + ": " + what + " (" + std::generic_category().message(error) +
                   "); " +
                   (is_full ? "make room and try again" : "check the folder and its permissions") +
                   (fs::exists(path) ? ", the previous file is untouched" : ""));
}

int open_aside(const fs::path& path) {
  std::error_code ignored;
  if (!path.has_filename() || fs::is_directory(path, ignored)) {
    throw InputError(path.string() + ": is a folder; give the name of a file to write");
  }
  const int file = ::open(aside_of(path).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail_to_write(path, "cannot be created", errno);
  return file;
}

/// \returns 0 or the system's error
int write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(file, text.data(), text.size());
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

std::string formatted(const char* pattern, ...) {
  std::array<char, 1024> text{};
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text.data(), text.size(), pattern, arguments);
  va_end(arguments);
  return text.data();
}

std::string joined(std::span<const std::string> names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string_view trimmed(std::string_view text, std::string_view edges) {
  const auto first = text.find_first_not_of(edges);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(edges) - first + 1);
}

std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (std::size_t offset = 0; offset < text.size();) {
    utf8proc_int32_t code_point = 0;
    const auto length = utf8proc_iterate(
        bytes + offset, static_cast<utf8proc_ssize_t>(text.size() - offset), &code_point);
    if (length <= 0) return offset;
    offset += static_cast<std::size_t>(length);
  }
  return std::nullopt;
}

char32_t next_code_point(std::string_view utf8, std::size_t& offset) {
  utf8proc_int32_t code_point = 0;
  const auto length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(utf8.data()) + offset,
                       static_cast<utf8proc_ssize_t>(utf8.size() - offset), &code_point);
  offset += static_cast<std::size_t>(length);
  return static_cast<char32_t>(code_point);
}

std::string to_utf8(std::u32string_view text) {
  std::string utf8;
  for (const char32_t c : text) {
    std::array<utf8proc_uint8_t, 4> bytes{};
    const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes.data());
    utf8.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
  }
  return utf8;
}

std::string place(const fs::path& path, std::size_t line) {
  return path.string() + ":" + std::to_string(line);
}

std::string read_file(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw InputError(path.string() + ": is no regular file; give the path of a file");
  }
  std::ifstream file(path, std::ios::binary);
  if (file) return {std::istreambuf_iterator<char>(file), {}};
  throw InputError(path.string() + ": cannot be opened (" + std::generic_category().message(errno) +
                   "); check the path and its permissions");
}

void for_each_line(const fs::path& path,
                   const std::function<void(std::string_view, std::size_t)>& take) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  const std::string text = read_file(path);
  std::string_view rest = text;
  if (rest.starts_with(kByteOrderMark)) rest.remove_prefix(kByteOrderMark.size());
  for (std::size_t number = 1; !rest.empty(); ++number) {
    const auto length = rest.find('\n');
    std::string_view line = rest.substr(0, length);
    rest.remove_prefix(length == std::string_view::npos ? rest.size() : length + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (const auto invalid = first_invalid_utf8(line)) {
      throw InputError(place(path, number) + ": byte " + std::to_string(*invalid + 1) +
                       " of the line is not UTF-8; save the file as UTF-8");
    }
    take(line, number);
  }
}

void write_file(const fs::path& path, std::initializer_list<std::string_view> parts) {
  write_file(path, std::span(parts.begin(), parts.size()));
}

void write_file(const fs::path& path, std::span<const std::string_view> parts) {
  const int file = open_aside(path);
  int error = 0;
  for (const auto part : parts) {
    if (error == 0) error = write_all(file, part);
  }
  if (error == 0 && ::fsync(file) != 0) error = errno;
  ::close(file);
  if (error != 0) fail_to_write(path, "cannot be written", error);
  if (::rename(aside_of(path).c_str(), path.c_str()) != 0) {
    fail_to_write(path, "cannot be put in place", errno);
  }
}

void check_writable(const fs::path& path) {
  ::close(open_aside(path));
  ::unlink(aside_of(path).c_str());
}

nlohmann::json parse_json(std::string_view text, const std::string& origin) {
  const auto at = [&](std::size_t byte) {
    const auto before = text.substr(0, byte);
    return origin + ":" + std::to_string(1 + std::count(before.begin(), before.end(), '\n'));
  };
  if (const auto invalid = first_invalid_utf8(text)) {
    throw InputError(at(*invalid) + ": byte " + std::to_string(*invalid) +
                     " is not UTF-8; save the file as UTF-8");
  }
  std::vector<std::set<std::string>> keys;  // nlohmann/json keeps the last of two equal ones
  const auto check = [&](int, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    if (event == nlohmann::json::parse_event_t::object_start) keys.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) keys.pop_back();
    if (event != nlohmann::json::parse_event_t::key) return true;
    if (keys.back().insert(parsed.get<std::string>()).second) return true;
    throw InputError(origin + ": the JSON key " + parsed.dump() +
                     " stands twice in one object; remove one of them");
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), check);
  } catch (const nlohmann::json::parse_error& error) {
    const std::size_t byte = error.byte == 0 ? 0 : error.byte - 1;
    throw InputError(at(byte) + ": is no valid JSON from byte " + std::to_string(byte) +
                     " on; correct it or fetch the file again");
  } catch (const nlohmann::json::out_of_range&) {
    throw InputError(origin + ": a number in the JSON is out of range; correct it");
  }
}

nlohmann::json read_json(const fs::path& path) {
  return parse_json(read_file(path), path.string());
}

}  // namespace bert_ner
