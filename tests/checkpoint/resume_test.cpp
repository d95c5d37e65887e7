// Resumed runs are bitwise identical to uninterrupted ones.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using mezzo::optim::WeightStorage;
using test_support::BitwiseEqual;
using test_support::TempDir;

mezzo::optim::AdamW make(std::vector<torch::Tensor> parameters, WeightStorage storage) {
  return mezzo::optim::AdamW(std::move(parameters), mezzo::optim::AdamWOptions(1e-2),
                             {.weight_storage = storage, .seed = 7});
}

/// A run with dropout, growth and backoff of the loss scale, a schedule and averages.
template <class Optimizer>
class ResumableTraining {
 public:
  template <class MakeOptimizer>
  ResumableTraining(at::ScalarType dtype, MakeOptimizer make_optimizer)
      : model(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::Dropout(0.5),
              torch::nn::Linear(16, 4)),
        optimizer((model->to(dtype), make_optimizer(model->parameters()))),
        ema(model->parameters(), {.decay = 0.8}),
        schedule(optimizer, {.warmup_steps = 3, .total_steps = 40}),
        dtype_(dtype) {
    scaler.on_skip(nullptr);
    state.add("model", model).add("optimizer", optimizer).add("ema", ema);
    state.add("scaler", scaler).add("schedule", schedule).add("position", position);
    state.add("order", order).add("own generator", own_random).add_rng_state();
  }

  void step() {
    optimizer.zero_grad();
    const torch::Tensor input = torch::randn({6, 8}).to(dtype_);
    torch::Tensor loss = model->forward(input).to(torch::kFloat).square().mean();
    const bool overflows = position % 5 == 3;
    if (overflows) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ema.update(result);
    order = torch::randperm(10, own_random);
    ++position;
  }

  /// The whole training state.
  std::vector<torch::Tensor> outcome() {
    std::vector<torch::Tensor> all = test_support::clone_all(model->parameters());
    for (const auto& tensor : model->buffers()) all.push_back(tensor.clone());
    for (const auto& tensor : ema.averages()) all.push_back(tensor.clone());
    for (const auto& [key, value] : scaler.state_dict()) all.push_back(torch::tensor(value));
    for (const double lr : schedule.lrs()) all.push_back(torch::tensor(lr, torch::kDouble));
    all.push_back(torch::tensor(position));
    all.push_back(order.clone());
    all.push_back(torch::rand({3}));
    all.push_back(torch::rand({3}, own_random));
    return all;
  }

  torch::nn::Sequential model;
  Optimizer optimizer;
  mezzo::Ema ema;
  mezzo::LinearSchedule schedule;
  mezzo::GradScaler scaler{{.init_scale = 8, .growth_interval = 3}};
  int64_t position = 0;
  torch::Tensor order;
  at::Generator own_random = at::detail::createCPUGenerator(11);
  TrainingState state;

 private:
  at::ScalarType dtype_;
};

/// Compares an uninterrupted run with one that resumes from a checkpoint, after another
/// initialization.
template <class Optimizer, class MakeOptimizer>
void expect_bitwise_resume(at::ScalarType dtype, MakeOptimizer make_optimizer) {
  const TempDir temp_dir;
  torch::manual_seed(1);
  ResumableTraining<Optimizer> whole(dtype, make_optimizer);
  for (int i = 0; i < 9; ++i) whole.step();
  CheckpointManager(temp_dir.path()).save(whole.state, whole.position);
  for (int i = 0; i < 9; ++i) whole.step();
  const auto expected = whole.outcome();

  torch::manual_seed(2);
  ResumableTraining<Optimizer> resumed(dtype, make_optimizer);
  resumed.step();  // its state must be replaced completely
  const auto loaded = CheckpointManager(temp_dir.path()).load_latest(resumed.state);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->step, 9);
  for (int i = 0; i < 9; ++i) resumed.step();

  EXPECT_THAT(resumed.outcome(), BitwiseEqual(expected));
}

