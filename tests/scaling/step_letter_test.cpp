// Answers of a step that a device decides, with the CPU in the device's place: what is sent arrives
// when the test sends it.

#include <mezzo/scaling/detail/step_letter.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>

namespace {

using mezzo::detail::DeviceStepSlot;
using mezzo::detail::LetterPool;
using mezzo::detail::StepLetter;

void answer(StepLetter& letter, float scale, double norm, bool found_inf) {
  const auto sum = torch::full({}, norm * norm, torch::kDouble);
  const auto found = torch::full({}, found_inf ? 1.0F : 0.0F);
  const auto max_abs = torch::full({}, norm / 2, torch::kDouble);
  letter.send(torch::full({}, scale), {torch::ones({}), found, sum, max_abs},
              /*was_unscaled=*/true);
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

TEST(LetterPool, DoesNotReuseOneThatSomebodyHolds) {
  LetterPool pool;
  const auto first = pool.letter_for(torch::kCPU);
  EXPECT_NE(pool.letter_for(torch::kCPU), first);
}

TEST(LetterPool, UsesOneAgainThatAStepWhichThrewDidNotSend) {
  LetterPool pool;
  const auto* const address = pool.letter_for(torch::kCPU).get();
  EXPECT_EQ(pool.letter_for(torch::kCPU).get(), address);
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

}  // namespace
