#include <torch/torch.h>
//
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/levels/initialize.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/clip_grad.h>
#include <mezzo/scaling/grad_scaler.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "alike_ranks.h"

// Ranks that all do the same have averages that are each one's own gradients: training with them is
// training alone, to the bit where their number is a power of two, whatever way sums are divided.
namespace {

using distributed_test::AlikeRanks;
using mezzo::DataParallel;
using mezzo::GradBuckets;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;

/// `tail` is used only where that is asked for.
struct RankSumNetImpl : torch::nn::Module {
  RankSumNetImpl() {
    torch::manual_seed(5);
    body = register_module("body", torch::nn::Linear(6, 8));
    head = register_module("head", torch::nn::Linear(8, 3));
    tail = register_parameter("tail", torch::randn({3}));
  }
  at::Tensor forward(const at::Tensor& x, bool with_tail = true) {
    const at::Tensor y = head->forward(torch::tanh(body->forward(x)));
    return with_tail ? y * tail : y;
  }
  torch::nn::Linear body{nullptr}, head{nullptr};
  at::Tensor tail;
};
TORCH_MODULE(RankSumNet);

/// A loss that differs from step to step, in the model's dtype.
at::Tensor loss_of(RankSumNet& net, int64_t step, bool with_tail = true) {
  const at::Tensor x = torch::sin(torch::arange(24.).view({4, 6}) * static_cast<double>(step + 1));
  return net->forward(x.to(net->tail.scalar_type()), with_tail).to(at::kFloat).square().sum();
}

/// A model, its buckets and what trains it; and the norms that steps said.
struct Training {
  RankSumNet net;
  GradBuckets* buckets = nullptr;
  torch::optim::Optimizer* optimizer = nullptr;
  std::vector<double> norms;

  GradBuckets::NoSync no_sync() { return buckets->no_sync(); }
  void note(const mezzo::StepResult& result) { norms.push_back(result.grad_norm().value_or(-1)); }
};

using Loop = std::function<void(Training&)>;
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(GradBuckets* buckets, RankSumNet& net)>;

mezzo::GradBucketsOptions flat() {
  return mezzo::GradBucketsOptions().storage(mezzo::GradStorage::flat).bucket_bytes(128);
}

template <class Optimizer, class Options>
MakeOptimizer on_buckets(Options options) {
  return [options](GradBuckets* buckets, RankSumNet&) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(*buckets, options);
  };
}

MakeOptimizer adamw() { return on_buckets<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2)); }

Training train_alone(const MakeOptimizer& make, const Loop& loop, at::ScalarType dtype) {
  Training training;
  training.net->to(dtype);
  GradBuckets buckets(training.net->parameters(), flat());
  const auto optimizer = make(&buckets, training.net);
  training.buckets = &buckets;
  training.optimizer = optimizer.get();
  loop(training);
  training.net->zero_grad();
  return training;
}

Training train_together(int ranks, const MakeOptimizer& make, const Loop& loop,
                        at::ScalarType dtype) {
  Training training;
  training.net->to(dtype);
  DataParallel ddp(training.net, AlikeRanks(ranks), {.bucket_bytes = 128});
  EXPECT_GT(ddp.buckets().buckets().size(), 2U);
  const auto optimizer = make(&ddp.buckets(), training.net);
  training.buckets = &ddp.buckets();
  training.optimizer = optimizer.get();
  loop(training);
  training.net->zero_grad();
  return training;
}

/// `dtype`: float alone can be compared with a number of ranks that is no power of two.
void expect_as_alone(const MakeOptimizer& make, const Loop& loop,
                     at::ScalarType dtype = at::kFloat) {
  const Training alone = train_alone(make, loop, dtype);
  for (const int ranks : {1, 2, 3, 4}) {
    if (ranks == 3 && dtype != at::kFloat) continue;
    const Training together = train_together(ranks, make, loop, dtype);
    const double tolerance = ranks == 3 ? 1e-5 : 0;
    for (const auto& item : alone.net->named_parameters()) {
      const at::Tensor other = together.net->named_parameters()[item.key()];
      EXPECT_TRUE(at::allclose(item.value(), other, tolerance, tolerance))
          << item.key() << " with " << ranks << " ranks";
    }
    ASSERT_EQ(alone.norms.size(), together.norms.size());
    for (std::size_t i = 0; i < alone.norms.size(); ++i) {
      EXPECT_NEAR(alone.norms[i], together.norms[i], tolerance * alone.norms[i])
          << "step " << i << " with " << ranks << " ranks";
    }
  }
}

