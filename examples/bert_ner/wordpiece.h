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

/// How the text is normalised; the names are those of a Hugging Face tokenizer_config.json.
struct WordPieceOptions {
  bool do_lower_case = true;
  bool strip_accents = true;           ///< as do_lower_case, unless the file says otherwise
  bool tokenize_chinese_chars = true;  ///< each CJK ideograph is a word of its own
};

/// Cleans, splits and lower-cases the text, then covers each word greedily with the longest pieces
/// of the vocabulary. Gives the ids of Hugging Face's `tokenizers`, except for code points that the
/// tests list (the two have Unicode tables of different versions). Immutable after construction:
/// any thread may encode. Throws InputError for text that is not UTF-8.
class WordPiece {
 public:
  using Ids = std::vector<std::int64_t>;

  /// Reads vocab.txt and, if there is one, tokenizer_config.json. \throws InputError if the
  /// vocabulary lacks [UNK], [CLS], [SEP] or [PAD] or has a token twice, and for a configuration
  /// without BERT's own splitting
  static WordPiece from_folder(const std::filesystem::path& folder);

  /// The words of the normalised text, before they are cut into pieces.
  std::vector<std::string> pre_tokenize(std::string_view utf8) const;

  /// The ids of a text, all of it. A special token that is spelled out ("[MASK]") is that token, as
  /// in `tokenizers`.
  Ids encode(std::string_view utf8) const;

  /// The ids of one word of a CoNLL file. A word that normalisation empties (a lone zero-width
  /// space) is [UNK], so there is at least one id.
  Ids encode_word(std::string_view word) const;

  std::int64_t cls_id() const { return cls_id_; }
  std::int64_t sep_id() const { return sep_id_; }
  std::int64_t pad_id() const { return pad_id_; }
  /// Number of tokens; ids are 0 to size() - 1.
  std::size_t size() const { return tokens_.size(); }
  const std::string& token(std::int64_t id) const {
    return tokens_.at(static_cast<std::size_t>(id));
  }

 private:
  WordPiece(std::vector<std::string> tokens, WordPieceOptions options,
            const std::filesystem::path& origin);

  std::u32string normalize(std::string_view utf8) const;
  void append_text(std::string_view utf8, Ids& ids) const;
  void append_pieces(std::u32string_view word, Ids& ids) const;

  WordPieceOptions options_;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, std::int64_t> vocabulary_;
  Ids special_ids_;
  std::int64_t unk_id_ = 0, cls_id_ = 0, sep_id_ = 0, pad_id_ = 0;
};

}  // namespace bert_ner
