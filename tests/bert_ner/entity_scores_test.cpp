#include "entity_scores.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

namespace bert_ner {
namespace {

TagSequences sequences(const nlohmann::json& sentences) {
  TagSequences all;
  for (const auto& sentence : sentences) {
    std::istringstream words(sentence.get<std::string>());
    all.emplace_back(std::istream_iterator<std::string>(words),
                     std::istream_iterator<std::string>());
  }
  return all;
}

void expect_equal(const Score& score, const nlohmann::json& expected) {
  EXPECT_EQ(score.precision, expected[0].get<double>());
  EXPECT_EQ(score.recall, expected[1].get<double>());
  EXPECT_EQ(score.f1, expected[2].get<double>());
}

TEST(EntityScores, GivesTheNumbersThatSeqevalRecorded) {
  std::ifstream recording(BERT_NER_TEST_DATA "/entity_scores.jsonl");
  int cases = 0;
  for (std::string line; std::getline(recording, line); ++cases) {
    SCOPED_TRACE(line);
    const auto row = nlohmann::json::parse(line);
    const auto truth = sequences(row[0]), predicted = sequences(row[1]);
    expect_equal(entity_scores(truth, predicted), row[2]);
    const auto by_type = entity_scores_by_type(truth, predicted);
    ASSERT_EQ(by_type.size(), row[3].size());
    for (const auto& [type, score] : by_type) {
      SCOPED_TRACE(type);
      expect_equal(score, row[3].at(type));
      EXPECT_EQ(score.support, row[3].at(type)[3].get<double>());
    }
  }
  EXPECT_EQ(cases, 40);
}

TEST(EntityScores, RefusesSequencesOfDifferentLength) {
  EXPECT_THROW(entity_scores({{"O"}}, {}), std::invalid_argument);
  EXPECT_THROW(entity_scores({{"O"}}, {{"O", "O"}}), std::invalid_argument);
}

}  // namespace
}  // namespace bert_ner
