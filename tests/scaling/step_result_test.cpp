#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/step_letter.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>

namespace {

using mezzo::StepOutcome;
using mezzo::StepResult;
using mezzo::detail::LetterPool;
using mezzo::detail::StepLetter;

/// A step that is decided elsewhere: the outcome arrives when somebody waits for it.
class LateSlot : public mezzo::StepSlot {
 public:
  bool ready() const noexcept override { return waited; }
  const StepOutcome& outcome() override {
    waited = true;
    return outcome_;
  }
  bool waited = false;

 private:
  StepOutcome outcome_{.found_inf = true, .scale = 4.0F};
};

TEST(StepResult, TellsAKnownOutcomeAtOnce) {
  const StepResult result(StepOutcome{.ran = true, .scale = 8.0F, .value = torch::ones({})});
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.ran());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 8.0F);
  ASSERT_TRUE(result.value().has_value());
  EXPECT_EQ(result.value()->item<float>(), 1.0F);
}

TEST(StepResult, AsksALateSlotWithoutWaitingUntilItMust) {
  const auto slot = std::make_shared<LateSlot>();
  const StepResult result(slot);
  EXPECT_FALSE(result.ready());
  EXPECT_FALSE(slot->waited);
  EXPECT_FALSE(result.ran());
  EXPECT_TRUE(slot->waited);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.found_inf());
  EXPECT_EQ(result.scale(), 4.0F);
  EXPECT_FALSE(result.value().has_value());
}

TEST(StepResult, OwnsItsSlotTogetherWithItsCopies) {
  auto slot = std::make_shared<LateSlot>();
  const std::weak_ptr<LateSlot> watch = slot;
  auto first = std::make_unique<StepResult>(std::move(slot));
  const StepResult second = *first;
  first.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(second.found_inf());
}

TEST(StepResult, RefusesANullSlot) {
  EXPECT_THROW(StepResult(std::shared_ptr<mezzo::StepSlot>()), c10::Error);
}

// --- Answers of a step that a device decides; what is sent arrives when the test sends it.

void answer(StepLetter& letter, float scale, double norm, bool found_inf) {
  const auto sum = torch::full({}, norm * norm, torch::kDouble);
  const auto found = torch::full({}, found_inf ? 1.0F : 0.0F);
  const auto max_abs = torch::full({}, norm / 2, torch::kDouble);
  letter.send(torch::full({}, scale), {torch::ones({}), found, sum, max_abs},
              /*was_unscaled=*/true);
}

TEST(StepLetter, HasTheAnswerThatWasSent) {
  const auto letter = std::make_shared<StepLetter>(torch::kCPU);
  const mezzo::StepResult result(letter);
  EXPECT_THROW((void)result.ran(), c10::Error);
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

TEST(LetterPool, UsesOneAgainWhoseResultIsGone) {
  LetterPool pool;
  auto letter = pool.letter_for(torch::kCPU);
  const auto* const address = letter.get();
  auto result = std::make_unique<mezzo::StepResult>(letter);
  answer(*letter, 8.0F, 5.0, true);
  letter = nullptr;
  EXPECT_TRUE(result->found_inf());
  EXPECT_NE(pool.letter_for(torch::kCPU).get(), address) << "a result holds it";
  EXPECT_TRUE(result->found_inf());
  EXPECT_EQ(result->scale(), 8.0F);
  result = nullptr;
  EXPECT_EQ(pool.letter_for(torch::kCPU).get(), address);
}

}  // namespace
