// What Telemetry says to those who clip gradients that still carry the loss scale, and that it says
// nothing to anybody else.

#include <mezzo/diagnose/telemetry.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/clip_grad.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../support/tiny_optimizer.h"
#include "../support/warnings.h"

namespace {

using mezzo::GradScaler;
using mezzo::StepOutcome;
using mezzo::StepResult;
using mezzo::Telemetry;
using mezzo::detail::ClipWatch;
using test_support::quiet_scaler;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// A loop over batches, with the user's own code where gradients are clipped, recorded.
struct Loop {
  explicit Loop(double scale = 65536) : scaler(quiet_scaler({.init_scale = scale})) {
    torch::manual_seed(5);
  }

  using Step = std::function<StepResult(Loop&)>;

  /// Gradients of random batches, whose norms are some 3 to 6, times the scale.
  void run(int steps, const Step& clip_and_step) {
    for (int i = 0; i < steps; ++i) {
      const double size = 1 + torch::rand({}).item<double>();
      for (auto& weight : weights) {
        weight.mutable_grad() = torch::randn(weight.sizes()) * (size * scaler.get_scale());
      }
      const StepResult result = clip_and_step(*this);
      scaler.update();
      telemetry.record(result, torch::Tensor());
    }
  }

  double clip(double max_norm) { return torch::nn::utils::clip_grad_norm_(weights, max_norm); }

