#include <torch/torch.h>
//
#include <mezzo/distributed/model_parallel_optimizer.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/step_in_backward.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "../support/message_of.h"
#include "rank_equality.h"
#include "single_process_reference.h"
#include "test_backends.h"

namespace step_in_backward_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using mezzo::StepInBackward;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using single_process_reference::batches;
using single_process_reference::compute_loss;
using single_process_reference::make_optimizer_factory;
using single_process_reference::Model;
using test_support::message_of;

/// Trains with DistributedDataParallel, whose hooks are installed before or after those of a
/// StepInBackward. The last steps have two micro-batches.
Model train(const BackendPtr& world, const single_process_reference::MakeOptimizer& make,
            at::ScalarType dtype, bool in_backward, bool is_first, double bad) {
  Model model(dtype);
  const auto optimizer = make(model->parameters());
  std::optional<StepInBackward> stepper;
  if (in_backward && is_first) stepper.emplace(*optimizer);
  mezzo::DistributedDataParallel ddp(model, world, {.bucket_cap_bytes = 1024});
  if (in_backward && !is_first) stepper.emplace(*optimizer);
  const int rank = world->getRank();
  for (int64_t step = 0; const auto& batch : batches(6)) {
    const auto part = batch.part(rank, world->getSize());
    if (step++ > 3) {
      const auto no_sync = ddp.no_sync();
      compute_loss(model, part.part(1, 2), rank).backward();
    }
    (compute_loss(model, part.part(0, 2), rank) * (step == 2 && rank == 0 ? bad : 1.0)).backward();
    if (in_backward) {
      for (const at::Tensor& parameter : model->parameters())
        EXPECT_FALSE(parameter.grad().defined());
      const mezzo::StepResult result = stepper->step();
      EXPECT_EQ(result.found_inf(), step == 2 && bad != 1);
    } else {
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  distributed_test::expect_equal_weights_on_all_ranks(world, model);
  return model;
}

TEST(MpiStepInBackward, IsBitwiseIdenticalUnderDistributedDataParallel) {
  const BackendPtr world = make_world_backend();
  using namespace mezzo::optim;
  const WeightStorageOptions stochastic{WeightStorage::stochastic_rounding},
      split{WeightStorage::split_master};
  for (const bool is_first : {false, true}) {
    for (const auto& [make, dtype] :
         std::vector<std::pair<single_process_reference::MakeOptimizer, at::ScalarType>>{
             {make_optimizer_factory<AdamW>(AdamWOptions(1e-2)), at::kFloat},
             {make_optimizer_factory<AdamW>(AdamWOptions(1e-2), stochastic), at::kBFloat16},
             {make_optimizer_factory<AdamW>(AdamWOptions(1e-2), split), at::kBFloat16},
             {make_optimizer_factory<AdamW8bit>(AdamWOptions(1e-2)), at::kFloat}}) {
      single_process_reference::expect_equal(train(world, make, dtype, true, is_first, 1),
                                             train(world, make, dtype, false, false, 1), "");
    }
  }
}

TEST(MpiStepInBackward, NonFiniteGradientOnOneRankSkipsOnAllRanks) {
  const BackendPtr world = make_world_backend();
  const Model model = train(world, make_optimizer_factory<AdamW>(AdamWOptions(1e-2)), at::kFloat,
                            true, false, std::numeric_limits<double>::quiet_NaN());
  for (const at::Tensor& parameter : model->parameters())
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
}

TEST(MpiStepInBackward, ThrowsForCollectiveSteps) {
  const BackendPtr world = make_world_backend();
  Model model;
  {
    mezzo::ShardedOptimizer<AdamW> sharded(model->parameters(), world, AdamWOptions(1e-2));
    EXPECT_THAT(message_of([&] { StepInBackward in_backward(sharded); }),
                testing::HasSubstr("StepInBackward does not support ShardedOptimizer"));
  }
  AdamW adamw(model->parameters());
  mezzo::ModelParallelOptimizer model_parallel(adamw, world);
  if (world->getSize() == 1) return;
  EXPECT_THAT(message_of([&] { StepInBackward in_backward(model_parallel); }),
              testing::HasSubstr("ModelParallelOptimizer"));
}

}  // namespace
}  // namespace step_in_backward_test
