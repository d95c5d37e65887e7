// Compares WordPiece with what Hugging Face's `tokenizers` made of the same text
// (make_tokenizer_expectation.py).
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "../support/scratch.h"
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
  const test_support::Scratch scratch;
  fs::copy_file(folder / "vocab.txt", scratch / "vocab.txt");
  for (const auto& [name, json] : configurations()) {
    scratch.write("tokenizer_config.json", json);
    loaded.emplace(name, WordPiece::from_folder(scratch.path()));
  }
  return loaded;
}

// The number of lines compared. Stops at the tenth difference.
[[maybe_unused]] std::size_t expect_same_pieces(const fs::path& folder) {
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

TEST(WordPieceParity, GivesThePiecesOfTokenizers) {
#ifdef BERT_NER_EXPECTATION
  EXPECT_GT(expect_same_pieces(BERT_NER_EXPECTATION), 10000u);
#else
  GTEST_SKIP() << "the Python packages that it is compared with are not installed";
#endif
}

}  // namespace
}  // namespace bert_ner
