#include "wordpiece.h"

#include <utf8proc.h>

#include <algorithm>

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

/// Extension E begins at U+2B820; `tokenizers`, with whose answers models are trained, begins at
/// U+2B920.
bool is_ideograph(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
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

/// At spaces, which vanish, and around punctuation, each mark of which is a word.
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

std::vector<std::string> read_vocabulary(const std::filesystem::path& path) {
  std::vector<std::string> tokens;
  for_each_line(path, [&](std::string_view line, std::size_t number) {
    if (line.empty()) {
      throw InputError(place(path, number) + ": holds no token; remove the blank line");
    }
    tokens.emplace_back(line);
  });
  return tokens;
}

WordPieceOptions read_options(const std::filesystem::path& path) {
  WordPieceOptions options;
  if (!std::filesystem::exists(path)) return options;
  const auto json = read_json(path);
  const auto flag = [&](const char* key, bool fallback) {
    const auto value = json.is_object() ? json.value(key, nlohmann::json()) : json;
    if (value.is_null()) return fallback;
    if (value.is_boolean()) return value.get<bool>();
    throw InputError(path.string() + ": \"" + key + "\" is " + value.dump() +
                     "; write true or false");
  };
  if (!flag("do_basic_tokenize", true)) {
    throw InputError(path.string() +
                     ": \"do_basic_tokenize\" is false; only BERT's own splitting is known");
  }
  options.do_lower_case = flag("do_lower_case", true);
  options.strip_accents = flag("strip_accents", options.do_lower_case);
  options.tokenize_chinese_chars = flag("tokenize_chinese_chars", true);
  return options;
}

}  // namespace

WordPiece WordPiece::from_folder(const std::filesystem::path& folder) {
  const auto vocabulary = folder / "vocab.txt";
  return {read_vocabulary(vocabulary), read_options(folder / "tokenizer_config.json"), vocabulary};
}

WordPiece::WordPiece(std::vector<std::string> tokens, WordPieceOptions options,
                     const std::filesystem::path& origin)
    : options_(options), tokens_(std::move(tokens)) {
  for (std::size_t id = 0; id < tokens_.size(); ++id) {
    const auto [first, is_new] = vocabulary_.emplace(tokens_[id], static_cast<std::int64_t>(id));
    if (is_new) continue;
    throw InputError(place(origin, id + 1) + ": the token \"" + tokens_[id] +
                     "\" already stands in line " + std::to_string(first->second + 1) +
                     "; keep one of them");
  }
  const auto required = [&](const std::string& token) {
    const auto found = vocabulary_.find(token);
    if (found != vocabulary_.end()) return found->second;
    throw InputError(origin.string() + ": lacks the token " + token +
                     "; give the vocabulary that belongs to the model");
  };
  unk_id_ = required("[UNK]");
  cls_id_ = required("[CLS]");
  sep_id_ = required("[SEP]");
  pad_id_ = required("[PAD]");
  special_ids_ = {unk_id_, cls_id_, sep_id_, pad_id_};
  const auto mask = vocabulary_.find("[MASK]");
  if (mask != vocabulary_.end()) special_ids_.push_back(mask->second);
}

std::vector<std::string> WordPiece::pre_tokenize(std::string_view utf8) const {
  std::vector<std::string> words;
  const auto text = normalize(utf8);
  for (const auto word : split_words(text)) words.push_back(to_utf8(word));
  return words;
}

WordPiece::Ids WordPiece::encode(std::string_view utf8) const {
  Ids ids;
  std::size_t done = 0;
  for (auto at = utf8.find('['); at != std::string_view::npos; at = utf8.find('[', at)) {
    const auto special = std::ranges::find_if(
        special_ids_, [&](std::int64_t id) { return utf8.substr(at).starts_with(token(id)); });
    if (special == special_ids_.end()) {
      ++at;
      continue;
    }
    append_text(utf8.substr(done, at - done), ids);
    ids.push_back(*special);
    done = at += token(*special).size();
  }
  append_text(utf8.substr(done), ids);
  return ids;
}

WordPiece::Ids WordPiece::encode_word(std::string_view word) const {
  auto ids = encode(word);
  if (ids.empty()) ids.push_back(unk_id_);
  return ids;
}

void WordPiece::append_text(std::string_view utf8, Ids& ids) const {
  const auto text = normalize(utf8);
  for (const auto word : split_words(text)) append_pieces(word, ids);
}

/// Drops control characters, makes all white space a space, parts ideographs from their neighbours,
/// and then strips accents and lowers the case, if the options say so.
std::u32string WordPiece::normalize(std::string_view utf8) const {
  constexpr char32_t kReplacement = 0xFFFD;
  if (const auto invalid = first_invalid_utf8(utf8)) {
    throw InputError("byte " + std::to_string(*invalid + 1) +
                     " of the text is not UTF-8; give the text as UTF-8");
  }
  std::u32string text;
  for (std::size_t offset = 0; offset < utf8.size();) {
    const char32_t c = next_code_point(utf8, offset);
    if (c == 0 || c == kReplacement || is_control(c)) continue;
    if (is_white_space(c)) {
      text += U' ';
    } else if (options_.tokenize_chinese_chars && is_ideograph(c)) {
      text += {U' ', c, U' '};
    } else {
      text += c;
    }
  }
  if (options_.strip_accents) text = without_accents(text);
  return options_.do_lower_case ? lower_cased(text) : text;
}

/// Covers the word from the left, each time with the longest piece there is; [UNK] for the whole
/// word if that fails.
void WordPiece::append_pieces(std::u32string_view word, Ids& ids) const {
  const auto pieces_before = ids.size();
  bool is_known = word.size() <= kMaxWordCharacters;
  for (std::size_t first = 0; is_known && first < word.size();) {
    auto length = word.size() - first;
    std::string piece = (first > 0 ? "##" : "") + to_utf8(word.substr(first));
    auto found = vocabulary_.find(piece);
    while (found == vocabulary_.end() && length > 0) {
      piece.resize(piece.size() - to_utf8(word.substr(first + --length, 1)).size());
      found = length > 0 ? vocabulary_.find(piece) : vocabulary_.end();
    }
    is_known = length > 0;
    if (is_known) ids.push_back(found->second);
    first += length;
  }
  if (is_known) return;
  ids.resize(pieces_before);
  ids.push_back(unk_id_);
}

}  // namespace bert_ner