/// The loop of torch.amp with `step`, four times.
Loop scaled_loop(const std::function<void(Training&, GradScaler&)>& step,
                 const GradScalerOptions& options = GradScalerOptions().init_scale(1024)) {
  return [=](Training& training) {
    GradScaler scaler(options);
    for (int64_t i = 0; i < 4; ++i) {
      training.net->zero_grad();
      scaler.scale(loss_of(training.net, i)).backward();
      step(training, scaler);
      scaler.update();
    }
  };
}

void step_and_clip(Training& training, GradScaler& scaler) {
  training.note(scaler.step(*training.optimizer, {.max_norm = 0.5}));
}

void unscale_clip_and_step(Training& training, GradScaler& scaler) {
  scaler.unscale_(*training.optimizer);
  training.norms.push_back(
      torch::nn::utils::clip_grad_norm_(mezzo::master_params(*training.optimizer), 0.5));
  scaler.step(*training.optimizer);
}

const GradScalerOptions kDisabled = GradScalerOptions().enabled(false);

TEST(RankSum, IsDividedByTheFactorThatTakesTheScaleOff) {
  expect_as_alone(adamw(), scaled_loop(step_and_clip));
  expect_as_alone(on_buckets<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1e-2)),
                  scaled_loop(step_and_clip));
  expect_as_alone(on_buckets<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)),
                  scaled_loop(step_and_clip));
  expect_as_alone(on_buckets<mezzo::optim::Lion>(mezzo::optim::LionOptions(1e-2)),
                  scaled_loop(step_and_clip));
  expect_as_alone(on_buckets<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2)),
                  scaled_loop(step_and_clip));
}

// SGD tells a gradient that is N times too large; Adam hardly does.
MakeOptimizer sgd() {
  return on_buckets<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9));
}

TEST(RankSum, IsDividedOnceByUnscale) {
  expect_as_alone(sgd(), scaled_loop(unscale_clip_and_step));
  expect_as_alone(sgd(), scaled_loop([](Training& training, GradScaler& scaler) {
                    const at::Tensor norm =
                        mezzo::clip_grad_norm_(scaler, *training.optimizer, 0.5);
                    training.norms.push_back(norm.item<double>());
                    training.note(scaler.step(*training.optimizer, {.max_norm = 0.25}));
                  }));
  expect_as_alone(sgd(), scaled_loop([](Training& training, GradScaler& scaler) {
                    scaler.unscale_(*training.optimizer);
                    training.optimizer->step();
                  }));
}

TEST(RankSum, IsDividedByABareStep) {
  const Loop loop = [](Training& training) {
    for (int64_t i = 0; i < 4; ++i) {
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.optimizer->step();
    }
  };
  expect_as_alone(sgd(), loop);
  expect_as_alone(adamw(), loop);
}

TEST(RankSum, IsDividedWhereADisabledScalerStandsInTheLoop) {
  expect_as_alone(sgd(), scaled_loop(step_and_clip, kDisabled));
  expect_as_alone(sgd(), scaled_loop(unscale_clip_and_step, kDisabled));
  expect_as_alone(sgd(), scaled_loop([](Training& training,
                                        GradScaler& scaler) { scaler.step(*training.optimizer); },
                                     kDisabled));
}

TEST(RankSum, IsDividedThroughAtensKernels) {
  const Loop loop = [](Training& training) {
    auto& optimizer = dynamic_cast<mezzo::optim::SGD&>(*training.optimizer);
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();  // onto the gradients of the step before
      optimizer.fused_step_with_aten({});
    }
  };
  expect_as_alone(on_buckets<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2)), loop);
}

TEST(RankSum, ThatIsReducedAgainCountsOnce) {
  expect_as_alone(sgd(), [](Training& training) {
    GradScaler scaler(GradScalerOptions().init_scale(1024));
    for (int64_t i = 0; i < 4; ++i) {
      training.net->zero_grad(/*set_to_none=*/i % 2 == 0);
      for (int64_t k = 0; k < 3; ++k) {
        scaler.scale(loss_of(training.net, 3 * i + k)).backward();
      }
      step_and_clip(training, scaler);
      scaler.update();
    }
  });
}

TEST(RankSum, StaysAfterAStepThatDoesNotClearIt) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();
      training.optimizer->step();
    }
  });
}