TEST(CheckpointResume, BitwiseIdenticalWithMezzoAdamW) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::fp32_master,
                             WeightStorage::split_master, WeightStorage::stochastic_rounding}) {
    expect_bitwise_resume<mezzo::optim::AdamW>(
        storage == WeightStorage::plain ? torch::kFloat : torch::kBFloat16,
        [storage](auto parameters) { return make(parameters, storage); });
  }
}

TEST(CheckpointResume, BitwiseIdenticalWithTorchAdamW) {
  expect_bitwise_resume<torch::optim::AdamW>(torch::kFloat, [](auto parameters) {
    return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-2));
  });
}

/// A tied layer, with averages of the masters of a MasterWeights over a torch optimizer.
struct MasterWeightsTraining {
  MasterWeightsTraining() {
    scaler.on_skip(nullptr);
    state.add("model", model).add("optimizer", optimizer).add("ema", ema).add("scaler", scaler);
    state.add("schedule", schedule);
  }
  void step(float scale_of_loss) {
    adamw.zero_grad();
    const torch::Tensor loss = model->forward(torch::ones({1, 4}, torch::kHalf)).sum();
    scaler.scale(loss * scale_of_loss).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();
    schedule.step(result);
    ema.update(result);
  }

  torch::nn::Linear tied = [] {
    torch::nn::Linear layer(4, 4);
    layer->to(torch::kHalf);
    return layer;
  }();
  torch::nn::Sequential model{tied, torch::nn::ReLU(), tied};
  torch::optim::AdamW adamw{tied->parameters(), torch::optim::AdamWOptions(1e-3)};
  mezzo::MasterWeights optimizer{adamw};
  mezzo::Ema ema{tied->parameters(),
                 {.decay = 0.9, .masters = [this] { return mezzo::master_params(optimizer); }}};
  mezzo::GradScaler scaler{{.init_scale = 8, .growth_interval = 2}};
  mezzo::CosineSchedule schedule{optimizer, {.warmup_steps = 2, .total_steps = 20}};
  TrainingState state;
};

TEST(CheckpointResume, BitwiseIdenticalWithMastersAndEma) {
  const TempDir temp_dir;
  torch::manual_seed(3);
  MasterWeightsTraining whole, resumed;
  for (const float scale : {1.0F, 1e30F, 2.0F, 1.0F}) whole.step(scale);
  const auto file = CheckpointManager(temp_dir.path()).save(whole.state, 4).path;
  resumed.step(1.0F);
  mezzo::load_checkpoint(file, resumed.state);
  for (const float scale : {0.5F, 1e30F, 1.0F}) whole.step(scale), resumed.step(scale);
  EXPECT_EQ(whole.scaler.state_dict(), resumed.scaler.state_dict());
  EXPECT_EQ(whole.optimizer.applied_steps(), 5);
  EXPECT_THAT(resumed.model->parameters(), BitwiseEqual(whole.model->parameters()));
  EXPECT_THAT(mezzo::master_params(resumed.optimizer),
              BitwiseEqual(mezzo::master_params(whole.optimizer)));
  EXPECT_THAT(resumed.ema.averages(), BitwiseEqual(whole.ema.averages()));
}

TEST(CheckpointResume, LoadReplacesOptimizerAndScheduleState) {
  const TempDir temp_dir;
  torch::Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::AdamW fresh({weight}, 0.1), used({weight}, 0.5);
  mezzo::LinearSchedule saved(fresh, {.total_steps = 10}), loaded(used, {.total_steps = 10});
  weight.mutable_grad() = torch::ones({2});
  used.step();
  loaded.step();
  const auto state = [](auto& optimizer, auto& schedule) {
    return TrainingState().add("optimizer", optimizer).add("schedule", schedule);
  };
  const auto file = CheckpointManager(temp_dir.path()).save(state(fresh, saved), 0).path;
  mezzo::load_checkpoint(file, state(used, loaded));
  EXPECT_TRUE(used.state().empty());
  EXPECT_EQ(loaded.applied_steps(), 0);
  EXPECT_EQ(loaded.base_lrs(), std::vector<double>{0.1});
  EXPECT_EQ(loaded.lrs(), std::vector<double>{0.1});
}

}  // namespace
