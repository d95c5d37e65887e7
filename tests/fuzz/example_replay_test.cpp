// What fuzzing has found in the readers of the BERT examples, once more: tests/fuzz/run finds new
// cases.

#include <gtest/gtest.h>

#include "replay.h"
#include "targets.h"

namespace {

TEST(FuzzedExamples, ReadSafetensors) { fuzz::replay("safetensors", fuzz::safetensors); }
TEST(FuzzedExamples, ReadVocabularies) { fuzz::replay("wordpiece", fuzz::wordpiece); }
TEST(FuzzedExamples, ReadConll) { fuzz::replay("conll", fuzz::conll); }
TEST(FuzzedExamples, ReadModelConfigs) { fuzz::replay("model_config", fuzz::model_config); }
TEST(FuzzedExamples, ReadAllOfTheOneInOneFile) { fuzz::replay("finetune", fuzz::finetune); }

}  // namespace
