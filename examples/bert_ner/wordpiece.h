/// \file
/// The tokenizer of BERT.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bert_ner {

/// Cleans, splits and lower-cases a word, then covers it greedily with the longest pieces of the
/// vocabulary. Gives the ids of Hugging Face's `tokenizers`, but for special tokens that are
/// spelled out in the text. Immutable after construction: any thread may encode.
class WordPiece {
 public:
  using Ids = std::vector<std::int64_t>;

  /// Reads vocab.txt and, if there is one, tokenizer_config.json. \throws InputError if the
  /// vocabulary lacks [UNK], [CLS], [SEP] or [PAD] or has a token twice
  static WordPiece from_folder(const std::filesystem::path& folder);

  /// The ids of one word of a CoNLL file, which is UTF-8. A word that normalisation empties (a lone
  /// zero-width space) is [UNK], so there is at least one id.
  Ids encode_word(std::string_view word) const;

  std::int64_t cls_id() const { return cls_id_; }
  std::int64_t sep_id() const { return sep_id_; }
  std::int64_t pad_id() const { return pad_id_; }
  /// Number of tokens; ids are 0 to size() - 1.
  std::size_t size() const { return vocabulary_.size(); }

 private:
  WordPiece() = default;
  std::u32string normalize(std::string_view utf8) const;
  void append_pieces(std::u32string_view word, Ids& ids) const;

  // How the text is normalised; the names are those of a Hugging Face tokenizer_config.json.
  bool do_lower_case_ = true;
  bool strip_accents_ = true;           // as do_lower_case, unless the file says otherwise
  bool tokenize_chinese_chars_ = true;  // each CJK ideograph is a word of its own
  std::unordered_map<std::string, std::int64_t> vocabulary_;
  std::int64_t unk_id_ = 0, cls_id_ = 0, sep_id_ = 0, pad_id_ = 0;
};

}  // namespace bert_ner
