#include "unicode.h"

#include <utf8proc.h>

#include <array>

namespace bert_ner {
namespace {

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

}  // namespace

std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (std::size_t offset = 0; offset < text.size();) {
    if (bytes[offset] < 0x80) {
      ++offset;
      continue;
    }
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

void append_utf8(char32_t code_point, std::string& utf8) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes.data());
  utf8.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
}

bool is_white_space(char32_t c) {
  if ((c >= U'\t' && c <= U'\r') || c == U'\u0085') return true;
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_ZS || kind == UTF8PROC_CATEGORY_ZL ||
         kind == UTF8PROC_CATEGORY_ZP;
}

bool is_control(char32_t c) {
  if (c == U'\t' || c == U'\n' || c == U'\r') return false;
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_CC || kind == UTF8PROC_CATEGORY_CF ||
         kind == UTF8PROC_CATEGORY_CO || kind == UTF8PROC_CATEGORY_CS;
}

bool is_punctuation(char32_t c) {
  // In ASCII every character that is drawn and neither letter nor digit, "$" and "^" too.
  const bool is_ascii_mark = (c >= U'!' && c <= U'/') || (c >= U':' && c <= U'@') ||
                             (c >= U'[' && c <= U'`') || (c >= U'{' && c <= U'~');
  if (is_ascii_mark) return true;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
      return true;
    default:
      return false;
  }
}

bool is_ideograph(char32_t c) {
  // Extension E begins at U+2B820; `tokenizers`, with whose answers models are trained, begins
  // here.
  constexpr char32_t kExtensionE = 0x2B920;
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= kExtensionE && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

bool is_nonspacing_mark(char32_t c) { return category(c) == UTF8PROC_CATEGORY_MN; }

int combining_class(char32_t c) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

void append_decomposed(char32_t c, std::vector<char32_t>& out) {
  std::array<utf8proc_int32_t, 8> parts{};  // Unicode's longest canonical decomposition has 4
  int boundary_class = UTF8PROC_BOUNDCLASS_START;
  const auto length = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts.data(),
                                              static_cast<utf8proc_ssize_t>(parts.size()),
                                              UTF8PROC_DECOMPOSE, &boundary_class);
  for (utf8proc_ssize_t i = 0; i < length; ++i) {
    out.push_back(static_cast<char32_t>(parts[static_cast<std::size_t>(i)]));
  }
}

void append_lower_case(char32_t c, std::vector<char32_t>& out) {
  if (c == U'\u0130') {  // the one character whose full lower case is longer than the simple one
    out.insert(out.end(), {U'i', U'\u0307'});
    return;
  }
  out.push_back(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
}

}  // namespace bert_ner
