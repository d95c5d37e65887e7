#include "wordpiece.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "input_error.h"
#include "json_file.h"
#include "text_lines.h"
#include "unicode.h"

namespace bert_ner {

// A code point of the normalised text, and the bytes of the given text that it comes from.
struct WordPiece::Character {
  char32_t code_point;
  std::size_t begin, end;
};

namespace {

constexpr std::size_t kMaxWordCharacters = 100;  // longer words are [UNK], as in BERT
constexpr std::string_view kContinuation = "##";
constexpr std::string_view kUnknown = "[UNK]", kClassify = "[CLS]", kSeparate = "[SEP]",
                           kPad = "[PAD]", kMask = "[MASK]";

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

// Reads a boolean; `fallback` if the file does not speak of it or says null.
bool read_flag(const nlohmann::json& json, const char* key, bool fallback,
               const std::string& origin) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return fallback;
  if (!found->is_boolean()) {
    throw InputError(origin + ": \"" + key + "\" is " + found->dump() + "; write true or false");
  }
  return found->get<bool>();
}

// Names of special tokens stand as strings or, in files of a tokenizer that was trained, as
// {"content": "[UNK]", ...}.
void check_special_token(const nlohmann::json& json, const char* key, std::string_view expected,
                         const std::string& origin) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return;
  const nlohmann::json content = found->is_object() ? found->value("content", *found) : *found;
  if (content != expected) {
    throw InputError(origin + ": \"" + key + "\" is " + content.dump() + "; only BERT's " +
                     std::string(expected) + " is understood");
  }
}

WordPieceOptions read_options(const std::filesystem::path& path) {
  WordPieceOptions options;
  if (!std::filesystem::exists(path)) return options;
  const auto json = read_json(path);
  const std::string origin = path.string();
  if (!json.is_object()) throw InputError(origin + ": is no JSON object; fetch the file again");
  if (!read_flag(json, "do_basic_tokenize", true, origin)) {
    throw InputError(origin +
                     ": \"do_basic_tokenize\" is false; only BERT's own splitting is known");
  }
  check_special_token(json, "unk_token", kUnknown, origin);
  check_special_token(json, "cls_token", kClassify, origin);
  check_special_token(json, "sep_token", kSeparate, origin);
  check_special_token(json, "pad_token", kPad, origin);
  options.do_lower_case = read_flag(json, "do_lower_case", true, origin);
  options.strip_accents = read_flag(json, "strip_accents", options.do_lower_case, origin);
  options.tokenize_chinese_chars = read_flag(json, "tokenize_chinese_chars", true, origin);
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
    const auto [place_of_first, is_new] =
        vocabulary_.emplace(tokens_[id], static_cast<std::int64_t>(id));
    if (!is_new) {
      throw InputError(place(origin, id + 1) + ": the token \"" + tokens_[id] +
                       "\" already stands in line " + std::to_string(place_of_first->second + 1) +
                       "; keep one of them");
    }
  }
  const auto required = [&](std::string_view token) {
    const auto found = vocabulary_.find(token);
    if (found != vocabulary_.end()) return found->second;
    throw InputError(origin.string() + ": lacks the token " + std::string(token) +
                     "; give the vocabulary that belongs to the model");
  };
  unk_id_ = required(kUnknown);
  cls_id_ = required(kClassify);
  sep_id_ = required(kSeparate);
  pad_id_ = required(kPad);
  special_ids_ = {unk_id_, cls_id_, sep_id_, pad_id_};
  const auto mask = vocabulary_.find(kMask);
  if (mask != vocabulary_.end()) special_ids_.push_back(mask->second);
}

std::vector<std::string> WordPiece::pre_tokenize(std::string_view utf8) const {
  std::vector<std::string> words;
  const auto text = normalize(utf8, 0);
  for (const Word& word : split_words(text)) {
    words.emplace_back();
    for (const Character& c : word) append_utf8(c.code_point, words.back());
  }
  return words;
}

Encoding WordPiece::encode(std::string_view utf8, bool add_special_tokens) const {
  Encoding encoding;
  if (add_special_tokens) append_token(cls_id_, 0, 0, encoding);
  std::size_t done = 0;
  for (std::size_t at = utf8.find('['); at != std::string_view::npos; at = utf8.find('[', at)) {
    const auto special = special_token_at(utf8.substr(at));
    if (!special) {
      ++at;
      continue;
    }
    append_text(utf8.substr(done, at - done), done, encoding);
    done = at + tokens_[static_cast<std::size_t>(*special)].size();
    append_token(*special, at, done, encoding);
    at = done;
  }
  append_text(utf8.substr(done), done, encoding);
  if (add_special_tokens) append_token(sep_id_, 0, 0, encoding);
  return encoding;
}

std::vector<std::int64_t> WordPiece::encode_word(std::string_view word) const {
  auto ids = encode(word, /*add_special_tokens=*/false).ids;
  if (ids.empty()) ids.push_back(unk_id_);
  return ids;
}

std::optional<std::int64_t> WordPiece::special_token_at(std::string_view text) const {
  for (const std::int64_t id : special_ids_) {
    if (text.starts_with(tokens_[static_cast<std::size_t>(id)])) return id;
  }
  return std::nullopt;
}

void WordPiece::append_text(std::string_view utf8, std::size_t first_byte,
                            Encoding& encoding) const {
  const auto text = normalize(utf8, first_byte);
  for (const Word& word : split_words(text)) append_pieces(word, encoding);
}

