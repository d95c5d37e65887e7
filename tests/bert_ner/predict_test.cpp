#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "dataset.h"
#include "tagging.h"
#include "text.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string predict_text(const std::string& text, const std::string& file = {}) {
  PredictOptions options;
  options.text = text;
  options.file = file;
  options.saved = test::tiny_bert_folder().string();
  std::ostringstream out;
  predict(options, out);
  return out.str();
}

TEST(Predict, GivesEachWordATag) {
  const test_support::Scratch scratch;
  const auto file = scratch.write("out.txt", predict_text(" alice\tlives in paris ."));
  const auto sentences = read_conll(file);
  ASSERT_EQ(sentences.size(), 1U);
  EXPECT_THAT(sentences[0].words, ElementsAre("alice", "lives", "in", "paris", "."));
}

TEST(Predict, LabelsALineAtATimeAndJoinsLongOnes) {
  const test_support::Scratch scratch;
  std::string line;
  for (int i = 0; i < 50; ++i) line += "alice ";  // the model reads 18 words at a time
  const auto input = scratch.write("in.txt", "bob met carol\n\n" + line + "\n");
  const auto file = scratch.write("out.txt", predict_text({}, input.string()));
  const auto sentences = read_conll(file);
  ASSERT_EQ(sentences.size(), 2U);
  EXPECT_EQ(sentences[0].words.size(), 3U);
  EXPECT_EQ(sentences[1].words.size(), 50U);
}

TEST(Predict, RefusesAnEnvironmentThatNamesNothing) {
  setenv("MEZZO_AUTOCAST", "fast", 1);
  EXPECT_THROW(predict_text("alice"), c10::Error);
  unsetenv("MEZZO_AUTOCAST");
}

TEST(Predict, SaysWhenThereIsNothingToLabel) {
  try {
    predict_text("  ");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("has no words"));
  }
}

}  // namespace
}  // namespace bert_ner
