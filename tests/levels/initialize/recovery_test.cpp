// What an Amp is after something threw, or was called in an unusual order: never with gradients
// that lost their scale twice, or not at all.
#include <mezzo/levels/initialize.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../../support/throwing_sgd.h"
#include "vector_model.h"

namespace {

using namespace initialize_test;
using mezzo::Amp;
using mezzo::InitializeOptions;
using mezzo::OptLevel;
using test_support::ThrowingSgd;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// One model and one optimizer whose step may throw.
struct Solo {
  explicit Solo(const OptLevel& level)
      : amp(mezzo::initialize(model, sgd, scaled(level), kQuiet)) {}

  void pass(double factor, bool delays = false) {
    amp.scale_loss(amp(model, filled(factor)), sgd, {.delay_unscale = delays});
  }
  void pass_that_throws(double factor) {
    const auto backward = [](const torch::Tensor& loss) {
      loss.backward();
      throw std::runtime_error("out of memory");
    };
    EXPECT_THROW(amp.scale_loss(amp(model, filled(factor)), sgd, backward), std::runtime_error);
  }
  void step_that_throws(double max_norm = kNoLimit) {
    sgd.throws = true;
    EXPECT_THROW(amp.step(sgd, {.max_norm = max_norm}), std::runtime_error);
    sgd.throws = false;
  }

  Vector model;
  ThrowingSgd sgd{model->parameters(), 1.0};
  Amp amp;
};

const std::vector<OptLevel> kLevels{OptLevel::O0(), OptLevel::O1(), OptLevel::O2()};

/// Two models and two optimizers that share a loss scale.
struct Pair {
  explicit Pair(const OptLevel& level = OptLevel::O1())
      : amp(mezzo::initialize({first, second}, {of_first, of_second}, scaled(level), kQuiet)) {}

  void pass_for_both(double of_one, double of_other, bool delays = false) {
    amp.scale_loss(amp(first, filled(of_one)) + amp(second, filled(of_other)),
                   {of_first, of_second}, {.delay_unscale = delays});
  }
  double clean_iterations() { return amp.state_dict().at("loss_scaler0").at("unskipped"); }

  Vector first, second;
  torch::optim::SGD of_first{first->parameters(), 1.0}, of_second{second->parameters(), 1.0};
  Amp amp;
};

TEST(AmpRecovery, StepsAgainAfterAStepThatThrew) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        Solo solo(level);
        solo.pass(0.25, delays);
        solo.step_that_throws(max_norm);
        EXPECT_TRUE(solo.amp.step(solo.sgd, {.max_norm = max_norm}).ran());
        EXPECT_EQ(weight_of(solo.model), 0.75F) << level.name() << delays << max_norm;
        EXPECT_EQ(solo.amp.scaler().get_scale(), kScale);
      }
    }
  }
}

TEST(AmpRecovery, StartsABatchAnewAfterAStepThatThrew) {
  for (const OptLevel& level : kLevels) {
    for (const bool delays : {false, true}) {
      for (const double max_norm : {kNoLimit, 100.0}) {
        for (const bool by_amp : {false, true}) {
          Solo solo(level);
          solo.pass(0.25, delays);
          solo.step_that_throws(max_norm);
          by_amp ? solo.amp.zero_grad(solo.sgd) : solo.sgd.zero_grad();
          solo.pass(0.5, delays);
          EXPECT_TRUE(solo.amp.step(solo.sgd, {.max_norm = max_norm}).ran());
          EXPECT_EQ(weight_of(solo.model), 0.5F) << level.name() << delays << max_norm << by_amp;
        }
      }
    }
  }
}