TEST(RankSum, MeetsWhatIsAccumulatedOnOneRank) {
  for (const bool sync_first : {false, true}) {
    expect_as_alone(sgd(), [sync_first](Training& training) {
      GradScaler scaler(GradScalerOptions().init_scale(1024));
      for (int64_t i = 0; i < 4; ++i) {
        training.net->zero_grad();
        if (sync_first) scaler.scale(loss_of(training.net, 3 * i)).backward();
        {
          const auto no_sync = training.no_sync();
          scaler.scale(loss_of(training.net, 3 * i + 1, /*with_tail=*/false)).backward();
        }
        if (i % 2 == 0) scaler.scale(loss_of(training.net, 3 * i + 2)).backward();
        step_and_clip(training, scaler);
        scaler.update();
      }
    });
  }
}

TEST(RankSum, OfAParameterThatALaterPassDoesNotReachCountsOnce) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, 2 * i).backward();
      loss_of(training.net, 2 * i + 1, /*with_tail=*/false).backward();
      training.optimizer->step();
    }
  });
}

TEST(RankSum, OfAParameterThatWasFrozenStaysAsItIs) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();
      training.net->tail.requires_grad_(i % 2 == 1);
      training.optimizer->step();
    }
    training.net->tail.requires_grad_(true);
  });
}

TEST(RankSum, IsDividedBeforeMicroBatchesAreAddedToIt) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, 2 * i).backward();
      training.buckets->accumulate_if_finite([&] { loss_of(training.net, 2 * i + 1).backward(); });
      training.optimizer->step();
    }
  });
}

TEST(RankSum, IsAnAverageToWhoeverAsks) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.buckets->average();
      training.buckets->average();
      training.norms.push_back(torch::nn::utils::clip_grad_norm_(training.net->parameters(), 0.5));
      training.optimizer->step();
    }
  });
}

/// An optimizer on the buckets, which has the sums left to it, beside the one that steps.
template <class Optimizer>
struct Beside : Optimizer {
  template <class... Args>
  explicit Beside(GradBuckets* buckets, Args&&... args)
      : Optimizer(std::forward<Args>(args)...), other(*buckets, 1e-3) {}
  mezzo::optim::AdamW other;
};

TEST(RankSum, IsDividedForOtherOptimizersThroughTheScaler) {
  const MakeOptimizer make = [](GradBuckets* buckets, RankSumNet& net) {
    return std::make_unique<Beside<torch::optim::SGD>>(buckets, net->parameters(), 1e-2);
  };
  expect_as_alone(make, scaled_loop(step_and_clip));
  expect_as_alone(make, scaled_loop(unscale_clip_and_step));
  expect_as_alone(make, scaled_loop(step_and_clip, kDisabled));
  expect_as_alone(make, scaled_loop(unscale_clip_and_step, kDisabled));
  for (const bool enabled : {false, true}) {
    expect_as_alone(make, scaled_loop(
                              [](Training& training, GradScaler& scaler) {
                                scaler.step(*training.optimizer, mezzo::StepOptions{});
                              },
                              GradScalerOptions().enabled(enabled)));
    expect_as_alone(make, scaled_loop([](Training& training,
                                         GradScaler& scaler) { scaler.step(*training.optimizer); },
                                      GradScalerOptions().enabled(enabled)));
    expect_as_alone(make, scaled_loop(
                              [](Training& training, GradScaler& scaler) {
                                auto& own = static_cast<torch::optim::SGD&>(*training.optimizer);
                                scaler.step(own, nullptr);
                              },
                              GradScalerOptions().enabled(enabled)));
  }
}

TEST(RankSum, IsDividedForMezzosOptimizersWhereverTheyStand) {
  const MakeOptimizer make = [](GradBuckets* buckets, RankSumNet& net) {
    return std::make_unique<Beside<mezzo::optim::SGD>>(buckets, net->parameters(),
                                                       mezzo::optim::SGDOptions(1e-2));
  };
  expect_as_alone(make, scaled_loop(step_and_clip));
  expect_as_alone(make, [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.optimizer->step();
    }
  });
}

TEST(RankSum, IsTakenByTwoOptimizersAlike) {
  const MakeOptimizer make = [](GradBuckets* buckets, RankSumNet&) {
    return std::make_unique<Beside<mezzo::optim::SGD>>(buckets, *buckets,
                                                       mezzo::optim::SGDOptions(1e-2));
  };
  expect_as_alone(make, scaled_loop([](Training& training, GradScaler& scaler) {
                    auto& both = dynamic_cast<Beside<mezzo::optim::SGD>&>(*training.optimizer);
                    training.note(scaler.step(both, {.max_norm = 0.5}));
                    training.note(scaler.step(both.other, {.max_norm = 0.5}));
                  }));
  expect_as_alone(make, scaled_loop(
                            [](Training& training, GradScaler& scaler) {
                              auto& both =
                                  dynamic_cast<Beside<mezzo::optim::SGD>&>(*training.optimizer);
                              training.note(scaler.step(both, {.max_norm = 0.5}));
                              both.other.step();
                            },
                            kDisabled));
}

