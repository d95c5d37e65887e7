#include <torch/torch.h>
//
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "ranks.h"
#include "recording_ranks.h"

// Loss scale, options and number of steps are the same on all ranks, or all ranks throw.
namespace {

using distributed_test::everyone;
using distributed_test::Ranks;
using mezzo::GradScaler;
using mezzo::ShardedOptimizer;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using test_support::error_of;
using testing::AllOf;
using testing::HasSubstr;

/// The model of the last rank differs in what a test gives `own`.
double on_last(const Ranks& ranks, double others, double own) {
  return ranks->getRank() == ranks->getSize() - 1 ? own : others;
}

torch::nn::Linear small_model() {
  torch::manual_seed(3);
  return torch::nn::Linear(4, 2);
}

/// What all ranks say where the last one differs.
auto names_last(const Ranks& ranks, const std::string& theirs, const std::string& firsts) {
  return AllOf(HasSubstr("rank " + std::to_string(ranks->getSize() - 1) + " has"),
               HasSubstr(theirs), HasSubstr(firsts));
}

template <class Optimizer>
void train(mezzo::DataParallel<torch::nn::Linear>& ddp, GradScaler& scaler, Optimizer& optimizer) {
  optimizer.zero_grad();
  scaler.scale(ddp(torch::ones({2, 4})).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
}

TEST(ShardedSteps, RefuseAnotherLossScaleOnAllRanksAndWriteNothing) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
  const at::Tensor before = model->weight.detach().clone();
  GradScaler scaler({.init_scale = on_last(ranks, 65536, 1024)});
  scaler.scale(model(torch::ones({2, 4})).sum()).backward();
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }),
              names_last(ranks, "loss scale: 1024", "loss scale: 65536"));
  EXPECT_TRUE(model->weight.equal(before));
}

TEST(ShardedSteps, RefuseAnotherRateWithAndWithoutALossScale) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  for (const bool scales : {false, true}) {
    auto model = small_model();
    ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
    GradScaler scaler({.enabled = scales});
    const auto step = [&] {
      optimizer.zero_grad();
      scaler.scale(model(torch::ones({2, 4})).sum()).backward();
      scales ? (void)scaler.step(optimizer) : (void)optimizer.step();
      if (scales) scaler.update();
    };
    step();
    optimizer.param_groups()[0].options().set_lr(on_last(ranks, 0.1, 0.025));
    const at::Tensor before = model->weight.detach().clone();
    EXPECT_THAT(error_of(step), names_last(ranks, "group 0 lr: 0.025", "group 0 lr: 0.1"));
    EXPECT_TRUE(model->weight.equal(before));
  }
}

TEST(ShardedSteps, RefuseAnotherNumberOfSteps) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
  optimizer.set_applied_steps(static_cast<int64_t>(on_last(ranks, 0, 7)));
  model(torch::ones({2, 4})).sum().backward();
  EXPECT_THAT(error_of([&] { optimizer.step(); }),
              names_last(ranks, "applied steps: 7", "applied steps: 0"));
}

TEST(ShardedSteps, RefuseAStepWithoutTheLossScaleOfTheOthers) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
  GradScaler scaler;
  const at::Tensor before = model->weight.detach().clone();
  scaler.scale(model(torch::ones({2, 4})).sum()).backward();
  const bool scales = on_last(ranks, 1, 0) != 0;
  EXPECT_THAT(error_of([&] { scales ? (void)scaler.step(optimizer) : (void)optimizer.step(); }),
              names_last(ranks, "group 0 lr: 0.1", "loss scale: 65536"));
  EXPECT_TRUE(model->weight.equal(before));
}

// The step in which the norms differ has been taken by then, with weights that are the same.
TEST(ShardedSteps, RefuseAnotherLargestNormInTheNextStep) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
  GradScaler scaler;
  const auto step = [&] {
    optimizer.zero_grad();
    scaler.scale(model(torch::ones({2, 4})).sum()).backward();
    scaler.step(optimizer, {.max_norm = on_last(ranks, 1, 0.5)});
    scaler.update();
  };
  step();
  EXPECT_THAT(error_of(step), names_last(ranks, "max_norm: 0.5", "max_norm: 1"));
}