TEST(AmpRecovery, AddsToABatchWhoseStepThrew) {
  for (const OptLevel& level : kLevels) {
    Solo solo(level);
    solo.pass(0.25);
    solo.step_that_throws();
    solo.pass(0.5);
    solo.amp.step(solo.sgd);
    EXPECT_EQ(weight_of(solo.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, KeepsMicroBatchesThatWereUnscaledBeforeOneThatThrew) {
  for (const OptLevel& level : kLevels) {
    Solo solo(level);
    solo.pass(0.25);
    solo.pass_that_throws(8);
    EXPECT_EQ(solo.amp.master_params(solo.sgd)[0].grad()[0].item<float>(), 0.25F) << level.name();
    solo.pass_that_throws(8);
    solo.pass(0.5);
    solo.amp.step(solo.sgd);
    EXPECT_EQ(weight_of(solo.model), 0.25F) << level.name();
  }
}

TEST(AmpRecovery, GivesMicroBatchesUpWithAnOrdinaryZeroGradToo) {
  for (const OptLevel& level : kLevels) {
    for (const bool set_to_none : {false, true}) {
      for (const bool by_amp : {false, true}) {
        for (const bool throws : {false, true}) {
          Solo solo(level);
          solo.pass(0.25);
          if (throws) solo.pass_that_throws(8);
          by_amp ? solo.amp.zero_grad(solo.sgd, set_to_none) : solo.sgd.zero_grad(set_to_none);
          solo.pass(0.5);
          solo.amp.step(solo.sgd);
          EXPECT_EQ(weight_of(solo.model), 0.5F) << level.name() << set_to_none << by_amp << throws;
        }
      }
    }
  }
}

TEST(AmpRecovery, StepsThoughAnOrdinaryZeroGradTookAllGradients) {
  for (const OptLevel& level : kLevels) {
    Solo solo(level);
    solo.pass(0.25);
    solo.sgd.zero_grad();
    solo.amp.step(solo.sgd);
    EXPECT_EQ(weight_of(solo.model), 1.0F) << level.name();
  }
}

/// Of an optimizer whose gradients went between the last unscale and the step.
template <class Optimizer, class Options>
void expect_to_step_without_gradients(const Options& options) {
  for (const double factor : {0.25, kNoLimit}) {
    Vector model;
    Optimizer optimizer(model->parameters(), options);
    Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O0()), kQuiet);
    amp.scale_loss(amp(model, filled(factor)), optimizer);
    optimizer.zero_grad();
    EXPECT_TRUE(amp.step(optimizer).ran()) << "there is nothing to skip";
    EXPECT_EQ(weight_of(model), 1.0F);
    EXPECT_EQ(amp.scaler().get_scale(), factor == 0.25 ? kScale : kScale / 2);
  }
}

TEST(AmpRecovery, TakesAStepWhoseGradientsHaveGone) {
  expect_to_step_without_gradients<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1.0));
  expect_to_step_without_gradients<torch::optim::SGD>(torch::optim::SGDOptions(1.0));
}

TEST(AmpRecovery, RefusesItsCallsWithinABackwardPassAndGoesOn) {
  Solo solo(OptLevel::O2());
  Amp& amp = solo.amp;
  const auto within = [&](auto&& call) {
    return [&amp, &solo, call] {
      amp.scale_loss(amp(solo.model, filled(0.25)), solo.sgd, [&](const torch::Tensor& loss) {
        call();
        loss.backward();
      });
    };
  };
  const auto refused = ThrowsMessage<c10::Error>(HasSubstr("called within the backward pass of a"));
  EXPECT_THAT(within([&] { solo.pass(0.5); }), refused);
  EXPECT_THAT(within([&] { amp.step(solo.sgd); }), refused);
  EXPECT_THAT(within([&] { amp.zero_grad(solo.sgd); }), refused);
  solo.pass(0.5);
  EXPECT_TRUE(amp.step(solo.sgd).ran());
  EXPECT_EQ(weight_of(solo.model), 0.5F);
}

TEST(AmpRecovery, GoesOnAfterASkipCallbackThatThrew) {
  Solo solo(OptLevel::O1());
  solo.amp.scaler().on_skip([](const mezzo::SkippedStep&) { throw std::runtime_error("stop"); });
  EXPECT_THROW(solo.pass(kInfinity), std::runtime_error);
  EXPECT_FALSE(solo.amp.step(solo.sgd).ran());
  solo.sgd.zero_grad();
  solo.pass(0.25);
  EXPECT_TRUE(solo.amp.step(solo.sgd).ran());
  EXPECT_EQ(solo.amp.scaler().get_scale(), kScale / 2);
}