TEST(RankSum, IsDividedForAnOptimizerThatLeftTheBucketsToOthers) {
  const Loop loop = [](Training& training) {
    torch::optim::SGD other({training.net->tail}, 1e-2);
    auto& groups = training.optimizer->param_groups();
    for (int64_t i = 0; i < 4; ++i) {
      if (i == 1)
        std::erase_if(groups[0].params(), [&](auto& p) { return p.is_same(training.net->tail); });
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.optimizer->step();
      if (i > 0) other.step();
    }
  };
  expect_as_alone(sgd(), loop);
}

TEST(RankSum, IsDividedOnItsWayToMasters) {
  const auto options = mezzo::optim::SGDOptions(1e-2).momentum(0.9);
  auto with_masters = options;
  with_masters.weight_storage(mezzo::optim::WeightStorage::master);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& step : {step_and_clip, unscale_clip_and_step}) {
      const Loop loop = scaled_loop(step, GradScalerOptions().init_scale(16));
      expect_as_alone(on_buckets<mezzo::optim::SGD>(with_masters), loop, dtype);
      const MakeOptimizer adapter = [](GradBuckets* buckets, RankSumNet& net) {
        struct Adapted : mezzo::MasterWeights {
          Adapted(GradBuckets* b, std::unique_ptr<Beside<torch::optim::SGD>> own)
              : MasterWeights(*own), inner(std::move(own)) {
            (void)b;
          }
          std::unique_ptr<Beside<torch::optim::SGD>> inner;
        };
        return std::make_unique<Adapted>(
            buckets, std::make_unique<Beside<torch::optim::SGD>>(buckets, net->parameters(), 1e-2));
      };
      expect_as_alone(adapter, loop, dtype);
      expect_as_alone(
          adapter,
          [](Training& training) {
            for (int64_t i = 0; i < 3; ++i) {
              training.net->zero_grad();
              loss_of(training.net, i).backward();
              training.optimizer->step();
            }
          },
          dtype);
    }
  }
}

TEST(RankSum, AddsUpOverLossesInAmp) {
  const Loop loop = [](Training& training) {
    auto amp = mezzo::initialize(training.net, *training.optimizer, mezzo::OptLevel::O0(),
                                 {.num_losses = 2, .verbosity = 0});
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      for (int64_t id = 0; id < 2; ++id) {
        amp.scale_loss(loss_of(training.net, 3 * i + id), *training.optimizer, {.loss_id = id});
      }
      training.note(amp.step(*training.optimizer, {.max_norm = 0.5}));
      training.net->zero_grad();
      for (int64_t k = 0; k < 2; ++k) {
        amp.scale_loss(loss_of(training.net, 3 * i + k), *training.optimizer,
                       {.delay_unscale = true});
      }
      training.note(amp.step(*training.optimizer, {.max_norm = 0.5}));
    }
  };
  expect_as_alone(sgd(), loop);
}

TEST(RankSum, CostsNoPassOverTheGradients) {
  const auto writes = [](bool folded) {
    RankSumNet net;
    DataParallel ddp(net, AlikeRanks(4));
    std::unique_ptr<mezzo::optim::AdamW> optimizer;
    if (folded) optimizer = std::make_unique<mezzo::optim::AdamW>(ddp.buckets());
    const at::Tensor flat = ddp.buckets().buckets().at(0).flat;
    const int64_t before = flat._version();
    loss_of(net, 0).backward();
    return flat._version() - before;
  };
  EXPECT_EQ(writes(true) + 1, writes(false));
}

TEST(RankSum, ClearedByTheStepIsNotDividedOnceMore) {
  RankSumNet net;
  DataParallel ddp(net, AlikeRanks(4));
  mezzo::optim::AdamW optimizer(ddp.buckets());
  GradScaler scaler;
  const auto writes = [&](bool clear) {
    scaler.scale(loss_of(net, 0)).backward();
    scaler.step(optimizer, {.zero_grad = clear});
    scaler.update();
    const int64_t before = net->tail.grad()._version();
    const auto no_sync = ddp.no_sync();
    loss_of(net, 0).backward();
    return net->tail.grad()._version() - before;
  };
  EXPECT_EQ(writes(true) + 1, writes(false)) << "what is left is divided, zeros are not";
}

