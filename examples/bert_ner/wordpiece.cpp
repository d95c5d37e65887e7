#include "wordpiece.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "text.h"

namespace bert_ner {
namespace {

constexpr std::size_t kMaxWordCharacters = 100;  // longer words are [UNK], as in BERT

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool is_white_space(char32_t c) {
  const auto kind = category(c);
  return (c >= U'\t' && c <= U'\r') || c == U'\u0085' ||
         (kind >= UTF8PROC_CATEGORY_ZS && kind <= UTF8PROC_CATEGORY_ZP);
}

bool is_control(char32_t c) {
  const auto kind = category(c);
  return c != U'\t' && c != U'\n' && c != U'\r' &&
         (kind == UTF8PROC_CATEGORY_CC || kind == UTF8PROC_CATEGORY_CF ||
          kind == UTF8PROC_CATEGORY_CO || kind == UTF8PROC_CATEGORY_CS);
}

/// In ASCII every character that is drawn and neither letter nor digit, "$" and "^" too.
bool is_punctuation(char32_t c) {
  const auto kind = category(c);
  return (c >= U'!' && c <= U'/') || (c >= U':' && c <= U'@') || (c >= U'[' && c <= U'`') ||
         (c >= U'{' && c <= U'~') || (kind >= UTF8PROC_CATEGORY_PC && kind <= UTF8PROC_CATEGORY_PO);
}

/// Extension E begins at U+2B820, but in `tokenizers`, with which models are trained, at U+2B920.
bool is_ideograph(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
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

/// NFD without its non-spacing marks.
std::u32string without_accents(std::u32string_view text) {
  constexpr std::size_t kLongestDecomposition = 4;  // Unicode's longest canonical one
  const std::string utf8 = to_utf8(text);
  std::vector<utf8proc_int32_t> parts(kLongestDecomposition * text.size() + 1);
  const auto length =
      utf8proc_decompose(reinterpret_cast<const utf8proc_uint8_t*>(utf8.data()),
                         static_cast<utf8proc_ssize_t>(utf8.size()), parts.data(),
                         static_cast<utf8proc_ssize_t>(parts.size()), UTF8PROC_DECOMPOSE);
  std::u32string decomposed(parts.begin(), parts.begin() + std::max<utf8proc_ssize_t>(length, 0));
  std::erase_if(decomposed, [](char32_t c) { return category(c) == UTF8PROC_CATEGORY_MN; });
  return decomposed;
}

std::u32string lower_cased(std::u32string_view text) {
  std::u32string lowered;
  for (const char32_t c : text) {
    if (c == U'\u0130') {  // the one character whose lower case is two
      lowered += U"i\u0307";
    } else {
      lowered += static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
    }
  }
  return lowered;
}

/// Splits at spaces, which vanish, and around punctuation marks, each of which is a word.
std::vector<std::u32string_view> split_words(std::u32string_view text) {
  std::vector<std::u32string_view> words;
  std::size_t begin = 0;
  for (std::size_t at = 0; at <= text.size(); ++at) {
    const bool is_mark = at < text.size() && is_punctuation(text[at]);
    if (at < text.size() && !is_mark && !is_white_space(text[at])) continue;
    if (at > begin) words.push_back(text.substr(begin, at - begin));
    if (is_mark) words.push_back(text.substr(at, 1));
    begin = at + 1;
  }
  return words;
}

}  // namespace

WordPiece WordPiece::from_folder(const std::filesystem::path& folder) {
  WordPiece made;
  const auto path = folder / "vocab.txt";
  for_each_line(path, [&](std::string_view line, std::size_t number) {
    const bool is_new =
        made.vocabulary_.emplace(line, static_cast<std::int64_t>(number) - 1).second;
    if (!is_new) throw InputError(place(path, number) + ": stands there twice; keep one of them");
  });
  const auto required = [&](const char* token) {
    const auto found = made.vocabulary_.find(token);
    if (found != made.vocabulary_.end()) return found->second;
    throw InputError(path.string() + ": lacks the token " + token +
                     "; give the vocabulary that belongs to the model");
  };
  made.unk_id_ = required("[UNK]");
  made.cls_id_ = required("[CLS]");
  made.sep_id_ = required("[SEP]");
  made.pad_id_ = required("[PAD]");
  const auto configuration = folder / "tokenizer_config.json";
  if (!std::filesystem::exists(configuration)) return made;
  const auto json = parse_json(read_file(configuration), configuration.string());
  const auto flag = [&](const char* key, bool otherwise) {
    const auto found = json.find(key);
    return found != json.end() && found->is_boolean() ? found->get<bool>() : otherwise;
  };
  made.do_lower_case_ = flag("do_lower_case", true);
  made.strip_accents_ = flag("strip_accents", made.do_lower_case_);
  made.tokenize_chinese_chars_ = flag("tokenize_chinese_chars", true);
  return made;
}

WordPiece::Ids WordPiece::encode_word(std::string_view word) const {
  Ids ids;
  const auto text = normalize(word);
  for (const auto part : split_words(text)) append_pieces(part, ids);
  if (ids.empty()) ids.push_back(unk_id_);
  return ids;
}

/// Drops control characters, makes all white space a space, parts ideographs from their neighbours,
/// and then strips accents and lowers the case, if the options say so.
std::u32string WordPiece::normalize(std::string_view utf8) const {
  constexpr char32_t kReplacement = 0xFFFD;
  std::u32string text;
  for (std::size_t offset = 0; offset < utf8.size();) {
    utf8proc_int32_t code_point = 0;
    const auto length =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(utf8.data()) + offset,
                         static_cast<utf8proc_ssize_t>(utf8.size() - offset), &code_point);
    if (length <= 0) throw InputError("the text is not UTF-8; give it as UTF-8");
    offset += static_cast<std::size_t>(length);
    const auto c = static_cast<char32_t>(code_point);
    if (c == 0 || c == kReplacement || is_control(c)) continue;
    if (is_white_space(c)) {
      text += U' ';
    } else if (tokenize_chinese_chars_ && is_ideograph(c)) {
      text += {U' ', c, U' '};
    } else {
      text += c;
    }
  }
  if (strip_accents_) text = without_accents(text);
  return do_lower_case_ ? lower_cased(text) : text;
}

/// Covers the word from the left with the longest pieces; if that fails, the word is [UNK].
void WordPiece::append_pieces(std::u32string_view word, Ids& ids) const {
  const auto pieces_before = ids.size();
  bool is_known = word.size() <= kMaxWordCharacters;
  for (std::size_t first = 0, end = 0; is_known && first < word.size(); first = end) {
    auto found = vocabulary_.end();
    for (end = word.size() + 1; found == vocabulary_.end() && end > first + 1;) {
      --end;
      found = vocabulary_.find((first > 0 ? "##" : "") + to_utf8(word.substr(first, end - first)));
    }
    is_known = found != vocabulary_.end();
    if (is_known) ids.push_back(found->second);
  }
  if (is_known) return;
  ids.resize(pieces_before);
  ids.push_back(unk_id_);
}

}  // namespace bert_ner
