// Answers of a step that a device decides, with the CPU in the device's place: what is sent arrives
// when the test sends it.

#include <mezzo/scaling/detail/step_letter.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace {

using mezzo::detail::DeviceStepSlot;
using mezzo::detail::LetterPool;
using mezzo::detail::PendingLines;
using mezzo::detail::StepLetter;

void answer(StepLetter& letter, float scale, double norm, bool found_inf) {
  const auto sum = torch::full({}, norm * norm, torch::kDouble);
  const auto found = torch::full({}, found_inf ? 1.0F : 0.0F);
  const auto max_abs = torch::full({}, norm / 2, torch::kDouble);
  letter.send(torch::full({}, scale), {torch::ones({}), found, sum, max_abs},
              /*was_unscaled=*/true);
}

void send_next_scale(StepLetter& letter, float scale) {
  letter.next_scale_place().fill_(scale);
  letter.next_scale_sent();
}

TEST(DeviceStepSlot, IsReadyWhenTheAnswerHasArrived) {
  const auto letter = std::make_shared<StepLetter>(torch::kCPU);
  const mezzo::StepResult result(std::make_shared<DeviceStepSlot>(letter));
  EXPECT_FALSE(result.ready());
  answer(*letter, 8.0F, 5.0, false);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.scale(), 8.0F);
  EXPECT_EQ(result.grad_norm(), 5.0);
  EXPECT_EQ(result.grad_max_abs(), 2.5);
  EXPECT_TRUE(result.was_unscaled());
}

TEST(LetterPool, DoesNotReuseOneThatSomebodyHoldsOrThatIsOnItsWay) {
  LetterPool pool;
  auto first = pool.letter_for(torch::kCPU);
  const auto* const address = first.get();
  auto second = pool.letter_for(torch::kCPU);
  EXPECT_NE(second.get(), address);
  first = nullptr;
  EXPECT_NE(pool.letter_for(torch::kCPU).get(), address) << "its answer has not arrived";
}

TEST(LetterPool, UsesOneThatWasReadAgainAndOldResultsKeepTheirAnswer) {
  LetterPool pool;
  auto letter = pool.letter_for(torch::kCPU);
  const auto* const address = letter.get();
  const mezzo::StepResult result(std::make_shared<DeviceStepSlot>(letter));
  answer(*letter, 8.0F, 5.0, true);
  letter = nullptr;
  EXPECT_NE(pool.letter_for(torch::kCPU).get(), address) << "the result has not been asked";
  EXPECT_TRUE(result.found_inf());
  const auto again = pool.letter_for(torch::kCPU);
  EXPECT_EQ(again.get(), address);
  EXPECT_FALSE(again->is_there());
  EXPECT_TRUE(result.found_inf());
  EXPECT_EQ(result.scale(), 8.0F);
}

TEST(PendingLines, AreToldInOrderOnceTheyAreKnown) {
  PendingLines lines;
  std::vector<std::pair<float, float>> told;
  std::vector<std::size_t> rows_ended;  // after how many that were told
  const auto poll = [&] {
    lines.poll([&](float scale, float next) { told.emplace_back(scale, next); },
               [&] { rows_ended.push_back(told.size()); });
  };
  std::vector<std::shared_ptr<StepLetter>> letters;
  for (int i = 0; i < 3; ++i) {
    letters.push_back(std::make_shared<StepLetter>(torch::kCPU));
    lines.add({letters.back()});
  }
  poll();
  EXPECT_TRUE(told.empty());
  answer(*letters[2], 4.0F, 1.0, true);
  send_next_scale(*letters[2], 2.0F);
  poll();
  EXPECT_TRUE(told.empty()) << "the first is not known yet";
  answer(*letters[0], 8.0F, 1.0, true);
  poll();
  EXPECT_TRUE(told.empty()) << "its next scale is not known yet";
  send_next_scale(*letters[0], 4.0F);
  answer(*letters[1], 4.0F, 1.0, false);
  send_next_scale(*letters[1], 4.0F);
  poll();
  const std::vector<std::pair<float, float>> expected{{8.0F, 4.0F}, {4.0F, 2.0F}};
  EXPECT_EQ(told, expected);
  EXPECT_EQ(rows_ended, std::vector<std::size_t>{1}) << "the second did not skip";
  EXPECT_TRUE(lines.empty());
  poll();
  EXPECT_EQ(told, expected);
}

TEST(PendingLines, TellOfAnIterationOnceThoughSeveralOptimizersSkipped) {
  PendingLines lines;
  std::vector<std::shared_ptr<StepLetter>> letters;
  for (const bool found_inf : {false, true, true}) {
    letters.push_back(std::make_shared<StepLetter>(torch::kCPU));
    answer(*letters.back(), 8.0F, 1.0, found_inf);
  }
  send_next_scale(*letters.back(), 4.0F);
  lines.add(letters);
  int told = 0;
  int rows_ended = 0;
  lines.poll([&](float, float) { ++told; }, [&] { ++rows_ended; });
  EXPECT_EQ(told, 1);
  EXPECT_EQ(rows_ended, 0);
}

}  // namespace
