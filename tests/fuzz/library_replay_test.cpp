// What fuzzing has found in the library's readers, once more: tests/fuzz/run finds new cases.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "replay.h"
#include "targets.h"

namespace {

using testing::IsEmpty;

TEST(FuzzedLibrary, ReadsCheckpoints) {
  EXPECT_THAT(fuzz::unread("checkpoint", fuzz::checkpoint), IsEmpty());
}
TEST(FuzzedLibrary, ReadsPolicies) { EXPECT_THAT(fuzz::unread("policy", fuzz::policy), IsEmpty()); }
TEST(FuzzedLibrary, ReadsStatesOfScalers) {
  EXPECT_THAT(fuzz::unread("scaler_state", fuzz::scaler_state), IsEmpty());
}
TEST(FuzzedLibrary, ReadsWordsOfFlagsAndVariables) {
  EXPECT_THAT(fuzz::unread("words", fuzz::words), IsEmpty());
}

}  // namespace
