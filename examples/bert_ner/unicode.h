#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bert_ner {

/// Offset of the first byte that is no part of well-formed UTF-8 (overlong forms and surrogates are
/// none either).
std::optional<std::size_t> first_invalid_utf8(std::string_view text);

/// Decodes the code point at `offset` of well-formed UTF-8 and moves `offset` behind it.
char32_t next_code_point(std::string_view utf8, std::size_t& offset);

void append_utf8(char32_t code_point, std::string& utf8);

/// BERT's classes of characters, from Unicode's general categories.
bool is_white_space(char32_t c);
bool is_control(char32_t c);
bool is_punctuation(char32_t c);
bool is_ideograph(char32_t c);
bool is_nonspacing_mark(char32_t c);

/// Canonical combining class, by which NFD orders marks.
int combining_class(char32_t c);
/// Appends the full canonical decomposition, not yet reordered.
void append_decomposed(char32_t c, std::vector<char32_t>& out);
/// Appends the lower case, which for one character (U+0130) is two.
void append_lower_case(char32_t c, std::vector<char32_t>& out);

}  // namespace bert_ner
