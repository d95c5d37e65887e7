#include "text.h"

#include <utf8proc.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <system_error>

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

fs::path aside_of(const fs::path& path) {
  return path.parent_path() / ("." + path.filename().string() + ".tmp");
}

[[noreturn]] void fail_to_write(const fs::path& path, const char* what, int error) {
  std::error_code ignored;
  fs::remove(aside_of(path), ignored);
  throw InputError(path.string() + ": " + what + " (" + std::generic_category().message(error) +
                   "); make room, or check the folder and its permissions" +
                   (fs::exists(path, ignored) ? ": the previous file is untouched" : ""));
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

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kWhiteSpace = " \t\v\f\r\n";
  const auto first = text.find_first_not_of(kWhiteSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kWhiteSpace) - first + 1);
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

std::string place(const fs::path& path, std::size_t line) {
  return path.string() + ":" + std::to_string(line);
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code ignored;
  if (file && !fs::is_directory(path, ignored)) return {std::istreambuf_iterator<char>(file), {}};
  throw InputError(path.string() + ": cannot be read; give the path of a file");
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

void write_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  std::ofstream file(aside_of(path), std::ios::binary);
  if (!file) fail_to_write(path, "cannot be created", errno);
  write(file);
  file.close();
  if (!file) fail_to_write(path, "cannot be written", errno);
  std::error_code error;
  fs::rename(aside_of(path), path, error);
  if (error) fail_to_write(path, "cannot be put in place", error.value());
}

void check_writable(const fs::path& path) {
  if (!std::ofstream(aside_of(path))) fail_to_write(path, "cannot be created", errno);
  fs::remove(aside_of(path));
}

nlohmann::json parse_json(std::string_view text, const std::string& origin) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw InputError(origin + ": is not valid JSON (" + error.what() +
                     "); correct it or fetch the file again");
  }
}

}  // namespace bert_ner