TEST(RankSum, SurvivesHooksThatTheUserPutsBesideItsOwn) {
  expect_as_alone(sgd(), [](Training& training) {
    int calls = 0;
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t k = 0; k < 2; ++k) loss_of(training.net, 2 * i + k).backward();
      if (i == 0) training.net->tail.register_hook([&](const at::Tensor&) { ++calls; });
      training.optimizer->step();
      training.net->zero_grad();
    }
    EXPECT_EQ(calls, 4);
  });
}

class RankSumWarnings : public c10::WarningHandler {
 public:
  RankSumWarnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

TEST(RankSum, ThatNobodyTakesForSomeStepsIsWarnedAboutOnce) {
  RankSumWarnings warnings;
  RankSumNet net;
  DataParallel ddp(net, AlikeRanks(4));
  mezzo::optim::AdamW optimizer(ddp.buckets());
  torch::optim::SGD other(net->parameters(), 1e-6);
  const auto steps = [&](int64_t count, torch::optim::Optimizer& steps_with) {
    for (int64_t i = 0; i < count; ++i) {
      steps_with.zero_grad();
      loss_of(net, i).backward();
      steps_with.step();
    }
  };
  steps(2, other);
  steps(5, optimizer);
  steps(2, other);
  steps(1, optimizer);
  EXPECT_TRUE(warnings.texts.empty());
  steps(5, other);
  steps(1, optimizer);
  steps(5, other);
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_THAT(warnings.texts[0], testing::HasSubstr("its gradients were 4 times too large"));
}

// Gradients that are clipped as sums over 3 ranks are clipped to a third of the bound, and to a
// 1024th of that.
TEST(RankSum, ThatIsClippedBeforeItIsUnscaledIsNoticed) {
  const MakeOptimizer beside = [](GradBuckets* buckets, RankSumNet& net) {
    return std::make_unique<Beside<torch::optim::SGD>>(buckets, net->parameters(), 1e-3);
  };
  for (const MakeOptimizer& make : {sgd(), beside}) {
    RankSumWarnings warnings;
    const Loop loop = [](Training& training) {
      GradScaler scaler(GradScalerOptions().init_scale(1024));
      for (int64_t i = 0; i < 12; ++i) {
        training.net->zero_grad();
        scaler.scale(loss_of(training.net, i)).backward();
        torch::nn::utils::clip_grad_norm_(training.net->parameters(), 0.1);
        scaler.step(*training.optimizer);
        scaler.update();
      }
    };
    train_together(3, make, loop, at::kFloat);
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_THAT(warnings.texts[0], testing::HasSubstr("clipped while they still carry"));
  }
}

TEST(RankSum, IsAnAverageWhereBucketsAreRead) {
  RankSumNet net, alone;
  loss_of(alone, 0).backward();
  GradBuckets wanted(alone->parameters(), flat());
  const at::Tensor one = torch::ones({});
  const std::vector<std::function<at::Tensor(GradBuckets&)>> readers = {
      [&](GradBuckets& buckets) { return buckets.summarize(one).sum_of_squares; },
      [&](GradBuckets& buckets) {
        return buckets.statistics(one, at::kHalf).summary.sum_of_squares;
      },
      [](GradBuckets& buckets) { return buckets.gradients().at(0).gradient; },
      [](GradBuckets& buckets) {
        buckets.reattach_gradients();
        return buckets.buckets().at(0).flat;
      }};
  for (const auto& read : readers) {
    DataParallel ddp(net, AlikeRanks(4), {.bucket_bytes = 128});
    mezzo::optim::AdamW optimizer(ddp.buckets());
    net->zero_grad();
    loss_of(net, 0).backward();
    EXPECT_TRUE(at::equal(read(ddp.buckets()), read(wanted)));
  }
}

TEST(RankSum, WithoutAnOptimizerOnTheBucketsIsAnAverage) {
  RankSumNet net, alone;
  DataParallel ddp(net, AlikeRanks(4));
  loss_of(alone, 0).backward();
  {
    mezzo::optim::AdamW optimizer(ddp.buckets());
    loss_of(net, 0).backward();
    EXPECT_TRUE(at::equal(net->tail.grad(), alone->tail.grad() * 4));
  }
  net->zero_grad();
  loss_of(net, 0).backward();
  EXPECT_TRUE(at::equal(net->tail.grad(), alone->tail.grad()));
}

}  // namespace