  std::vector<torch::Tensor> weights{torch::zeros({7}).requires_grad_(),
                                     torch::zeros({2, 3}).requires_grad_()};
  torch::optim::SGD libtorchs{weights, 1e-3};
  mezzo::optim::SGD sgd{weights, 1e-3};
  GradScaler scaler;
  test_support::Warnings warnings;
  Telemetry telemetry;
};

const auto kBoundOfOne = AllOf(
    HasSubstr("Telemetry: the norm of the scaled gradients has been 1 for 8 steps in a row"),
    HasSubstr("the loss scale 65536, which is a bound of 1.526e-05 on the true ones"),
    HasSubstr("call unscale_(optimizer) before clipping, or step(optimizer, {.max_norm = ...})"));

TEST(ClipWatch, ExplainsOnceThatTheBoundIsOnScaledGradients) {
  Loop loop;
  const Loop::Step mistake = [](Loop& self) {
    self.clip(1.0);
    return self.scaler.step(self.sgd);
  };
  loop.run(7, mistake);
  EXPECT_THAT(loop.warnings.texts, IsEmpty());
  loop.run(1, mistake);
  EXPECT_THAT(loop.warnings.texts, ElementsAre(kBoundOfOne));
  loop.run(20, mistake);
  EXPECT_THAT(loop.warnings.texts, ElementsAre(testing::_));
}

TEST(ClipWatch, SeesAStepOfALibtorchOptimizerThatClips) {
  Loop loop;
  loop.run(10, [](Loop& self) {
    self.clip(1.0);
    return self.scaler.step(self.libtorchs, {.max_norm = 1.0});
  });
  EXPECT_THAT(loop.warnings.texts, ElementsAre(kBoundOfOne));
}

TEST(ClipWatch, SeesEachOfTwoOptimizersByATelemetryOfItsOwn) {
  Loop loop;
  auto other = torch::zeros({9}).requires_grad_();
  mezzo::optim::SGD second({other}, 1e-3);
  Telemetry of_second;
  loop.run(10, [&](Loop& self) {
    other.mutable_grad() = torch::randn({9});
    self.clip(1.0);
    of_second.record(self.scaler.step(second), torch::Tensor());
    return self.scaler.step(self.sgd);
  });
  EXPECT_THAT(loop.warnings.texts, ElementsAre(kBoundOfOne));
}

TEST(ClipWatch, CountsOnAfterSkippedSteps) {
  Loop loop(65536 * 8);
  int step = 0;
  loop.run(12, [&](Loop& self) {
    self.clip(1.0);
    if (step++ < 3) self.weights[0].mutable_grad()[2] = kInfinity;
    return self.scaler.step(self.sgd);
  });
  EXPECT_THAT(loop.warnings.texts, ElementsAre(kBoundOfOne));
}

TEST(ClipWatch, SeesClippingByValueToo) {
  Loop loop;
  loop.run(10, [](Loop& self) {
    torch::nn::utils::clip_grad_value_(self.weights, 0.5);
    // Not all elements at the bound: else the norm would hold as well.
    self.weights[0].mutable_grad().mul_(torch::rand({7}));
    return self.scaler.step(self.sgd);
  });
  EXPECT_THAT(loop.warnings.texts,
              ElementsAre(AllOf(HasSubstr("the largest magnitude of the scaled gradients has been "
                                          "0.5 for 8 steps in a row"),
                                HasSubstr("mezzo::clip_grad_value_(scaler, optimizer, ...)"))));
}

TEST(ClipWatch, LooksAtTheFirst64StepsAlone) {
  for (const int innocent : {40, 64}) {
    Loop loop;
    loop.run(innocent, [](Loop& self) { return self.scaler.step(self.sgd); });
    loop.run(10, [](Loop& self) {
      self.clip(1.0);
      return self.scaler.step(self.sgd);
    });
    EXPECT_THAT(loop.warnings.texts, testing::SizeIs(innocent == 40 ? 1 : 0)) << innocent;
  }
}

/// A step whose outcome a device has not sent yet.
struct LateStep final : mezzo::StepSlot {
  bool ready() const noexcept override { return is_there; }
  const StepOutcome& outcome() override {
    EXPECT_TRUE(is_there) << "Telemetry waited for a device";
    return known;
  }
  bool is_there = false;
  StepOutcome known;
};

TEST(ClipWatch, SeesStepsOfADeviceWhenTheyHaveArrived) {
  test_support::Warnings warnings;
  std::vector<std::shared_ptr<LateStep>> steps;
  Telemetry telemetry;
  for (int i = 0; i < 8; ++i) {
    steps.push_back(std::make_shared<LateStep>());
    steps.back()->known = {.ran = true,
                           .scale = 65536,
                           .grad_norm = 1.0 / 65536,
                           .grad_max_abs = (0.5 + 0.01 * i) / 65536};
    telemetry.record(StepResult(steps.back()), torch::Tensor());
  }
  EXPECT_THAT(warnings.texts, IsEmpty());
  for (const auto& step : steps) step->is_there = true;
  telemetry.flush();
  EXPECT_THAT(warnings.texts, ElementsAre(kBoundOfOne));
}

struct Innocent {
  const char* name;
  double scale;
  Loop::Step step;
};

class ClipWatchIsSilent : public testing::TestWithParam<Innocent> {};

TEST_P(ClipWatchIsSilent, ToThose) {
  Loop loop(GetParam().scale);
  loop.run(80, GetParam().step);
  EXPECT_THAT(loop.warnings.texts, IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Innocents, ClipWatchIsSilent,
    testing::Values(Innocent{"WhoDoNotClip", 65536,
                             [](Loop& self) { return self.scaler.step(self.sgd); }},
                    Innocent{"WhoUnscaleFirst", 65536,
                             [](Loop& self) {
                               self.scaler.unscale_(self.sgd);
                               self.clip(1.0);
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoClipWithTheScaler", 65536,
                             [](Loop& self) {
                               mezzo::clip_grad_norm_(self.scaler, self.sgd, 1.0);
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoUnscaleForLibtorchsOptimizers", 65536,
                             [](Loop& self) {
                               self.scaler.unscale_(self.libtorchs);
                               self.clip(1.0);
                               return self.scaler.step(self.libtorchs, {.max_norm = 1.0});
                             }},
                    Innocent{"WhoUnscaleFirstForABoundThatTheScaleMakesRound", 1024,
                             [](Loop& self) {
                               self.scaler.unscale_(self.sgd);
                               self.clip(0x1p-10);  // times the scale it is 1
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoUnscaleFirstForSuchABoundWithLibtorchs", 1024,
                             [](Loop& self) {
                               self.scaler.unscale_(self.libtorchs);
                               self.clip(0x1p-10);  // times the scale it is 1
                               return self.scaler.step(self.libtorchs, {.max_norm = 1.0});
                             }},
                    Innocent{"WhoMultiplyTheBoundByTheScale", 65536,
                             [](Loop& self) {
                               self.clip(1.0 * self.scaler.get_scale());
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoMultiplyTheBoundByASmallScale", 64,
                             [](Loop& self) {
                               self.clip(1.0 * self.scaler.get_scale());
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoHaveAScaleOfOne", 1,
                             [](Loop& self) {
                               self.clip(1.0);
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoHaveTheSameGradientsInEveryStep", 128,
                             [](Loop& self) {
                               for (auto& weight : self.weights)
                                 weight.mutable_grad() = torch::full_like(weight, 10.0);
                               self.weights[0].mutable_grad().fill_(0).slice(0, 0, 3).fill_(10.0);
                               return self.scaler.step(self.sgd);
                             }},
                    Innocent{"WhoseGradientsHaveAnOddLengthByConstruction", 65536,
                             [](Loop& self) {
                               self.clip(65536 * 1.73205);
                               return self.scaler.step(self.sgd);
                             }}),
    [](const auto& innocent) { return std::string(innocent.param.name); });

// The bias of a head that is far from its targets: its gradient is the slope, weight / outputs.
TEST(ClipWatch, IsSilentToLossesWithConstantSlopes) {
  for (const double scale : {65536.0, 1024.0, 128.0}) {
    for (const int64_t outputs : {128, 1024, 4096}) {
      for (const double weight : {1.0, 10.0}) {
        Loop loop(scale);
        torch::nn::Linear head(2, outputs);
        mezzo::optim::SGD optimizer(head->parameters(), 1e-6);
        const torch::Tensor targets = torch::full({4, outputs}, 5.0);
        for (int step = 0; step < 9; ++step) {
          optimizer.zero_grad();
          const torch::Tensor inputs = torch::rand({4, 2}) * torch::rand({});
          loop.scaler.scale(torch::l1_loss(head(inputs), targets) * weight).backward();
          loop.telemetry.record(loop.scaler.step(optimizer), torch::Tensor());
          loop.scaler.update();
        }
        EXPECT_THAT(loop.warnings.texts, IsEmpty()) << scale << " " << outputs << " " << weight;
      }
    }
  }
}

TEST(ClipWatchNumbers, AreThoseOfTheBoundsThatPeopleWrite) {
  for (const double scale : {65536.0, 32768.0}) {
    for (const double bound : {0.1, 0.5, 1.0, 5.0, 10.0}) {
      for (const bool by_value : {false, true}) {
        test_support::Warnings warnings;
        ClipWatch watch;
        for (int i = 0; i < 8; ++i) {
          const double other = bound / scale * (2 + 0.1 * i);
          watch.see(scale, by_value ? other : bound / scale, by_value ? bound / scale : other);
        }
        EXPECT_THAT(warnings.texts, testing::SizeIs(1)) << scale << " " << bound << by_value;
      }
    }
  }
}

TEST(ClipWatchNumbers, OfMillionsOfElementsMayBeAsFarOffAsLibtorchsNorms) {
  test_support::Warnings warnings;
  ClipWatch watch;
  for (int i = 0; i < 8; ++i) {
    const double norm = 1.0 + (i % 2 == 0 ? 9e-5 : 7e-5);
    watch.see(65536, norm / 65536, (0.1 + 0.01 * i) / 65536);
  }
  EXPECT_THAT(warnings.texts, ElementsAre(kBoundOfOne));
}

TEST(ClipWatchNumbers, ThatDriftSlowlyTogetherAreNoBound) {
  test_support::Warnings warnings;
  ClipWatch watch;
  for (int i = 0; i < 60; ++i) {  // full batches at a tiny rate, with a norm near a round number
    watch.see(65536, (1.0 - 1e-6 * i) / 65536, (0.3 - 3e-5 * i) / 65536);
  }
  EXPECT_THAT(warnings.texts, IsEmpty());
}

}  // namespace
