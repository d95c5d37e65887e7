#include <mezzo/optim/step_result.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>

namespace {

using mezzo::StepResult;

/// A future that completes when its values are read.
class LazyFuture : public mezzo::StepFuture {
 public:
  bool ready() const noexcept override { return is_read; }
  const StepResult::Values& values() override {
    is_read = true;
    return outcome_;
  }
  bool is_read = false;

 private:
  StepResult::Values outcome_{.found_inf = true, .scale = 4.0F};
};

TEST(StepResult, ReturnsKnownOutcomeImmediately) {
  const StepResult result(
      StepResult::Values{.applied = true, .scale = 8.0F, .step_return = torch::ones({})});
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.applied());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 8.0F);
  ASSERT_TRUE(result.step_return().has_value());
  EXPECT_EQ(result.step_return()->item<float>(), 1.0F);
  EXPECT_EQ(result.values().scale, 8.0F);
}

TEST(StepResult, ReadyDoesNotBlock) {
  const auto future = std::make_shared<LazyFuture>();
  const StepResult result(future);
  EXPECT_FALSE(result.ready());
  EXPECT_FALSE(future->is_read);
  EXPECT_FALSE(result.applied());
  EXPECT_TRUE(future->is_read);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.found_inf());
  EXPECT_EQ(result.scale(), 4.0F);
  EXPECT_FALSE(result.step_return().has_value());
}

TEST(StepResult, CopiesShareFuture) {
  auto future = std::make_shared<LazyFuture>();
  const std::weak_ptr<LazyFuture> watch = future;
  auto first = std::make_unique<StepResult>(std::move(future));
  const StepResult second = *first;
  first.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(second.found_inf());
}

TEST(StepResult, ThrowsForNullFuture) {
  EXPECT_THROW(StepResult(std::shared_ptr<mezzo::StepFuture>()), c10::Error);
}

}  // namespace
