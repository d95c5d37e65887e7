#include <torch/torch.h>
//
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "rank_equality.h"
#include "single_process_reference.h"
#include "test_backends.h"

// An inf on one rank skips the step and backs off the scale on all ranks, because all check the
// reduced gradients. With equal batches and a power of two of ranks, results are bitwise identical
// to a single process with every inf.
namespace found_inf_consensus_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::expect_equal_on_all_ranks;
using distributed_test::make_world_backend;
using single_process_reference::make_optimizer_factory;
using single_process_reference::MakeOptimizer;
using single_process_reference::StepFn;
using single_process_reference::TrainingConfig;
using single_process_reference::TrainingResult;

/// All steps except the third, sixth ... have an inf or NaN on one rank, in turn.
double factor_with_infs(int64_t step, int64_t rank, int64_t ranks) {
  if (step % 3 == 2 || (step / 3 + step) % ranks != rank) return 1.;
  return step % 2 == 0 ? std::numeric_limits<double>::infinity()
                       : std::numeric_limits<double>::quiet_NaN();
}

void expect_found_inf_consensus(TrainingConfig config) {
  config.factor = &factor_with_infs;
  const BackendPtr world = make_world_backend();
  const TrainingResult result = single_process_reference::train_on_ranks(config, world);
  expect_equal_on_all_ranks(world, torch::tensor(result.decisions, at::kDouble), "decisions");
  const TrainingResult alone =
      single_process_reference::train_single_process(config, world->getSize());
  EXPECT_EQ(result.decisions, alone.decisions);
  // Gloo divides before the sum, so subnormal gradients are rounded.
  const bool is_exact = !distributed_test::is_over_gloo() && config.all_ranks_identical &&
                        (world->getSize() & (world->getSize() - 1)) == 0;
  single_process_reference::expect_close(result.model, alone.model, is_exact ? 0 : 1e-4);
  for (const at::Tensor& weight : result.model->parameters()) {
    EXPECT_TRUE(weight.isfinite().all().item<bool>());
  }
}

std::vector<MakeOptimizer> optimizers() {
  return {make_optimizer_factory<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2).eps(1e-3)),
          make_optimizer_factory<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)),
          make_optimizer_factory<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2).eps(1e-3)),
          make_optimizer_factory<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9)),
          make_optimizer_factory<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).eps(1e-3))};
}

TEST(MpiFoundInfConsensus, OneRankInfSkipsAllRanks) {
  for (const MakeOptimizer& optimizer : optimizers()) {
    expect_found_inf_consensus({.optimizer = optimizer, .steps = 10, .all_ranks_identical = true});
    expect_found_inf_consensus({.optimizer = optimizer, .steps = 10});
  }
}

// 200 iterations with more ranks than cores, where every collective waits for the scheduler.
TEST(MpiFoundInfConsensus, HoldsFor1000Iterations) {
  expect_found_inf_consensus({.optimizer = optimizers()[0],
                              .steps = make_world_backend()->getSize() > 2 ? 200 : 1000,
                              .all_ranks_identical = true});
}

TEST(MpiFoundInfConsensus, HoldsForEveryStepSequence) {
  const auto plain = [](auto& scaler, auto& optimizer) { return scaler.step(optimizer); };
  const auto unscaled = [](auto& scaler, auto& optimizer) {
    scaler.unscale_(optimizer);
    return scaler.step(optimizer);
  };
  const auto zeroing = [](auto& scaler, auto& optimizer) {
    return scaler.step(optimizer, mezzo::StepOptions{.zero_grad = true});
  };
  for (const StepFn& step : {StepFn(plain), StepFn(unscaled), StepFn(zeroing)}) {
    for (const MakeOptimizer& optimizer : optimizers()) {
      expect_found_inf_consensus(
          {.optimizer = optimizer, .steps = 10, .step = step, .all_ranks_identical = true});
    }
  }
}

TEST(MpiFoundInfConsensus, HysteresisIsEqualAcrossRanks) {
  for (const bool all_ranks_identical : {true, false}) {
    expect_found_inf_consensus(
        {.optimizer = optimizers()[0],
         .steps = 20,
         .scaler = {.init_scale = 1024, .growth_interval = 3, .min_scale = 64, .hysteresis = 3},
         .all_ranks_identical = all_ranks_identical});
  }
}

}  // namespace
}  // namespace found_inf_consensus_test
