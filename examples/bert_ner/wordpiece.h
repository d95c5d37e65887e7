#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bert_ner {

/// A text as BERT reads it. The three lists have one entry a piece.
struct Encoding {
  std::vector<std::int64_t> ids;
  std::vector<std::string> tokens;
  /// First byte and one past the last byte of the piece in the text that was given; {0, 0} for
  /// [CLS] and [SEP].
  std::vector<std::pair<std::size_t, std::size_t>> offsets;
};

/// How the text is normalised; the names are those of a Hugging Face tokenizer_config.json.
struct WordPieceOptions {
  bool do_lower_case = true;
  /// Strip accents (what follows do_lower_case unless the file says otherwise).
  bool strip_accents = true;
  /// Make each CJK ideograph a word of its own.
  bool tokenize_chinese_chars = true;
};

/// BERT's tokenizer: clean, split and lower-case the text, then cover each word greedily with the
/// longest pieces of the vocabulary. Piece for piece and offset for offset the answers of Hugging
/// Face's `tokenizers`, but for the code points that the tests list (the Unicode tables of the two
/// are of different age) and one kind of offset: a mark that canonical ordering moves keeps its own
/// bytes here, and gets those of its new place there.
///
/// Immutable after construction: any thread may encode. Text that is no UTF-8 throws InputError.
class WordPiece {
 public:
  /// Reads vocab.txt and, if there is one, tokenizer_config.json. Throws InputError if the
  /// vocabulary lacks [UNK], [CLS], [SEP] or [PAD], has a token twice, or the configuration asks
  /// for something that is not BERT's.
  static WordPiece from_folder(const std::filesystem::path& folder);

  /// The words of the normalised text, before they are cut into pieces.
  std::vector<std::string> pre_tokenize(std::string_view utf8) const;

  /// The pieces of a text, between [CLS] and [SEP] if asked for. A special token spelled out in the
  /// text ("[MASK]") is that token, as in `tokenizers`. Nothing is truncated.
  Encoding encode(std::string_view utf8, bool add_special_tokens) const;

  /// The ids of one word of a CoNLL file: never empty, for a word of which nothing is left after
  /// normalisation (a lone zero-width space) is [UNK].
  std::vector<std::int64_t> encode_word(std::string_view word) const;

  std::int64_t cls_id() const { return cls_id_; }
  std::int64_t sep_id() const { return sep_id_; }
  std::int64_t pad_id() const { return pad_id_; }
  /// Number of tokens; ids are 0 to size() - 1.
  std::size_t size() const { return tokens_.size(); }

 private:
  struct StringHash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Vocabulary = std::unordered_map<std::string, std::int64_t, StringHash, std::equal_to<>>;
  struct Character;
  using Word = std::span<const Character>;
  struct Piece {
    std::int64_t id = 0;
    std::size_t length = 0;  // in characters; 0 if no piece fits
  };

  WordPiece(std::vector<std::string> tokens, WordPieceOptions options,
            const std::filesystem::path& origin);

  std::vector<Character> normalize(std::string_view utf8, std::size_t first_byte) const;
  std::vector<Character> clean(std::string_view utf8, std::size_t first_byte) const;
  static std::vector<Character> without_accents(const std::vector<Character>& text);
  static std::vector<Character> lower_cased(const std::vector<Character>& text);
  static std::vector<Word> split_words(const std::vector<Character>& text);

  std::optional<std::int64_t> special_token_at(std::string_view text) const;
  Piece longest_piece(Word rest, bool continues) const;
  void append_text(std::string_view utf8, std::size_t first_byte, Encoding& encoding) const;
  void append_pieces(Word word, Encoding& encoding) const;
  void append_token(std::int64_t id, std::size_t begin, std::size_t end, Encoding& encoding) const;

  WordPieceOptions options_;
  std::vector<std::string> tokens_;
  Vocabulary vocabulary_;
  std::vector<std::int64_t> special_ids_;
  std::int64_t unk_id_ = 0, cls_id_ = 0, sep_id_ = 0, pad_id_ = 0;
};

}  // namespace bert_ner