TEST(AmpOrder, LetsAnOptimizerStepAfterTheScaleOfItsLossHasMoved) {
  Pair pair;
  pair.pass_for_both(0.25, 0.25);
  pair.amp.step(pair.of_first);
  pair.of_first.zero_grad();
  pair.amp.scale_loss(pair.amp(pair.first, filled(0.25)), pair.of_first);
  pair.amp.step(pair.of_first);
  EXPECT_THAT([&] { (void)pair.amp.state_dict(); },
              ThrowsMessage<c10::Error>(HasSubstr("has not stepped yet")));
  EXPECT_TRUE(pair.amp.step(pair.of_second).ran());
  EXPECT_EQ(pair.clean_iterations(), 2);
  pair.of_second.zero_grad();
  pair.amp.scale_loss(pair.amp(pair.second, filled(0.5)), pair.of_second);
  EXPECT_TRUE(pair.amp.step(pair.of_second).ran());
  EXPECT_EQ(weight_of(pair.second), 0.25F);
  EXPECT_EQ(pair.clean_iterations(), 3);
}

TEST(AmpOrder, TakesTheScaleOffDelayedGradientsBeforeItMoves) {
  Pair pair;
  pair.pass_for_both(kInfinity, 0.25, /*delays=*/true);
  EXPECT_FALSE(pair.amp.step(pair.of_first).ran());
  pair.of_first.zero_grad();
  pair.amp.scale_loss(pair.amp(pair.first, filled(0.25)), pair.of_first);
  EXPECT_EQ(pair.amp.scaler().get_scale(), kScale / 2);
  EXPECT_TRUE(pair.amp.step(pair.of_second).ran());
  EXPECT_EQ(weight_of(pair.second), 0.75F);
}

// As torch.amp: with delay_unscale for good nobody has looked at the other's gradients.
TEST(AmpOrder, SkipsOnlyWhereItShowsIfGradientsAreUnscaledByTheirSteps) {
  for (const OptLevel& level : kLevels) {
    for (const bool in_first : {false, true}) {
      Pair pair(level);
      pair.pass_for_both(in_first ? kInfinity : 0.25, in_first ? 0.25 : kInfinity, /*delays=*/true);
      EXPECT_EQ(pair.amp.step(pair.of_first).ran(), !in_first) << level.name();
      EXPECT_EQ(pair.amp.step(pair.of_second).ran(), in_first) << level.name();
      EXPECT_EQ(pair.amp.scaler().get_scale(), kScale / 2);
    }
  }
}

TEST(AmpOrder, RefusesTwoOptimizersOfOneParameter) {
  Vector model;
  torch::optim::SGD first(model->parameters(), 1.0);
  torch::optim::SGD second(model->parameters(), 1.0);
  Amp amp = mezzo::initialize(model, {first, second}, scaled(OptLevel::O1()), kQuiet);
  const auto refuses = ThrowsMessage<c10::Error>(HasSubstr("give it to one of them"));
  EXPECT_THAT([&] { amp.scale_loss(amp(model, filled(0.25)), {first, second}); }, refuses);
  EXPECT_THAT([&] { amp.scale_loss(amp(model, filled(0.25)), first); }, refuses);
}

/// Random calls on a Pair whose optimizers may throw, beside what they should come to.
class RandomCalls {
 public:
  explicit RandomCalls(unsigned seed) : random_(seed) {
    const std::vector<OptLevel> all{OptLevel::O0(), OptLevel::O1(), OptLevel::O2(), OptLevel::O3(),
                                    OptLevel::O2_bf16()};
    for (Side& side : sides_) side.make(/*ours=*/below(2) == 0);
    num_losses_ = 1 + below(3);
    amp_.emplace(mezzo::initialize({sides_[0].model, sides_[1].model},
                                   {*sides_[0].optimizer, *sides_[1].optimizer},
                                   scaled(all[static_cast<std::size_t>(below(5))]),
                                   {.num_losses = num_losses_, .verbosity = 0}));
  }

