#include "wordpiece.h"

#include <gtest/gtest.h>

#include <string>

#include "../support/scratch.h"
#include "text.h"

namespace bert_ner {
namespace {

using Strings = std::vector<std::string>;
using Ids = std::vector<std::int64_t>;

constexpr std::string_view kVocabulary =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nem\n##pire\n##e\nstate\n'\nm\ncafe\nCafé\ncafé\n中\n##"
    "文\n";

class WordPieceFolder : public testing::Test {
 protected:
  WordPiece load(std::string_view vocabulary = kVocabulary, std::string_view configuration = "{}") {
    folder_.write("vocab.txt", vocabulary);
    folder_.write("tokenizer_config.json", configuration);
    return WordPiece::from_folder(folder_.path());
  }

  Strings pieces_of(std::string_view text) {
    const auto tokenizer = load();
    Strings pieces;
    for (const auto id : tokenizer.encode(text)) pieces.push_back(tokenizer.token(id));
    return pieces;
  }

  // The message without the folder.
  std::string error_of(std::string_view vocabulary, std::string_view configuration = "{}") {
    try {
      load(vocabulary, configuration);
    } catch (const InputError& error) {
      return std::string(error.what()).substr(folder_.path().string().size() + 1);
    }
    return "no error";
  }

  test_support::Scratch folder_;
};

TEST_F(WordPieceFolder, GivesTheLongestPieces) {
  EXPECT_EQ(load().encode("Empire  State"), (Ids{5, 6, 8}));
  EXPECT_EQ(pieces_of("Empire  State"), (Strings{"em", "##pire", "state"}));
}

TEST_F(WordPieceFolder, MakesAWordUnknownAsAWhole) {
  EXPECT_EQ(pieces_of("empirestate 'm"), (Strings{"[UNK]", "'", "m"}));
}

TEST_F(WordPieceFolder, ReadsSpecialTokensSpelledOutInTheText) {
  EXPECT_EQ(pieces_of("em[MASK]em [mask]"),
            (Strings{"em", "[MASK]", "em", "[UNK]", "[UNK]", "[UNK]"}));
}

TEST_F(WordPieceFolder, SplitsNormalisedTextIntoWords) {
  EXPECT_EQ(load().pre_tokenize(" Café,\tÀ-中文\u200b!"),
            (Strings{"cafe", ",", "a", "-", "中", "文", "!"}));
}

TEST_F(WordPieceFolder, PutsMarksInCanonicalOrder) {
  // Combining classes 224 and 216; both are spacing marks, so neither is stripped.
  EXPECT_EQ(load().pre_tokenize("a\u302f\U0001d165b"), Strings{"a\U0001d165\u302fb"});
}

TEST_F(WordPieceFolder, FollowsTheConfiguration) {
  EXPECT_EQ(load().pre_tokenize("Café"), Strings{"cafe"});
  EXPECT_EQ(load(kVocabulary, R"({"do_lower_case": false})").pre_tokenize("Café"), Strings{"Café"});
  EXPECT_EQ(load(kVocabulary, R"({"strip_accents": false})").pre_tokenize("CafÉ"), Strings{"café"});
  EXPECT_EQ(load(kVocabulary, R"({"tokenize_chinese_chars": false})").encode("中文"),
            (Ids{14, 15}));
}

TEST_F(WordPieceFolder, LowerCasesADottedCapitalIToTwoCharacters) {
  EXPECT_EQ(load(kVocabulary, R"({"strip_accents": false})").pre_tokenize("İ"), Strings{"i\u0307"});
  EXPECT_EQ(load().pre_tokenize("İ"), Strings{"i"});
}

TEST_F(WordPieceFolder, IsBertsUncasedWithoutAConfiguration) {
  folder_.write("vocab.txt", kVocabulary);
  EXPECT_EQ(WordPiece::from_folder(folder_.path()).pre_tokenize("CAFÉ"), Strings{"cafe"});
}

TEST_F(WordPieceFolder, EncodesEveryConllWordAsAtLeastOnePiece) {
  EXPECT_EQ(load().encode_word("Empire"), (Ids{5, 6}));
  EXPECT_EQ(load().encode_word("\u200b"), Ids{1});
  EXPECT_EQ(load().encode_word(""), Ids{1});
}

TEST_F(WordPieceFolder, NamesTheIdsOfItsSpecialTokens) {
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer.pad_id(), 0);
  EXPECT_EQ(tokenizer.cls_id(), 2);
  EXPECT_EQ(tokenizer.sep_id(), 3);
  EXPECT_EQ(tokenizer.size(), 16u);
}

TEST_F(WordPieceFolder, RefusesTextThatIsNotUtf8) {
  const auto tokenizer = load();
  EXPECT_THROW(tokenizer.encode("em\xFF"), InputError);
  EXPECT_THROW(tokenizer.pre_tokenize("\xED\xA0\x80"), InputError);
  EXPECT_THROW(tokenizer.encode("[CLS]\xC3"), InputError);
}

TEST_F(WordPieceFolder, RefusesAVocabularyThatLacksASpecialToken) {
  for (const std::string token : {"[UNK]", "[CLS]", "[SEP]", "[PAD]"}) {
    std::string vocabulary(kVocabulary);
    vocabulary.erase(vocabulary.find(token), token.size() + 1);
    EXPECT_TRUE(error_of(vocabulary).starts_with("vocab.txt: lacks the token " + token + "; "));
  }
  EXPECT_TRUE(error_of("").starts_with("vocab.txt: lacks the token [UNK]"));
}

TEST_F(WordPieceFolder, RefusesAVocabularyWithAMistakeAndNamesTheLine) {
  EXPECT_EQ(error_of("[PAD]\nem\nem\n"),
            "vocab.txt:3: the token \"em\" already stands in line 2; keep one of them");
  EXPECT_EQ(error_of("[PAD]\n\nem\n"), "vocab.txt:2: holds no token; remove the blank line");
  EXPECT_TRUE(
      error_of("[PAD]\n\xFF\n").starts_with("vocab.txt:2: byte 1 of the line is not UTF-8"));
}

TEST_F(WordPieceFolder, RefusesAConfigurationItCannotFollow) {
  const auto error = [&](std::string_view json) { return error_of(kVocabulary, json); };
  EXPECT_TRUE(
      error(R"({"do_lower_case": "yes"})")
          .starts_with("tokenizer_config.json: \"do_lower_case\" is \"yes\"; write true or false"));
  EXPECT_TRUE(error(R"({"do_basic_tokenize": false})").starts_with("tokenizer_config.json: "));
  EXPECT_TRUE(error("[]").starts_with("tokenizer_config.json: \"do_basic_tokenize\" is []"));
  EXPECT_EQ(error(R"({"unk_token": {"content": "[UNK]"}, "strip_accents": null})"), "no error");
}

TEST_F(WordPieceFolder, NamesTheFileThatIsMissing) {
  try {
    WordPiece::from_folder(folder_.path());
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with((folder_ / "vocab.txt").string() + ": cannot be opened (No such"));
  }
}

}  // namespace
}  // namespace bert_ner
