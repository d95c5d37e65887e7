#include <torch/torch.h>
//
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/levels/initialize.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/accumulate_if_finite.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "alike_ranks.h"

// After backward a gradient is the average over the ranks, a plain tensor that nobody divides
// again. Ranks that all do the same have averages that are each one's own gradients: training with
// them is training alone, bit for bit.
namespace {

using distributed_test::alike_ranks;
using mezzo::DataParallel;
using mezzo::GradAllReduce;
using mezzo::GradScaler;
using mezzo::LossScale;

/// `tail` is used only where that is asked for.
struct AveragedNetImpl : torch::nn::Module {
  AveragedNetImpl() {
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
TORCH_MODULE(AveragedNet);

/// A loss that differs from step to step, in the model's dtype.
at::Tensor loss_of(AveragedNet& net, int64_t step, bool with_tail = true) {
  const at::Tensor x = torch::sin(torch::arange(24.).view({4, 6}) * static_cast<double>(step + 1));
  return net->forward(x.to(net->tail.scalar_type()), with_tail).to(at::kFloat).square().sum();
}

/// A model, what averages its gradients and what trains it; and the norms that steps said.
struct Training {
  AveragedNet net;
  std::function<mezzo::NoSync()> no_sync;
  torch::optim::Optimizer* optimizer = nullptr;
  std::shared_ptr<mezzo::MasterWeights> masters;  // where the loop wants some
  std::vector<double> norms;

  mezzo::AnyOptimizer stepper() const {
    return masters != nullptr ? mezzo::AnyOptimizer(*masters) : mezzo::AnyOptimizer(*optimizer);
  }
  void note(const mezzo::StepResult& result) { norms.push_back(result.grad_norm().value_or(-1)); }
};

using Loop = std::function<void(Training&)>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(AveragedNet& net)>;

template <class Optimizer, class Options>
MakeOptimizer made_of(Options options, auto... weights) {
  return [options, weights...](AveragedNet& net) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(net->parameters(), options, weights...);
  };
}

MakeOptimizer adamw() { return made_of<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2)); }

Training train_alone(const MakeOptimizer& make, const Loop& loop, at::ScalarType dtype) {
  Training training;
  training.net->to(dtype);
  GradAllReduce alone(training.net->parameters(), alike_ranks(1), {.bucket_bytes = 128});
  const auto optimizer = make(training.net);
  training.no_sync = [&alone] { return alone.no_sync(); };
  training.optimizer = optimizer.get();
  loop(training);
  training.net->zero_grad();
  return training;
}

Training train_together(int ranks, const MakeOptimizer& make, const Loop& loop,
                        at::ScalarType dtype) {
  Training training;
  training.net->to(dtype);
  DataParallel ddp(training.net, alike_ranks(ranks), {.bucket_bytes = 128});
  EXPECT_GT(ddp.buckets().buckets().size(), 2U);
  const auto optimizer = make(training.net);
  training.no_sync = [&ddp] { return ddp.no_sync(); };
  training.optimizer = optimizer.get();
  loop(training);
  training.net->zero_grad();
  return training;
}

void expect_as_alone(const MakeOptimizer& make, const Loop& loop,
                     at::ScalarType dtype = at::kFloat) {
  const Training alone = train_alone(make, loop, dtype);
  for (const int ranks : {1, 2, 3, 4}) {
    const Training together = train_together(ranks, make, loop, dtype);
    for (const auto& item : alone.net->named_parameters()) {
      const at::Tensor other = together.net->named_parameters()[item.key()];
      EXPECT_TRUE(at::equal(item.value(), other)) << item.key() << " with " << ranks << " ranks";
    }
    ASSERT_EQ(alone.norms.size(), together.norms.size());
    for (std::size_t i = 0; i < alone.norms.size(); ++i) {
      EXPECT_EQ(alone.norms[i], together.norms[i]) << "step " << i << " with " << ranks << " ranks";
    }
  }
}

/// The loop of torch.amp with `step`, four times.
Loop scaled_loop(const std::function<void(Training&, GradScaler&)>& step,
                 const LossScale& options = {.init_scale = 1024}) {
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
  training.note(scaler.step(training.stepper(), {.max_norm = 0.5}));
}

void unscale_clip_and_step(Training& training, GradScaler& scaler) {
  mezzo::AnyOptimizer optimizer = training.stepper();
  scaler.unscale_(optimizer);
  training.norms.push_back(torch::nn::utils::clip_grad_norm_(mezzo::master_params(optimizer), 0.5));
  scaler.step(optimizer);
}

