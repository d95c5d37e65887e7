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

// An inf on one rank skips the step of all, and the scale of all backs off: what the gradients say
// after the reduction is the same everywhere. What a single process does that sees every inf is
// what all ranks do, to the bit, where their batches are the same and their number a power of two.
namespace one_decision_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::expect_same_bits_on_all_ranks;
using distributed_test::make_world_backend;
using single_process_reference::Course;
using single_process_reference::make_optimizer_factory;
using single_process_reference::MakeOptimizer;
using single_process_reference::Outcome;
using single_process_reference::StepFn;

/// Every step but the third, sixth ... has an inf, or a NaN, on one rank, each in turn.
double factor_with_infs(int64_t step, int64_t rank, int64_t ranks) {
  if (step % 3 == 2 || (step / 3 + step) % ranks != rank) return 1.;
  return step % 2 == 0 ? std::numeric_limits<double>::infinity()
                       : std::numeric_limits<double>::quiet_NaN();
}

void expect_decided_as_one(Course course) {
  course.factor = &factor_with_infs;
  const BackendPtr world = make_world_backend();
  const Outcome outcome = single_process_reference::train_together(course, world);
  expect_same_bits_on_all_ranks(world, torch::tensor(outcome.decisions, at::kDouble), "decisions");
  const Outcome alone = single_process_reference::train_alone(course, world->getSize());
  EXPECT_EQ(outcome.decisions, alone.decisions);
  // Gloo divides before it adds: the smallest gradients lose their last bits.
  const bool is_exact = !distributed_test::is_over_gloo() && course.are_alike &&
                        (world->getSize() & (world->getSize() - 1)) == 0;
  single_process_reference::expect_close(outcome.model, alone.model, is_exact ? 0 : 1e-4);
  for (const at::Tensor& weight : outcome.model->parameters()) {
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

TEST(MpiFoundInfConsensus, AnInfOnOneRankSkipsTheStepOfAll) {
  for (const MakeOptimizer& optimizer : optimizers()) {
    expect_decided_as_one({.optimizer = optimizer, .steps = 10, .are_alike = true});
    expect_decided_as_one({.optimizer = optimizer, .steps = 10});
  }
}

// Where there are more ranks than a small machine has cores, every collective waits for the
// system's scheduler: 200 iterations then.
TEST(MpiFoundInfConsensus, HoldsForAThousandIterations) {
  expect_decided_as_one({.optimizer = optimizers()[0],
                         .steps = make_world_backend()->getSize() > 2 ? 200 : 1000,
                         .are_alike = true});
}

TEST(MpiFoundInfConsensus, HoldsForStepsInAllForms) {
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
      expect_decided_as_one({.optimizer = optimizer, .steps = 10, .step = step, .are_alike = true});
    }
  }
}

TEST(MpiFoundInfConsensus, CountsHysteresisAlikeOnAllRanks) {
  for (const bool are_alike : {true, false}) {
    expect_decided_as_one(
        {.optimizer = optimizers()[0],
         .steps = 20,
         .scaler = {.init_scale = 1024, .growth_interval = 3, .min_scale = 64, .hysteresis = 3},
         .are_alike = are_alike});
  }
}

}  // namespace
}  // namespace one_decision_test
