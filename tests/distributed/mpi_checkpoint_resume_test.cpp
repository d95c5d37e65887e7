// DistributedCheckpointManager: resuming with the same and with another world size.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../support/temp_dir.h"
#include "distributed_checkpoint_fixtures.h"
#include "test_backends.h"

namespace distributed_checkpoint_test {
using distributed_test::BackendPtr;
using distributed_test::make_world_backend;

namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

torch::nn::Sequential make_net(bool has_buffers) {
  torch::nn::Sequential net(torch::nn::Linear(6, 17));
  if (has_buffers) net->push_back(torch::nn::BatchNorm1d(17));
  net->push_back(torch::nn::Dropout(0.4));
  net->push_back(torch::nn::Linear(17, 3));
  return net;
}

/// DistributedDataParallel with running statistics.
struct DdpTrainer {
  explicit DdpTrainer(BackendPtr world)
      : net(make_net(true)),
        ddp(net, std::move(world), {.bucket_cap_bytes = 512}),
        optimizer(net->parameters(), AdamWOptions(1e-2)) {}
  at::Tensor forward(const at::Tensor& x) { return ddp(x); }

  torch::nn::Sequential net;
  mezzo::DistributedDataParallel<torch::nn::Sequential> ddp;
  AdamW optimizer;
};

struct ShardedTrainer {
  explicit ShardedTrainer(BackendPtr world)
      : net(make_net(false)),
        optimizer(net->parameters(), std::move(world), AdamWOptions(1e-2), kSmallBuckets) {}
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }

  torch::nn::Sequential net;
  ShardedAdamW optimizer;
};

/// A run with all kinds of state, and occasional infs.
template <class Trainer>
class RankTraining {
 public:
  RankTraining(BackendPtr world, uint64_t seed)
      : rank_(world->getRank()), trainer((torch::manual_seed(seed), world)) {
    torch::manual_seed(seed + 100 * static_cast<uint64_t>(rank_ + 1));
    own_random.set_current_seed(seed + static_cast<uint64_t>(rank_));
    state.add("model", trainer.net).add("optimizer", trainer.optimizer).add("scaler", scaler);
    state.add("schedule", schedule).add("position", position).add_rng_state();
    state.add_per_rank("order", own_random).add_per_rank("seen", seen);
  }

  void step() {
    trainer.optimizer.zero_grad();
    at::Tensor loss = trainer.forward(torch::randn({4, 6}, own_random)).square().mean();
    if (position % 5 == 3 && rank_ == 0) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const auto result = scaler.step(trainer.optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ++position;
    seen += 4 + rank_;
  }

  std::vector<at::Tensor> outcome() {
    std::vector<at::Tensor> all;
    for (const auto& tensor : trainer.net->parameters()) all.push_back(tensor.detach().clone());
    for (const auto& tensor : trainer.net->buffers()) all.push_back(tensor.clone());
    for (const auto& [key, value] : scaler.state_dict()) all.push_back(torch::tensor(value));
    for (const double lr : schedule.lrs()) all.push_back(torch::tensor(lr, torch::kDouble));
    all.push_back(torch::tensor({position, seen}));
    all.push_back(torch::rand({3}));
    all.push_back(torch::rand({3}, own_random));
    return all;
  }

 private:
  int rank_;

 public:
  mezzo::GradScaler scaler{{.init_scale = 8, .growth_interval = 3}};
  Trainer trainer;
  mezzo::LinearSchedule schedule{trainer.optimizer, {.warmup_steps = 3, .total_steps = 40}};
  int64_t position = 0;
  int64_t seen = 0;
  at::Generator own_random = at::detail::createCPUGenerator(0);
  TrainingState state;
};

template <class Trainer>
void expect_bitwise_resume() {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  RankTraining<Trainer> whole(world, 1);
  whole.scaler.on_skip(nullptr);
  for (int i = 0; i < 7; ++i) whole.step();
  DistributedCheckpointManager(directory.path(), world).save(whole.state, whole.position);
  for (int i = 0; i < 7; ++i) whole.step();
  const auto expected = whole.outcome();

  std::vector<std::string> warnings;
  RankTraining<Trainer> resumed(world, 2);
  resumed.scaler.on_skip(nullptr);
  resumed.step();  // its state must be replaced completely
  const auto loaded =
      DistributedCheckpointManager(directory.path(), world, record_warnings(warnings))
          .load_latest(resumed.state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 7);
  EXPECT_THAT(warnings, IsEmpty());
  for (int i = 0; i < 7; ++i) resumed.step();
  const auto actual = resumed.outcome();
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], actual[i])) << i << '\n' << expected[i] << actual[i];
  }
}