TEST(MpiDataParallelOptions, ThatDifferAreToldBeforeAnyIsUsed) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  const bool is_last = on_last(ranks, 0, 1) != 0;
  using Options = mezzo::DataParallelOptions;
  const auto compressed = [](bool error_feedback) {
    return Options{
        .all_reduce = {.compress_dtype = at::kBFloat16, .error_feedback = error_feedback}};
  };
  const auto error = [&](const Options& others, const Options& lasts) {
    return error_of(
        [&] { mezzo::DataParallel ddp(small_model(), ranks, is_last ? lasts : others); });
  };
  EXPECT_THAT(error({}, {.all_reduce = {.average = false}}),
              names_last(ranks, "gradients: sums", "gradients: averages"));
  EXPECT_THAT(error({}, compressed(false)),
              names_last(ranks, "compress_dtype: BFloat16", "compress_dtype: none"));
  EXPECT_THAT(error(compressed(false), compressed(true)),
              names_last(ranks, "error_feedback: on", "error_feedback: off"));
  EXPECT_THAT(error({}, {.broadcast_buffers = false}),
              names_last(ranks, "broadcast_buffers: off", "broadcast_buffers: on"));
  EXPECT_THAT(error({}, {.bucket_bytes = 8}), names_last(ranks, "bucket 0: 2", "bucket 0: 24"));
  // Each names the first rank that has not the values that it takes for all.
  EXPECT_THAT(error({}, {.root = 1}), AllOf(HasSubstr("root: 0"), HasSubstr("root: 1")));
  EXPECT_EQ(error({.all_reduce = {.average = false}}, {.all_reduce = {.average = false}}),
            error_of([] {}));
}

TEST(ShardedOptions, ThatDifferAreToldBeforeAnyIsUsed) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  EXPECT_THAT(error_of([&] {
                ShardedOptimizer<AdamW> optimizer(
                    model->parameters(), ranks, AdamWOptions(0.1),
                    {.bucket_bytes = static_cast<int64_t>(on_last(ranks, 1 << 20, 8))});
              }),
              names_last(ranks, "for parameters 1\"", "for parameters 1 0\""));
}

TEST(ShardedSteps, RefuseWeightsThatOneRankAloneHasLoaded) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  auto model = small_model();
  ShardedOptimizer<AdamW> optimizer(model->parameters(), ranks, AdamWOptions(0.1));
  {
    const torch::NoGradGuard no_grad;
    model->bias.add_(on_last(ranks, 0, 1));
  }
  const at::Tensor before = model->weight.detach().clone();
  EXPECT_THAT(error_of([&] {
                model(torch::ones({2, 4})).sum().backward();
              }),
              names_last(ranks, "parameter 1 (float32 [2] on cpu): bits", "parameter 1"));
  EXPECT_TRUE(model->weight.equal(before));
}

TEST(MpiDataParallelSteps, WeightsThatOneRankAloneHasLoadedAreToldInTheFirstPass) {
  const Ranks ranks = everyone();
  if (ranks->getSize() == 1) GTEST_SKIP() << "one rank has none to differ from";
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    auto model = small_model();
    model->to(dtype);
    mezzo::DataParallel ddp(model, ranks);
    {
      const torch::NoGradGuard no_grad;
      model->weight.add_(on_last(ranks, 0, 1));
    }
    EXPECT_THAT(error_of([&] {
                  ddp(torch::ones({2, 4}, dtype)).sum().backward();
                }),
                names_last(ranks, "[2, 4] on cpu): bits", "parameter 0"));
  }
}

TEST(MpiDataParallelSteps, TakeTwoCollectivesABucket) {
  std::vector<std::string> log;
  const Ranks ranks = distributed_test::recording_ranks(everyone(), log);
  auto model = small_model();
  mezzo::DataParallel ddp(model, ranks);
  AdamW optimizer(ddp->parameters(), AdamWOptions(0.1));
  mezzo::LrSchedule schedule(optimizer, mezzo::LinearCurve{.warmup_steps = 0, .total_steps = 4});
  GradScaler scaler;
  for (int step = 0; step < 4; ++step) {
    log.clear();
    train(ddp, scaler, optimizer);
    schedule.step();
    EXPECT_EQ(log.size(), 2U) << "one of the bucket, one of who has which gradient";
  }
}

}  // namespace
