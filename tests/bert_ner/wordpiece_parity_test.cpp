// Compares WordPiece with what Hugging Face's `tokenizers` made of the same text
// (make_tokenizer_expectation.py).
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "scratch_folder.h"
#include "text.h"
#include "wordpiece.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

// The configurations of the script, as tokenizer_config.json spells them.
const std::map<std::string, std::string>& configurations() {
  static const std::map<std::string, std::string> all{
      {"uncased", R"({"do_lower_case": true, "strip_accents": null})"},
      {"cased", R"({"do_lower_case": false})"},
      {"accents", R"({"do_lower_case": true, "strip_accents": false})"},
      {"cased_stripped", R"({"do_lower_case": false, "strip_accents": true})"},
      {"joined_ideographs", R"({"do_lower_case": true, "tokenize_chinese_chars": false})"},
  };
  return all;
}

std::map<std::string, WordPiece> load_all(const fs::path& folder) {
  std::map<std::string, WordPiece> loaded;
  const test::ScratchFolder scratch;
  fs::copy_file(folder / "vocab.txt", scratch / "vocab.txt");
  for (const auto& [name, json] : configurations()) {
    scratch.write("tokenizer_config.json", json);
    loaded.emplace(name, WordPiece::from_folder(scratch.path()));
  }
  return loaded;
}

// The number of lines compared. Stops at the tenth difference.
std::size_t expect_same_pieces(const fs::path& folder) {
  const auto tokenizers = load_all(folder);
  std::ifstream corpus(folder / "corpus.jsonl", std::ios::binary);
  std::size_t lines = 0, different = 0;
  for (std::string line; different < 10 && std::getline(corpus, line); ++lines) {
    const auto row = nlohmann::json::parse(line);
    const auto configuration = row[0].get<std::string>(), text = row[1].get<std::string>();
    const auto& tokenizer = tokenizers.at(configuration);
    WordPiece::Ids ids{tokenizer.cls_id()};
    const auto pieces = tokenizer.encode(text);
    ids.insert(ids.end(), pieces.begin(), pieces.end());
    ids.push_back(tokenizer.sep_id());
    if (ids == row[2].get<WordPiece::Ids>()) continue;
    ++different;
    ADD_FAILURE() << configuration << " " << row[1].dump(-1, ' ', true) << "\n  ours   "
                  << nlohmann::json(ids) << "\n  theirs " << row[2];
  }
  return lines;
}

TEST(WordPieceParity, GivesThePiecesOfTokenizersOnTheCommittedLines) {
  EXPECT_GT(expect_same_pieces(fs::path(BERT_NER_TEST_DATA) / "small"), 300u);
}

#ifdef BERT_NER_EXPECTATION

TEST(WordPieceParity, GivesThePiecesOfTokenizersOnTenThousandLinesOfMixedScripts) {
  EXPECT_GT(expect_same_pieces(BERT_NER_EXPECTATION), 10000u);
}

// What becomes of a code point between "a" and "b", in the script's words.
std::string outcome_of(const WordPiece& tokenizer, char32_t c) {
  const std::string character = to_utf8({&c, 1});
  const auto words = tokenizer.pre_tokenize("a" + character + "b");
  if (words == std::vector<std::string>{"ab"}) return "gone";
  if (words == std::vector<std::string>{"a", "b"}) return "parted";
  if (words == std::vector<std::string>{"a" + character + "b"}) return "same";
  if (words == std::vector<std::string>{"a", character, "b"}) return "word";
  std::ostringstream spelled;
  spelled << std::hex << std::uppercase << '=';
  for (const auto& word : words) {
    if (&word != &words.front()) spelled << ',';
    for (std::size_t at = 0; at < word.size();) {
      if (at > 0) spelled << ' ';
      spelled << static_cast<std::uint32_t>(next_code_point(word, at));
    }
  }
  return spelled.str();
}

std::set<char32_t> listed_differences() {
  std::set<char32_t> listed;
  std::ifstream file(fs::path(BERT_NER_TEST_DATA) / "tokenizer_differences.txt");
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.starts_with('#')) continue;
    std::uint32_t first = 0, last = 0;
    std::istringstream(line) >> std::hex >> first >> last;
    for (std::uint32_t c = first; c <= last; ++c) listed.insert(static_cast<char32_t>(c));
  }
  return listed;
}

// Takes half a second: it goes through all of Unicode.
TEST(WordPieceParity, DiffersFromTokenizersOnExactlyTheListedCodePoints) {
  const auto tokenizer = load_all(BERT_NER_EXPECTATION).at("uncased");
  const auto listed = listed_differences();
  std::size_t code_points = 0, wrong = 0;
  std::ifstream runs(fs::path(BERT_NER_EXPECTATION) / "characters.txt");
  for (std::string line; std::getline(runs, line);) {
    std::uint32_t first = 0, last = 0;
    std::istringstream fields(line);
    fields >> std::hex >> first >> last >> std::ws;
    std::string theirs;
    std::getline(fields, theirs);
    for (std::uint32_t c = first; c <= last; ++c, ++code_points) {
      const std::string ours = outcome_of(tokenizer, static_cast<char32_t>(c));
      const bool is_listed = listed.contains(static_cast<char32_t>(c));
      if ((ours != theirs) == is_listed || ++wrong > 100) continue;
      ADD_FAILURE() << std::hex << std::uppercase << c << ": ours " << ours << ", theirs " << theirs
                    << (is_listed ? ", listed" : ", not listed");
    }
  }
  EXPECT_EQ(code_points, 0x110000u - 0x800u);
}

#endif  // BERT_NER_EXPECTATION

}  // namespace
}  // namespace bert_ner
