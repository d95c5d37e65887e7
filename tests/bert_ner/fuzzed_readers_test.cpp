// What fuzzing has found in the readers of the BERT examples, once more: tests/fuzz/run finds new
// cases.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../fuzz/replay.h"
#include "../fuzz/targets.h"

namespace {

using testing::IsEmpty;

TEST(FuzzedExamples, ReadSafetensors) {
  EXPECT_THAT(fuzz::unread("safetensors", fuzz::safetensors), IsEmpty());
}
TEST(FuzzedExamples, ReadVocabularies) {
  EXPECT_THAT(fuzz::unread("wordpiece", fuzz::wordpiece), IsEmpty());
}
TEST(FuzzedExamples, ReadConll) { EXPECT_THAT(fuzz::unread("conll", fuzz::conll), IsEmpty()); }
TEST(FuzzedExamples, ReadModelConfigs) {
  EXPECT_THAT(fuzz::unread("model_config", fuzz::model_config), IsEmpty());
}
TEST(FuzzedExamples, ReadAllOfTheOneInOneFile) {
  EXPECT_THAT(fuzz::unread("finetune", fuzz::finetune), IsEmpty());
}

}  // namespace
