// Answers of a step that a device decides, with the CPU in the device's place: what is sent arrives
// when the test sends it.

#include <mezzo/scaling/detail/async_readback.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace {

using mezzo::detail::AsyncReadback;
using mezzo::detail::DeviceStepSlot;
using mezzo::detail::PendingLines;
using mezzo::detail::ReadbackPool;

void answer(AsyncReadback& readback, float scale, double norm, bool found_inf) {
  const auto sum = torch::full({}, norm * norm, torch::kDouble);
  readback.send({torch::full({}, scale), torch::full({}, found_inf ? 1.0F : 0.0F), sum,
                 torch::full({}, norm / 2, torch::kDouble)},
                /*was_unscaled=*/true);
}

TEST(DeviceStepSlot, IsReadyWhenTheAnswerHasArrived) {
  const auto readback = std::make_shared<AsyncReadback>(torch::kCPU);
  const mezzo::StepResult result(std::make_shared<DeviceStepSlot>(readback));
  EXPECT_FALSE(result.ready());
  answer(*readback, 8.0F, 5.0, false);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.scale(), 8.0F);
  EXPECT_EQ(result.grad_norm(), 5.0);
  EXPECT_EQ(result.grad_max_abs(), 2.5);
  EXPECT_TRUE(result.was_unscaled());
}

TEST(ReadbackPool, DoesNotReuseOneThatSomebodyHoldsOrThatIsOnItsWay) {
  ReadbackPool pool;
  auto first = pool.readback_for(torch::kCPU);
  const auto* const address = first.get();
  auto second = pool.readback_for(torch::kCPU);
  EXPECT_NE(second.get(), address);
  first = nullptr;
  EXPECT_NE(pool.readback_for(torch::kCPU).get(), address) << "its answer has not arrived";
}

TEST(ReadbackPool, UsesOneThatWasReadAgainAndOldResultsKeepTheirAnswer) {
  ReadbackPool pool;
  auto readback = pool.readback_for(torch::kCPU);
  const auto* const address = readback.get();
  const mezzo::StepResult result(std::make_shared<DeviceStepSlot>(readback));
  answer(*readback, 8.0F, 5.0, true);
  readback = nullptr;
  EXPECT_NE(pool.readback_for(torch::kCPU).get(), address) << "the result has not been asked";
  EXPECT_TRUE(result.found_inf());
  const auto again = pool.readback_for(torch::kCPU);
  EXPECT_EQ(again.get(), address);
  EXPECT_FALSE(again->is_there());
  EXPECT_TRUE(result.found_inf());
  EXPECT_EQ(result.scale(), 8.0F);
}

TEST(PendingLines, AreToldInOrderOnceTheyAreKnown) {
  PendingLines lines;
  std::vector<std::pair<float, float>> told;
  const auto poll = [&] {
    lines.poll([&](float scale, float next) { told.emplace_back(scale, next); });
  };
  std::vector<std::shared_ptr<AsyncReadback>> readbacks;
  for (int i = 0; i < 3; ++i) {
    readbacks.push_back(std::make_shared<AsyncReadback>(torch::kCPU));
    lines.add({readbacks.back()});
  }
  poll();
  EXPECT_TRUE(told.empty());
  answer(*readbacks[2], 4.0F, 1.0, true);
  readbacks[2]->send_next_scale(torch::full({}, 2.0F));
  poll();
  EXPECT_TRUE(told.empty()) << "the first is not known yet";
  answer(*readbacks[0], 8.0F, 1.0, true);
  poll();
  EXPECT_TRUE(told.empty()) << "its next scale is not known yet";
  readbacks[0]->send_next_scale(torch::full({}, 4.0F));
  answer(*readbacks[1], 4.0F, 1.0, false);
  readbacks[1]->send_next_scale(torch::full({}, 4.0F));
  poll();
  const std::vector<std::pair<float, float>> expected{{8.0F, 4.0F}, {4.0F, 2.0F}};
  EXPECT_EQ(told, expected);
  poll();
  EXPECT_EQ(told, expected);
}

}  // namespace