  void call() {
    const int kind = below(10);
    Side& side = sides_[static_cast<std::size_t>(below(2))];
    if (kind < 6) {
      pass();
    } else if (kind < 9) {
      if (side.has_gradient) step(side);
    } else {
      amp_->zero_grad(*side.optimizer);
      side.start_anew();
    }
    for (Side& one : sides_) {
      const torch::Tensor weight = amp_->master_params(*one.optimizer)[0];
      ASSERT_EQ(weight[0].item<double>(), one.weight);
    }
    const bool is_between = !sides_[0].has_gradient && !sides_[1].has_gradient;
    if (is_between) amp_->load_state_dict(amp_->state_dict());
  }

 private:
  struct Side {
    void make(bool ours) {
      if (ours) {
        optimizer = std::make_unique<mezzo::optim::SGD>(model->parameters(), 1.0);
      } else {
        auto sgd = std::make_unique<ThrowingSgd>(model->parameters(), 1.0);
        thrower = sgd.get();
        optimizer = std::move(sgd);
      }
    }
    void start_anew() {
      optimizer->zero_grad();
      sum = 0;
      has_gradient = is_bad = may_be_skipped = false;
    }
    Vector model;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    ThrowingSgd* thrower = nullptr;
    double weight = 1;
    double sum = 0;
    bool has_gradient = false;
    bool is_bad = false;
    bool may_be_skipped = false;
  };

  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }

  void pass() {
    const int who = 1 + below(3);
    const bool is_bad = below(30) == 0;
    torch::Tensor loss = torch::zeros({});
    std::vector<torch::optim::Optimizer*> list;
    for (int i = 0; i < 2; ++i) {
      if ((who & (1 << i)) == 0) continue;
      Side& side = sides_[static_cast<std::size_t>(i)];
      const double factor = (1 + below(4)) / 64.0;
      loss = loss + (*amp_)(side.model, filled(is_bad ? kInfinity : factor));
      list.push_back(side.optimizer.get());
      side.sum += factor;
      side.has_gradient = true;
      side.is_bad = side.is_bad || is_bad;
    }
    // An inf that was delayed for one shows where a later loss of both is unscaled.
    for (Side& side : sides_) side.may_be_skipped |= sides_[0].is_bad || sides_[1].is_bad;
    amp_->scale_loss(loss, list, {.loss_id = below(num_losses_), .delay_unscale = below(3) == 0});
  }

  void step(Side& side) {
    const mezzo::StepOptions options{.max_norm = below(2) == 0 ? kNoLimit : 1e6};
    if (side.thrower != nullptr && !side.may_be_skipped && below(4) == 0) {
      side.thrower->throws = true;
      EXPECT_THROW(amp_->step(*side.optimizer, options), std::runtime_error);
      side.thrower->throws = false;
      if (below(2) == 0) return;
    }
    const bool ran = amp_->step(*side.optimizer, options).ran();
    EXPECT_FALSE(ran && side.is_bad);
    EXPECT_TRUE(ran || side.may_be_skipped);
    if (ran) side.weight -= side.sum;
    side.start_anew();
  }

  std::mt19937 random_;
  std::array<Side, 2> sides_;
  int num_losses_;
  std::optional<Amp> amp_;
};

TEST(AmpOrder, OfAnyKindTrainsOnTheSumOfTheLossesSinceTheLastStep) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    RandomCalls calls(seed);
    for (int i = 0; i < 40; ++i) {
      ASSERT_NO_THROW(calls.call()) << i;
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(AmpOrder, MovesInTheMiddleOfAnIteration) {
  Solo solo(OptLevel::O2());
  solo.pass(0.25);
  Amp moved = std::move(solo.amp);
  moved.scale_loss(moved(solo.model, filled(0.25)), solo.sgd);
  EXPECT_TRUE(moved.step(solo.sgd).ran());
  EXPECT_EQ(weight_of(solo.model), 0.5F);
}

}  // namespace