const LossScale kDisabled{.enabled = false};

TEST(GradientsAreAverages, ForMezzosOptimizers) {
  expect_as_alone(adamw(), scaled_loop(step_and_clip));
  expect_as_alone(made_of<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1e-2)),
                  scaled_loop(step_and_clip));
  expect_as_alone(made_of<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)),
                  scaled_loop(step_and_clip));
  expect_as_alone(made_of<mezzo::optim::Lion>(mezzo::optim::LionOptions(1e-2)),
                  scaled_loop(step_and_clip));
  expect_as_alone(made_of<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2)),
                  scaled_loop(step_and_clip));
}

// SGD tells a gradient that is N times too large; Adam hardly does.
MakeOptimizer sgd() {
  return made_of<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9));
}

TEST(GradientsAreAverages, ForUnscaleAndWhateverClips) {
  expect_as_alone(sgd(), scaled_loop(unscale_clip_and_step));
  expect_as_alone(sgd(), scaled_loop([](Training& training, GradScaler& scaler) {
                    scaler.unscale_(*training.optimizer);
                    training.optimizer->step();
                  }));
}

TEST(GradientsAreAverages, ForABareStep) {
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

TEST(GradientsAreAverages, WhereADisabledScalerStandsInTheLoop) {
  expect_as_alone(sgd(), scaled_loop(step_and_clip, kDisabled));
  expect_as_alone(sgd(), scaled_loop(unscale_clip_and_step, kDisabled));
  expect_as_alone(sgd(), scaled_loop([](Training& training,
                                        GradScaler& scaler) { scaler.step(*training.optimizer); },
                                     kDisabled));
}

TEST(GradientsAreAverages, ThroughAtensKernels) {
  const Loop loop = [](Training& training) {
    auto& optimizer = dynamic_cast<mezzo::optim::SGD&>(*training.optimizer);
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();  // onto the gradients of the step before
      optimizer.apply_with_aten(optimizer.plan());
    }
  };
  expect_as_alone(made_of<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2)), loop);
}

TEST(GradientsAreAverages, OfAllPassesWhereEachIsReduced) {
  expect_as_alone(sgd(), [](Training& training) {
    GradScaler scaler({.init_scale = 1024});
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

TEST(GradientsAreAverages, OfAllPassesWhereStepsDoNotZeroThem) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();
      training.optimizer->step();
    }
  });
}

TEST(GradientsAreAverages, OfAllPassesWhereSomeRunUnderNoSync) {
  for (const bool sync_first : {false, true}) {
    expect_as_alone(sgd(), [sync_first](Training& training) {
      GradScaler scaler({.init_scale = 1024});
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

TEST(GradientsAreAverages, OfAParameterThatALaterPassDoesNotReach) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, 2 * i).backward();
      loss_of(training.net, 2 * i + 1, /*with_tail=*/false).backward();
      training.optimizer->step();
    }
  });
}

TEST(GradientsAreAverages, OfAParameterThatIsFrozenMeanwhile) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 4; ++i) {
      loss_of(training.net, i).backward();
      training.net->tail.requires_grad_(i % 2 == 1);
      training.optimizer->step();
    }
    training.net->tail.requires_grad_(true);
  });
}

TEST(GradientsAreAverages, BeforeMicroBatchesAreAddedToThem) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      {
        const auto no_sync = training.no_sync();
        for (const double factor : {1.0, std::numeric_limits<double>::infinity()}) {
          mezzo::accumulate_if_finite(training.net->parameters(),
                                      [&] { (loss_of(training.net, 2 * i) * factor).backward(); });
        }
      }
      loss_of(training.net, 2 * i + 1).backward();
      training.optimizer->step();
    }
  });
}

TEST(GradientsAreAverages, ForLibtorchsClipping) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.norms.push_back(torch::nn::utils::clip_grad_norm_(training.net->parameters(), 0.5));
      training.optimizer->step();
    }
  });
}

