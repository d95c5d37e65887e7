// An Ema of a step that a device decides: the device decides on the average too, and nobody waits.
// CPU tensors stand in for the device's; tests/cuda_on_host has streams and graphs as well.

#include <mezzo/optim/ema.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../../support/same_bits.h"

namespace {

using mezzo::Ema;
using mezzo::StepResult;
using test_support::copies_of;
using test_support::SameBits;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A step that a device decides, of which the host is never told.
class UnheardStep final : public mezzo::StepSlot {
 public:
  explicit UnheardStep(float found_inf) : found_inf_(torch::full({1}, found_inf)) {}
  bool ready() const noexcept override { return false; }
  const mezzo::StepOutcome& outcome() override {
    ADD_FAILURE() << "the host waited for the device";
    return outcome_;
  }
  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  torch::Tensor found_inf_;
  mezzo::StepOutcome outcome_;
};

StepResult step_with(float found_inf) {
  return StepResult(std::make_shared<UnheardStep>(found_inf));
}

/// Parameters of every kind that an update treats differently.
std::vector<torch::Tensor> every_kind() {
  const torch::Tensor square = torch::rand({4, 4});
  return {torch::rand({1000}),
          torch::rand({7}),
          torch::rand({3}, torch::kDouble),
          torch::rand({33}).to(torch::kBFloat16),
          torch::rand({5}).to(torch::kHalf),
          torch::rand({2, 3, 4, 5}).to(torch::MemoryFormat::ChannelsLast),
          square.t(),
          torch::rand({6, 4}).slice(1, 0, 4, 2),
          torch::empty({0}),
          torch::rand({})};
}

TEST(StepResultOnTheHost, HasNoFlagOnADevice) {
  EXPECT_FALSE(StepResult({.ran = true}).found_inf_on_device().defined());
  EXPECT_FALSE(StepResult({.ran = false}).found_inf_on_device().defined());
}

TEST(EmaOnADevice, MovesAsTheHostsDoesWithoutAWait) {
  torch::manual_seed(3);
  const std::vector<torch::Tensor> parameters = every_kind();
  Ema on_device(parameters, {.decay = 0.9}), on_host(parameters, {.decay = 0.9});
  for (int i = 0; i < 10; ++i) {
    for (const torch::Tensor& parameter : parameters) parameter.copy_(torch::rand_like(parameter));
    on_device.update(step_with(0));
    on_host.update(StepResult({.ran = true}));
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(on_device.averages()[i], on_host.averages()[i], 1e-6, 1e-7)) << i;
    EXPECT_EQ(on_device.averages()[i].strides(), on_host.averages()[i].strides()) << i;
  }
}

TEST(EmaOnADevice, ReadsTheWeightsAndWritesOnlyAverages) {
  const std::vector<torch::Tensor> parameters = every_kind();
  const std::vector<torch::Tensor> before = copies_of(parameters);
  Ema ema(parameters, {.decay = 0.5});
  for (const torch::Tensor& average : ema.averages()) torch::Tensor(average).zero_();
  ema.update(step_with(0));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_THAT(parameters[i], SameBits(before[i])) << i;
    EXPECT_TRUE(torch::allclose(ema.averages()[i], before[i].to(ema.averages()[i].dtype()) / 2))
        << i;
  }
}

TEST(EmaOnADevice, LeavesAllBitsAsTheyAreWhereTheStepWasSkipped) {
  const std::vector<torch::Tensor> parameters = every_kind();
  Ema ema(parameters, {.decay = 0.5});
  for (const torch::Tensor& average : ema.averages()) {
    if (average.numel() > 1) torch::Tensor(average).flatten()[0] = -0.0;
  }
  const std::vector<torch::Tensor> before = copies_of(ema.averages());
  for (const float found_inf : {1.0F, 3.0F, kInfinity}) {  // a count, where several looked
    for (const float broken : {5.0F, kInfinity, kNaN}) {
      for (const torch::Tensor& parameter : parameters) parameter.fill_(broken);
      ema.update(step_with(found_inf));
    }
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_THAT(ema.averages()[i], SameBits(before[i])) << i;
  }
}

TEST(EmaOnADevice, ShowsItsWritesToWhoeverCachesCastsOfAnAverage) {
  Ema ema({torch::ones({2})});
  const auto version = ema.averages()[0]._version();
  ema.update(step_with(0));
  EXPECT_GT(ema.averages()[0]._version(), version);
}

TEST(EmaUnderInference, IsFollowedByAnUpdateOutsideOfIt) {
  torch::Tensor parameter = torch::ones({4});
  std::unique_ptr<Ema> ema;
  {
    const c10::InferenceMode inference;
    ema = std::make_unique<Ema>(std::vector{parameter, torch::ones({4})},
                                mezzo::EmaOptions{.decay = 0.5});
    parameter.fill_(3);
    ema->update();
  }
  EXPECT_FALSE(ema->averages()[0].is_inference());
  ema->update();
  ema->update(step_with(0));
  EXPECT_TRUE(torch::equal(ema->averages()[0], torch::full({4}, 2.75)));
  EXPECT_TRUE(torch::equal(ema->averages()[1], torch::ones({4})));
}

}  // namespace