std::vector<WordPiece::Character> WordPiece::normalize(std::string_view utf8,
                                                       std::size_t first_byte) const {
  if (const auto invalid = first_invalid_utf8(utf8)) {
    throw InputError("byte " + std::to_string(first_byte + *invalid + 1) +
                     " of the text is not UTF-8; give the text as UTF-8");
  }
  auto text = clean(utf8, first_byte);
  if (options_.strip_accents) text = without_accents(text);
  if (options_.do_lower_case) text = lower_cased(text);
  return text;
}

// Drops control characters, makes all white space a space and parts ideographs from their
// neighbours.
std::vector<WordPiece::Character> WordPiece::clean(std::string_view utf8,
                                                   std::size_t first_byte) const {
  constexpr char32_t kReplacement = 0xFFFD;
  std::vector<Character> text;
  text.reserve(utf8.size());
  for (std::size_t offset = 0; offset < utf8.size();) {
    const std::size_t begin = first_byte + offset;
    const char32_t c = next_code_point(utf8, offset);
    const std::size_t end = first_byte + offset;
    if (c == 0 || c == kReplacement || is_control(c)) continue;
    if (is_white_space(c)) {
      text.push_back({U' ', begin, end});
    } else if (options_.tokenize_chinese_chars && is_ideograph(c)) {
      text.insert(text.end(), {{U' ', begin, end}, {c, begin, end}, {U' ', begin, end}});
    } else {
      text.push_back({c, begin, end});
    }
  }
  return text;
}

// NFD without its non-spacing marks.
std::vector<WordPiece::Character> WordPiece::without_accents(const std::vector<Character>& text) {
  std::vector<Character> decomposed;
  decomposed.reserve(text.size());
  std::vector<char32_t> parts;
  for (const Character& c : text) {
    parts.clear();
    append_decomposed(c.code_point, parts);
    for (const char32_t part : parts) decomposed.push_back({part, c.begin, c.end});
  }
  // Canonical order: within a run of marks, by combining class.
  const auto is_starter = [](const Character& c) { return combining_class(c.code_point) == 0; };
  for (auto run = decomposed.begin(); run != decomposed.end();) {
    run = std::find_if_not(run, decomposed.end(), is_starter);
    const auto run_end = std::find_if(run, decomposed.end(), is_starter);
    std::stable_sort(run, run_end, [](const Character& left, const Character& right) {
      return combining_class(left.code_point) < combining_class(right.code_point);
    });
    run = run_end;
  }
  std::erase_if(decomposed, [](const Character& c) { return is_nonspacing_mark(c.code_point); });
  return decomposed;
}

std::vector<WordPiece::Character> WordPiece::lower_cased(const std::vector<Character>& text) {
  std::vector<Character> lowered;
  lowered.reserve(text.size());
  std::vector<char32_t> parts;
  for (const Character& c : text) {
    parts.clear();
    append_lower_case(c.code_point, parts);
    for (const char32_t part : parts) lowered.push_back({part, c.begin, c.end});
  }
  return lowered;
}

// At spaces, which vanish, and around punctuation, each mark of which is a word.
std::vector<WordPiece::Word> WordPiece::split_words(const std::vector<Character>& text) {
  std::vector<Word> words;
  const auto is_letter = [](const Character& c) {
    return !is_white_space(c.code_point) && !is_punctuation(c.code_point);
  };
  for (auto at = text.begin(); at != text.end();) {
    auto end = std::find_if_not(at, text.end(), is_letter);
    if (end != at) words.emplace_back(at, end);
    at = end;
    if (at == text.end()) break;
    if (is_punctuation(at->code_point)) words.emplace_back(at, at + 1);
    ++at;
  }
  return words;
}

void WordPiece::append_token(std::int64_t id, std::size_t begin, std::size_t end,
                             Encoding& encoding) const {
  encoding.ids.push_back(id);
  encoding.tokens.push_back(tokens_[static_cast<std::size_t>(id)]);
  encoding.offsets.emplace_back(begin, end);
}

// Covers the word from the left, each time with the longest piece there is; [UNK] for the whole
// word if that fails.
void WordPiece::append_pieces(Word word, Encoding& encoding) const {
  const std::size_t pieces_before = encoding.ids.size();
  const auto append_unknown = [&] {
    encoding.ids.resize(pieces_before);
    encoding.tokens.resize(pieces_before);
    encoding.offsets.resize(pieces_before);
    append_token(unk_id_, word.front().begin, word.back().end, encoding);
  };
  if (word.size() > kMaxWordCharacters) return append_unknown();
  for (std::size_t first = 0; first < word.size();) {
    const auto [id, length] = longest_piece(word.subspan(first), /*continues=*/first > 0);
    if (length == 0) return append_unknown();
    append_token(id, word[first].begin, word[first + length - 1].end, encoding);
    first += length;
  }
}

WordPiece::Piece WordPiece::longest_piece(Word rest, bool continues) const {
  std::string candidate(continues ? kContinuation : std::string_view());
  std::array<std::size_t, kMaxWordCharacters> ends{};  // of each character in `candidate`
  for (std::size_t i = 0; i < rest.size(); ++i) {
    append_utf8(rest[i].code_point, candidate);
    ends[i] = candidate.size();
  }
  for (std::size_t length = rest.size(); length > 0; --length) {
    const auto found = vocabulary_.find(std::string_view(candidate).substr(0, ends[length - 1]));
    if (found != vocabulary_.end()) return {found->second, length};
  }
  return {};
}

}  // namespace bert_ner
