#include "progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace bert_ner {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

const ProgressStatus kHalfway{.epoch = 1,
                              .epochs = 3,
                              .step = 50,
                              .steps = 100,
                              .loss = 0.31214,
                              .scale = 65536,
                              .skipped = 2,
                              .tokens_per_second = 2310.4,
                              .seconds_left = 65};

TEST(Progress, SaysWhatMatters) {
  EXPECT_EQ(
      progress_text(kHalfway),
      "epoch 1/3  step 50/100  loss 0.3121  scale 65536  skipped 2  2310 tokens/s  1:05 left");
  auto long_run = kHalfway;
  long_run.seconds_left = 3 * 3600 + 61;
  EXPECT_THAT(progress_text(long_run), EndsWith("3:01:01 left"));
}

TEST(Progress, DrawsABarWhereThereIsRoom) {
  const std::string text = "50/100  loss 0.3121  scale 65536  skipped 2  2310 tokens/s  1:05 left";
  const int length = static_cast<int>(text.size());
  EXPECT_EQ(progress_bar(kHalfway, length + 23), "[==========>         ] " + text);
  EXPECT_EQ(progress_bar(kHalfway, 79).substr(0, 10), "[===>   ] ");  // a terminal of 80 columns
  EXPECT_EQ(progress_bar(kHalfway, length + 5), text);
  EXPECT_EQ(progress_bar(kHalfway, 10), text.substr(0, 10));
}

StepReport a_step() {
  return {.loss = torch::tensor(0.5),
          .tokens = 10,
          .result = mezzo::StepResult(mezzo::StepOutcome{.ran = true, .scale = 8})};
}

TEST(Progress, RewritesOneLineOfATerminal) {
  std::ostringstream out;
  {
    Progress progress(out, Progress::Style::bar, 1, 1, 0, 0);
    progress.on_step(a_step(), {.steps = 1});
    progress.say("Gradient overflow.");
  }
  EXPECT_THAT(out.str(), MatchesRegex("\r\x1b\\[K\\[=+ *\\] 1/1  loss 0.5000.*\n"));
  EXPECT_THAT(out.str(), EndsWith("\r\x1b[KGradient overflow.\n"));
}

TEST(Progress, WritesPlainLinesElsewhere) {
  std::ostringstream out;
  {
    Progress progress(out, Progress::Style::lines, 1, 3, 0, 1);
    progress.on_skip({.scale = 16, .next_scale = 8});
    for (int64_t step = 1; step <= 3; ++step) progress.on_step(a_step(), {.steps = step});
    EXPECT_EQ(progress.tokens(), 30);
  }
  // Three quick steps: no line before the last one, which is always shown.
  EXPECT_THAT(out.str(),
              StartsWith("Gradient overflow.  Skipping step, loss scaler 0 reducing loss "
                         "scale to 8.0\nepoch 1/1  step 3/3  loss 0.5000  scale 8  skipped 2"));
  EXPECT_THAT(out.str(), Not(HasSubstr("\r")));
}

TEST(Progress, IsSilentWhenToldSo) {
  std::ostringstream out;
  {
    Progress progress(out, Progress::Style::none, 1, 1, 0, 0);
    progress.on_step(a_step(), {.steps = 1});
    progress.say("nothing");
  }
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace bert_ner