TEST(DistributedCheckpointManager, SameWorldSizeResumesBitwise) {
  expect_bitwise_resume<DdpTrainer>();
}

TEST(DistributedCheckpointManager, ShardedOptimizerResumesBitwise) {
  expect_bitwise_resume<ShardedTrainer>();
}

TEST(DistributedCheckpointManager, ResumesAcrossWorldSizes) {
  SingleProcessRun whole(1, AdamWOptions(1e-2));
  whole.run(0, 5);
  for (int savers : available_world_sizes()) {
    for (const bool is_plain : {false, true}) {
      if (is_plain && savers > 1) continue;
      const SharedDirectory directory;
      {
        const RankSubset group(savers);
        if (group.contains_this_rank() && is_plain) {
          SingleProcessRun run(1, AdamWOptions(1e-2));
          run.run(0, 3);
          CheckpointManager(directory.path()).save(run.state, 3);
        } else if (group.contains_this_rank()) {
          ShardedRun run(1, group.backend());
          run.run(0, 3);
          DistributedCheckpointManager(directory.path(), group.backend()).save(run.state, 3);
        }
      }
      const std::string from = "from " + std::to_string(savers) + (is_plain ? " alone" : "");
      for (int loaders : available_world_sizes()) {
        const RankSubset group(loaders);
        if (!group.contains_this_rank()) continue;
        std::vector<std::string> warnings;
        const BackendPtr backend =
            group.backend();  // kept alive: other ranks may still connect over Gloo
        ShardedRun run(7, backend);
        run.run(0, 1);
        const auto loaded =
            DistributedCheckpointManager(directory.path(), backend, record_warnings(warnings))
                .load_latest(run.state);
        ASSERT_TRUE(loaded && loaded->step == 3);
        EXPECT_EQ(run.position, 3);
        run.run(3, 5);
        run.expect_weights_of(whole.net, from + " to " + std::to_string(loaders));
        const bool expects_warning = backend->getRank() == 0 && loaders != savers;
        EXPECT_THAT(warnings, SizeIs(expects_warning ? 1 : 0));
      }
      std::vector<std::string> warnings;
      SingleProcessRun alone(7, AdamWOptions(1e-2));
      ASSERT_TRUE(
          CheckpointManager(directory.path(), record_warnings(warnings)).load_latest(alone.state));
      alone.run(3, 5);
      alone.expect_weights_of(whole.net, from + " to CheckpointManager");
      if (savers > 1) {
        EXPECT_THAT(warnings, ElementsAre(HasSubstr("\"rng_state\" is loaded from rank 0")));
      } else {
        EXPECT_THAT(warnings, IsEmpty());
      }
    }
  }
}

TEST(DistributedCheckpointManager, OtherWorldSizePreservesRankObjects) {
  if (world_size() < 2) return;
  const SharedDirectory directory;
  PerRankState saved(make_world_backend());
  DistributedCheckpointManager(directory.path(), make_world_backend()).save(saved.state, 6);
  for (const int loaders : available_world_sizes()) {
    const RankSubset group(loaders);
    if (!group.contains_this_rank() || loaders == world_size()) continue;
    const BackendPtr backend = group.backend();
    std::vector<std::string> warnings;
    PerRankState run(backend);
    run.position = 77;
    run.epoch = 5;
    const torch::Tensor random = at::detail::getDefaultCPUGenerator().get_state();
    DistributedCheckpointManager(directory.path(), backend, record_warnings(warnings))
        .load_latest(run.state);
    EXPECT_EQ(run.epoch, 1);
    EXPECT_EQ(run.position, 77);
    EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), random));
    if (backend->getRank() != 0) {
      EXPECT_THAT(warnings, IsEmpty());
      continue;
    }
    const std::string numbers = "saved by " + std::to_string(world_size()) +
                                " ranks, and the world size is " + std::to_string(loaders);
    EXPECT_THAT(warnings,
                UnorderedElementsAre(
                    AllOf(HasSubstr("\"position\" is left unchanged"), HasSubstr(numbers)),
                    AllOf(HasSubstr("\"rng_state\" is left unchanged"), HasSubstr(numbers))));
  }
}

}  // namespace
}  // namespace distributed_checkpoint_test
