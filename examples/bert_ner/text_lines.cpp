#include "text_lines.h"

#include "input_error.h"
#include "mapped_file.h"
#include "unicode.h"

namespace bert_ner {

void for_each_line(const std::filesystem::path& path,
                   const std::function<void(std::string_view, std::size_t)>& take) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  const MappedFile file(path);
  std::string_view rest(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (rest.starts_with(kByteOrderMark)) rest.remove_prefix(kByteOrderMark.size());
  for (std::size_t number = 1; !rest.empty(); ++number) {
    const std::size_t length = rest.find('\n');
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

std::string_view trimmed(std::string_view text, std::string_view edges) {
  const auto first = text.find_first_not_of(edges);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(edges) - first + 1);
}

std::string place(const std::filesystem::path& path, std::size_t line) {
  return path.string() + ":" + std::to_string(line);
}

}  // namespace bert_ner
