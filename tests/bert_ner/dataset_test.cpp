#include "dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>

#include "../support/scratch.h"
#include "text.h"

namespace bert_ner {
namespace {

using test_support::Scratch;
using Strings = std::vector<std::string>;

class ConllFile : public testing::Test {
 protected:
  std::vector<Sentence> read(std::string_view text) {
    return read_conll(folder_.write("text.conll", text));
  }

  // The message without the folder: "text.conll:3: ...".
  std::string error_of(std::string_view text) {
    try {
      read(text);
    } catch (const InputError& error) {
      return std::string(error.what()).substr(folder_.path().string().size() + 1);
    }
    return "no error";
  }

  Scratch folder_;
};

TEST_F(ConllFile, IsReadAsSentencesOfWordsAndTags) {
  const auto sentences = read("Empire\tB-facility\nState\tI-facility\n\t\n\nrains\tO\n");
  ASSERT_EQ(sentences.size(), 2u);
  EXPECT_EQ(sentences[0].words, (Strings{"Empire", "State"}));
  EXPECT_EQ(sentences[0].tags, (Strings{"B-facility", "I-facility"}));
  EXPECT_EQ(sentences[0].line, 1u);
  EXPECT_EQ(sentences[1].words, Strings{"rains"});
  EXPECT_EQ(sentences[1].line, 5u);
}

TEST_F(ConllFile, MayHaveColumnsInBetweenAndBeSpaced) {
  const auto sentences = read("-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\n rejects  VBZ B-VP O \n");
  ASSERT_EQ(sentences.size(), 1u);
  EXPECT_EQ(sentences[0].words, (Strings{"EU", "rejects"}));
  EXPECT_EQ(sentences[0].tags, (Strings{"B-ORG", "O"}));
}

TEST_F(ConllFile, MayComeFromWindowsAndLackTheLastNewline) {
  const auto sentences = read(
      "\xEF\xBB\xBF"
      "Rio\tB-LOC\r\n\r\nde\tO");
  ASSERT_EQ(sentences.size(), 2u);
  EXPECT_EQ(sentences[0].words, Strings{"Rio"});
  EXPECT_EQ(sentences[0].tags, Strings{"B-LOC"});
}

TEST_F(ConllFile, KeepsSpacesInsideAWordOfATabbedLine) {
  EXPECT_EQ(read("New York\tB-LOC\n")[0].words, Strings{"New York"});
}

TEST_F(ConllFile, IsRefusedWithTheLineThatLacksAColumn) {
  EXPECT_TRUE(error_of("a\tO\nRio\n").starts_with("text.conll:2: has no tag for \"Rio\"; "));
  EXPECT_TRUE(error_of("a\tO\nRio\t\n").starts_with("text.conll:2: has no tag for \"Rio\"; "));
  EXPECT_TRUE(error_of("a\tO\n\n\tO\n").starts_with("text.conll:3: has no word"));
}

TEST_F(ConllFile, IsRefusedWithTheLineOfATagThatIsNotBio) {
  for (const std::string tag : {"S-LOC", "E-LOC", "B", "B-", "I-", "o", "LOC", "0", "b-LOC"}) {
    EXPECT_TRUE(error_of("a\tO\nRio\t" + tag + "\n")
                    .starts_with("text.conll:2: \"" + tag + "\" is not a BIO tag; write O, "))
        << error_of("a\tO\nRio\t" + tag + "\n");
  }
}

TEST_F(ConllFile, IsRefusedWithTheLineThatIsNotUtf8) {
  for (const std::string bytes : {"\xFF", "\xC3", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80"}) {
    EXPECT_EQ(error_of("a\tO\n\nab" + bytes + "\tO\n"),
              "text.conll:3: byte 3 of the line is not UTF-8; save the file as UTF-8");
  }
}

TEST_F(ConllFile, IsRefusedIfItHoldsNoSentence) {
  EXPECT_TRUE(error_of("").starts_with("text.conll: holds no sentence; "));
  EXPECT_TRUE(error_of("\n \n-DOCSTART- O\n").starts_with("text.conll: holds no sentence; "));
}

TEST_F(ConllFile, IsRefusedByNameIfItIsMissingOrAFolder) {
  EXPECT_THROW(read_conll(folder_ / "missing"), InputError);
  EXPECT_THROW(read_conll(folder_.path()), InputError);
}

std::vector<Sentence> numbered(std::size_t count) {
  std::vector<Sentence> sentences;
  for (std::size_t i = 0; i < count; ++i) {
    sentences.push_back({.words = {std::to_string(i)}, .tags = {"O"}, .line = i});
  }
  return sentences;
}

std::vector<std::size_t> lines(const std::vector<Sentence>& sentences) {
  std::vector<std::size_t> numbers;
  for (const auto& sentence : sentences) numbers.push_back(sentence.line);
  return numbers;
}

// The numbers follow from mt19937_64, which the standard fixes to the bit: they hold on every
// platform.
TEST(SplitBySeed, DrawsTheSameSentencesEverywhere) {
  const auto split = split_by_seed(numbered(10), 0.3, 42);
  EXPECT_EQ(lines(split.valid), (std::vector<std::size_t>{1, 7, 9}));
  EXPECT_EQ(lines(split.train), (std::vector<std::size_t>{0, 2, 3, 4, 5, 6, 8}));
}

TEST(SplitBySeed, PartsTheFileWithoutLossInItsOrder) {
  const auto split = split_by_seed(numbered(101), 0.2, 7);
  EXPECT_EQ(split.valid.size(), 20u);
  auto all = lines(split.train);
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
  const auto valid = lines(split.valid);
  EXPECT_TRUE(std::is_sorted(valid.begin(), valid.end()));
  all.insert(all.end(), valid.begin(), valid.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, lines(numbered(101)));
}

TEST(SplitBySeed, RefusesAShareThatLeavesAPartEmpty) {
  for (const double share : {0., 1., -0.1, 1.5, std::nan(""), 0.01, 0.99}) {
    EXPECT_THROW(split_by_seed(numbered(10), share, 1), InputError) << share;
  }
}

}  // namespace
}  // namespace bert_ner