TEST(GradientsAreAverages, ForLibtorchsOptimizersThroughTheScaler) {
  const MakeOptimizer make = made_of<torch::optim::SGD>(torch::optim::SGDOptions(1e-2));
  expect_as_alone(make, scaled_loop(step_and_clip));
  expect_as_alone(make, scaled_loop(unscale_clip_and_step));
  expect_as_alone(make, scaled_loop(step_and_clip, kDisabled));
  expect_as_alone(make, scaled_loop(unscale_clip_and_step, kDisabled));
  for (const bool enabled : {false, true}) {
    expect_as_alone(make, scaled_loop(
                              [](Training& training, GradScaler& scaler) {
                                scaler.step(*training.optimizer, mezzo::StepOptions{});
                              },
                              LossScale{.enabled = enabled}));
    expect_as_alone(make, scaled_loop([](Training& training,
                                         GradScaler& scaler) { scaler.step(*training.optimizer); },
                                      LossScale{.enabled = enabled}));
    expect_as_alone(make, scaled_loop(
                              [](Training& training, GradScaler& scaler) {
                                auto& own = static_cast<torch::optim::SGD&>(*training.optimizer);
                                scaler.step(own, nullptr);
                              },
                              LossScale{.enabled = enabled}));
  }
}

TEST(GradientsAreAverages, WithoutAScaler) {
  expect_as_alone(sgd(), [](Training& training) {
    for (int64_t i = 0; i < 3; ++i) {
      training.net->zero_grad();
      loss_of(training.net, i).backward();
      training.optimizer->step();
    }
  });
}

TEST(GradientsAreAverages, ForTwoOptimizersAlike) {
  for (const bool enabled : {false, true}) {
    expect_as_alone(sgd(), scaled_loop(
                               [](Training& training, GradScaler& scaler) {
                                 mezzo::optim::AdamW other(training.net->parameters(), 1e-3);
                                 training.note(scaler.step(*training.optimizer, {.max_norm = 0.5}));
                                 training.note(scaler.step(other, {.max_norm = 0.5}));
                               },
                               LossScale{.init_scale = 1024, .enabled = enabled}));
  }
}

TEST(GradientsAreAverages, ForAnOptimizerThatGaveAParameterToAnother) {
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

TEST(GradientsAreAverages, OnTheirWayToMasterWeights) {
  const auto options = mezzo::optim::SGDOptions(1e-2).momentum(0.9);
  const mezzo::optim::WeightOptions masters{.weight_storage = mezzo::optim::WeightStorage::master};
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& step : {step_and_clip, unscale_clip_and_step}) {
      const Loop loop = scaled_loop(step, {.init_scale = 16});
      expect_as_alone(made_of<mezzo::optim::SGD>(options, masters), loop, dtype);
      const MakeOptimizer inner = made_of<torch::optim::SGD>(torch::optim::SGDOptions(1e-2));
      const auto around = [](const Loop& of_masters) -> Loop {
        return [of_masters](Training& training) {
          training.masters = std::make_shared<mezzo::MasterWeights>(*training.optimizer);
          of_masters(training);
        };
      };
      expect_as_alone(inner, around(loop), dtype);
      const Loop without_scaler = [](Training& training) {
        for (int64_t i = 0; i < 3; ++i) {
          training.net->zero_grad();
          loss_of(training.net, i).backward();
          training.stepper().step();
        }
      };
      expect_as_alone(inner, around(without_scaler), dtype);
    }
  }
}

TEST(GradientsAreAverages, OverSeveralLossesInAmp) {
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

TEST(GradientsAreAverages, WhereBucketsAreRead) {
  AveragedNet net, alone;
  GradAllReduce wanted(alone->parameters(), alike_ranks(1), {.bucket_bytes = 128});
  loss_of(alone, 0).backward();
  DataParallel ddp(net, alike_ranks(4), {.bucket_bytes = 128});
  loss_of(net, 0).backward();
  EXPECT_TRUE(at::equal(ddp.buckets().buckets().at(0).flat, wanted.buckets().buckets().at(0).flat));
}

// In bfloat16 256 + 1 is 256.
TEST(GradientsAreAverages, InFloatOfABfloat16ModelWhoseGradientsAreFloat) {
  AveragedNet net;
  net->to(at::kBFloat16);
  for (const at::Tensor& parameter : net->parameters()) parameter.set_grad_dtype(at::kFloat);
  DataParallel ddp(net, alike_ranks(4));
  ASSERT_EQ(ddp.buckets().buckets().size(), 1U);
  EXPECT_EQ(ddp.buckets().buckets()[0].dtype, at::kFloat);
  for (int i = 0; i < 512; ++i) net->tail.to(at::kFloat).sum().backward();
  EXPECT_EQ(net->tail.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(net->tail.grad(), at::full_like(net->tail, 512, at::kFloat)));
  EXPECT_TRUE(net->tail.grad().storage().is_alias_of(ddp.buckets().buckets()[0].flat.storage()));
}

}  // namespace
