#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dataset.h"
#include "text.h"

namespace bert_ner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Labels kLabels({"O", "B-x", "I-x"});

std::string weight_error(const std::string& spec) {
  try {
    parse_class_weights(spec, kLabels);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Labels, PutsOutsideFirstAndTheOthersInOrder) {
  const std::vector<Sentence> sentences{{{"a", "b"}, {"I-z", "B-a"}, 1}, {{"c"}, {"B-z"}, 4}};
  const auto labels = Labels::of(sentences);
  EXPECT_THAT(labels.names(), ElementsAre("O", "B-a", "B-z", "I-z"));
  EXPECT_EQ(labels.id("B-z"), 2);
  EXPECT_EQ(labels.id("B-unknown"), std::nullopt);
}

TEST(Labels, AreOneEach) {
  EXPECT_THROW(Labels({"O", "B-x", "O"}), InputError);
  EXPECT_THROW(Labels(std::vector<std::string>{}), InputError);
}

TEST(ClassWeights, AreOneUnlessSaid) {
  EXPECT_THAT(parse_class_weights("", kLabels), ElementsAre(1, 1, 1));
  EXPECT_THAT(parse_class_weights("I-x=2.5, O=1e-1", kLabels), ElementsAre(0.1, 1, 2.5));
}

TEST(ClassWeights, SayWhatTheyCannotRead) {
  EXPECT_THAT(weight_error("B-y=2"), HasSubstr("no label \"B-y\"; it has O, B-x, I-x"));
  for (const char* bad : {"B-x=", "B-x=two", "B-x=2x", "B-x=-1", "B-x=0", "B-x=inf", "B-x=nan",
                          "B-x=1e-46", "B-x=1e300"}) {
    EXPECT_THAT(weight_error(bad), HasSubstr("has no number above 0")) << bad;
  }
  EXPECT_THAT(weight_error("B-x=2,O"), HasSubstr("\"O\" has no number"));
}

}  // namespace
}  // namespace bert_ner
