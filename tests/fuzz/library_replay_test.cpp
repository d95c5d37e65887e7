// What fuzzing has found in the library's readers, once more: tests/fuzz/run finds new cases.

#include <gtest/gtest.h>

#include "replay.h"
#include "targets.h"

namespace {

TEST(FuzzedLibrary, ReadsCheckpoints) { fuzz::replay("checkpoint", fuzz::checkpoint); }
TEST(FuzzedLibrary, ReadsPolicies) { fuzz::replay("policy", fuzz::policy); }
TEST(FuzzedLibrary, ReadsStatesOfScalers) { fuzz::replay("scaler_state", fuzz::scaler_state); }
TEST(FuzzedLibrary, ReadsWordsOfFlagsAndVariables) { fuzz::replay("words", fuzz::words); }

}  // namespace
