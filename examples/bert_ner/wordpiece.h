/// \file
/// BERT's WordPiece tokenizer.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "text.h"

namespace bert_ner {

/// Normalizes, splits and lower-cases a word, and splits it greedily into the longest pieces of the
/// vocabulary. Returns the ids of Hugging Face's `tokenizers`, except for special tokens in the
/// text. Immutable after construction, so encoding is thread-safe.
class WordPiece {
 public:
  using Ids = std::vector<std::int64_t>;

  /// Reads vocab.txt and the optional tokenizer_config.json. \throws InputError if the vocabulary has no
  /// [UNK], [CLS], [SEP] or [PAD], or duplicates
  explicit WordPiece(const fs::path& folder) {
    const auto path = folder / "vocab.txt";
    for_each_line(path, [&](std::string_view line, const std::string& place) {
      if (vocabulary_.emplace(line, vocabulary_.size()).second) return;
      throw InputError(place + ": stands there twice; keep one of them");
    });
    const auto required = [&](const char* token) {
      const auto found = vocabulary_.find(token);
      if (found != vocabulary_.end()) return found->second;
      throw InputError(path.string() + ": lacks the token " + token +
                       "; give the vocabulary that belongs to the model");
    };
    unk = required("[UNK]");
    cls = required("[CLS]");
    sep = required("[SEP]");
    pad = required("[PAD]");
    const auto configuration = folder / "tokenizer_config.json";
    if (!fs::exists(configuration)) return;
    const auto options = parse_json(read_file(configuration), configuration.string());
    const auto flag = [&](const char* key, bool otherwise) {
      const auto value = options.value(key, json());
      return value.is_boolean() ? value.get<bool>() : otherwise;
    };
    do_lower_case_ = flag("do_lower_case", true);
    strip_accents_ = flag("strip_accents", do_lower_case_);
    tokenize_chinese_chars_ = flag("tokenize_chinese_chars", true);
  }

  /// Returns the ids of a word, at least one: a word that is empty after normalization is [UNK].
  /// \throws InputError for invalid UTF-8
  Ids encode_word(std::string_view word) const {
    Ids ids;
    std::u32string part;
    for (const char32_t c : normalized(word) + U' ') {
      const bool is_separate = is_punctuation(c);  // a separate word
      if (!is_separate && c != U' ') {
        part += c;
        continue;
      }
      if (!part.empty()) append_pieces(part, ids);
      part.clear();
      if (is_separate) append_pieces({c}, ids);
    }
    if (ids.empty()) ids.push_back(unk);
    return ids;
  }

  /// Returns the number of tokens; ids are 0 to size() - 1.
  std::size_t size() const { return vocabulary_.size(); }

  std::int64_t unk = 0, cls = 0, sep = 0, pad = 0;  ///< ids of [UNK], [CLS], [SEP], [PAD]

 private:
  static bool is_in(char32_t c, utf8proc_category_t first, utf8proc_category_t last) {
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    return category >= first && category <= last;
  }

  /// Includes all ASCII symbols, such as "$" and "^".
  static bool is_punctuation(char32_t c) {
    return (c >= U'!' && c <= U'/') || (c >= U':' && c <= U'@') || (c >= U'[' && c <= U'`') ||
           (c >= U'{' && c <= U'~') || is_in(c, UTF8PROC_CATEGORY_PC, UTF8PROC_CATEGORY_PO);
  }

  /// Extension E begins at U+2B820, but `tokenizers`, with which models were trained, has U+2B920.
  static bool is_ideograph(char32_t c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
           (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
           (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
  }

  /// Strips accents (NFD without non-spacing marks) and lower-cases, depending on the options;
  /// removes control characters, replaces white space by spaces, and separates ideographs.
  std::u32string normalized(std::string_view word) const {
    constexpr char32_t kReplacement = 0xFFFD;
    constexpr std::size_t kMaxDecomposition = 4;  // Unicode's longest canonical one
    std::vector<utf8proc_int32_t> characters(kMaxDecomposition * word.size() + 1);
    const auto count =
        utf8proc_decompose(reinterpret_cast<const utf8proc_uint8_t*>(word.data()),
                           static_cast<utf8proc_ssize_t>(word.size()), characters.data(),
                           static_cast<utf8proc_ssize_t>(characters.size()),
                           strip_accents_ ? UTF8PROC_DECOMPOSE : utf8proc_option_t{});
    if (count < 0) throw InputError("the text is not UTF-8; give it as UTF-8");
    characters.resize(static_cast<std::size_t>(count));
    std::u32string text;
    for (const auto character : characters) {
      const auto c = static_cast<char32_t>(character);
      if (c == U'\t' || c == U'\n' || c == U'\r' ||
          is_in(c, UTF8PROC_CATEGORY_ZS, UTF8PROC_CATEGORY_ZP)) {
        text += U' ';
      } else if (c == kReplacement || is_in(c, UTF8PROC_CATEGORY_CC, UTF8PROC_CATEGORY_CO) ||
                 (strip_accents_ && is_in(c, UTF8PROC_CATEGORY_MN, UTF8PROC_CATEGORY_MN))) {
        continue;
      } else if (tokenize_chinese_chars_ && is_ideograph(c)) {
        text += {U' ', c, U' '};
      } else if (do_lower_case_ && c == U'\u0130') {
        text += U"i\u0307";  // the only character whose lower case has two code points
      } else {
        text += do_lower_case_ ? static_cast<char32_t>(utf8proc_tolower(character)) : c;
      }
    }
    return text;
  }

  /// Splits the word greedily into the longest pieces; [UNK] if that fails.
  void append_pieces(const std::u32string& word, Ids& ids) const {
    constexpr std::size_t kMaxWordCharacters = 100;  // longer words are [UNK], as in BERT
    std::vector<std::size_t> ends{0};                // byte offsets of the characters
    std::string utf8;
    for (const char32_t c : word) {
      std::array<utf8proc_uint8_t, 4> bytes{};
      const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes.data());
      utf8.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
      ends.push_back(utf8.size());
    }
    const auto pieces_before = ids.size();
    for (std::size_t first = 0, end = 0; first < word.size(); first = end) {
      auto found = vocabulary_.end();
      for (end = word.size(); end > first; --end) {
        found = vocabulary_.find((first > 0 ? "##" : "") +
                                 utf8.substr(ends[first], ends[end] - ends[first]));
        if (found != vocabulary_.end()) break;
      }
      if (found == vocabulary_.end() || word.size() > kMaxWordCharacters) {
        ids.resize(pieces_before);
        return ids.push_back(unk);
      }
      ids.push_back(found->second);
    }
  }

  // Normalization options, named as in tokenizer_config.json.
  bool do_lower_case_ = true;
  bool strip_accents_ = true;           // default: do_lower_case
  bool tokenize_chinese_chars_ = true;  // CJK ideographs are separate words
  std::unordered_map<std::string, std::int64_t> vocabulary_;
};

}  // namespace bert_ner
