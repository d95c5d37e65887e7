// Muon updates whole matrices: on every rank under DistributedDataParallel, on the owner under a
// ShardedOptimizer.

#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/muon.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "test_backends.h"

namespace {

using distributed_test::make_world_backend;
using mezzo::optim::Muon;
using mezzo::optim::MuonOptions;

/// All ranks have equal batches, whose average is exact for 1, 2 and 4 ranks.
template <class MakeOptimizer>
std::vector<torch::Tensor> trained(const MakeOptimizer& make) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(torch::nn::LinearOptions(6, 9).bias(false)),
                              torch::nn::Tanh(),
                              torch::nn::Linear(torch::nn::LinearOptions(9, 4).bias(false)));
  const auto optimizer = make(model);
  mezzo::GradScaler scaler;
  for (int step = 0; step < 4; ++step) {
    const auto x = torch::randn({8, 6}), y = torch::randn({8, 4});
    model->zero_grad();
    scaler.scale(torch::mse_loss(model->forward(x), y)).backward();
    scaler.step(*optimizer, {.max_norm = 1.0});
    scaler.update();
  }
  return model->parameters();
}

TEST(MpiMuon, MatchesSingleProcess) {
  const auto world = make_world_backend();
  if (world->getSize() == 3) GTEST_SKIP() << "thirds are not exact";
  const MuonOptions options(2e-2);
  const auto alone =
      trained([&](auto& model) { return std::make_unique<Muon>(model->parameters(), options); });
  std::unique_ptr<mezzo::DistributedDataParallel<torch::nn::Sequential>> ddp;
  const auto together = trained([&](auto& model) {
    ddp = std::make_unique<mezzo::DistributedDataParallel<torch::nn::Sequential>>(model, world);
    return std::make_unique<Muon>(model->parameters(), options);
  });
  const auto sharded = trained([&](auto& model) {
    return std::make_unique<mezzo::ShardedOptimizer<Muon>>(model->parameters(), world, options);
  });
  for (std::size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(together[i].equal(alone[i])) << together[i] << alone[i];
    EXPECT_TRUE(sharded[i].equal(alone[i])) << sharded[i] << alone[i];
  }
}

}  // namespace
