#include <torch/torch.h>
//
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "rank_equality.h"
#include "single_process_reference.h"
#include "test_backends.h"

namespace {

using distributed_test::BackendPtr;
using distributed_test::expect_equal_on_all_ranks;
using distributed_test::make_world_backend;
using mezzo::DistributedDataParallel;
using single_process_reference::make_optimizer_factory;
using single_process_reference::MakeOptimizer;
using test_support::message_of;
using testing::HasSubstr;

/// A model with running statistics, a frozen and an unused parameter.
struct ReplicatedImpl : torch::nn::Module {
  explicit ReplicatedImpl(int64_t seed = 3) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    in = register_module("in", torch::nn::Linear(6, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    out = register_module("out", torch::nn::Linear(12, 2));
    unused = register_parameter("unused", torch::randn({3}));
    frozen = register_parameter("frozen", torch::randn({2}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out->forward(torch::tanh(norm->forward(in->forward(x)))) + frozen;
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor unused, frozen;
};
TORCH_MODULE(Replicated);

at::Tensor whole_batch(int64_t step) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  return torch::randn({12, 6});  // parts for 1, 2, 3 and 4 ranks
}
at::Tensor own_part(const BackendPtr& world, int64_t step) {
  return whole_batch(step).chunk(world->getSize())[static_cast<std::size_t>(world->getRank())];
}

/// Two micro-batches per step, the first under no_sync.
void expect_single_process_result(const MakeOptimizer& optimizer, const BackendPtr& backend) {
  const single_process_reference::TrainingConfig config{.optimizer = optimizer, .micro_batches = 2};
  single_process_reference::expect_close(
      single_process_reference::train_on_ranks(config, backend),
      single_process_reference::train_single_process(config, backend->getSize()), 2e-5);
}

TEST(MpiDistributedDataParallel, MatchesSingleProcessWithEveryOptimizer) {
  const BackendPtr world = make_world_backend();
  const std::vector<MakeOptimizer> optimizers = {
      make_optimizer_factory<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2).eps(1e-3)),
      make_optimizer_factory<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1e-2).eps(1e-3)),
      make_optimizer_factory<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-1).momentum(0.9)),
      make_optimizer_factory<mezzo::optim::Lion>(mezzo::optim::LionOptions(1e-3)),
      make_optimizer_factory<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2).eps(1e-3)),
  };
  for (const MakeOptimizer& optimizer : optimizers) expect_single_process_result(optimizer, world);
}

at::Tensor waves(int64_t count, double factor) {
  return torch::sin(torch::arange(count, at::kDouble) * factor).to(at::kFloat);
}

// data/data_parallel.py trained the same model in Python, with 1, 2 and 4 processes.
TEST(MpiDistributedDataParallel, MatchesPythonDdp) {
  const BackendPtr world = make_world_backend();
  std::ifstream file(MEZZO_DISTRIBUTED_TEST_DATA "/data_parallel.pt", std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const auto recorded = torch::pickle_load(bytes).toGenericDict();
  const std::string size = std::to_string(world->getSize());
  if (!recorded.contains(size)) GTEST_SKIP() << "recorded for 1, 2 and 4 ranks";
  torch::nn::Sequential model(torch::nn::Linear(6, 12), torch::nn::Tanh(),
                              torch::nn::Linear(12, 2));
  int number = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    const at::NoGradGuard no_grad;
    parameter.copy_((waves(parameter.numel(), 0.7 * ++number) * 0.4).view_as(parameter));
  }
  DistributedDataParallel ddp(model, world);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor x = waves(24 * 6, 0.1 * step).view({24, 6});
    optimizer.zero_grad();
    const at::Tensor own = x.chunk(world->getSize())[static_cast<std::size_t>(world->getRank())];
    (ddp(own) - 0.5).square().mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : model->parameters()) {
    weights.push_back(parameter.detach().flatten());
  }
  const at::Tensor apart = (at::cat(weights) - recorded.at(size).toTensor()).abs().max();
  EXPECT_LE(apart.item<double>(), 1e-6);
}

// Each half of the ranks trains a separate model on the same batches.
TEST(MpiDistributedDataParallel, SubgroupsTrainIndependentModels) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() < 4) GTEST_SKIP() << "needs four ranks";
  const int half = world->getRank() * 2 / world->getSize();
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, half, world->getRank(), &communicator);
  {
    const BackendPtr backend = distributed_test::make_backend(communicator);
    ASSERT_EQ(backend->getSize(), world->getSize() / 2);
    const double rate = half == 0 ? 1e-2 : 3e-2;
    expect_single_process_result(
        make_optimizer_factory<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(rate).eps(1e-3)),
        backend);
  }
  MPI_Comm_free(&communicator);
}

TEST(MpiDistributedDataParallel, BroadcastsInitialWeightsAndBuffers) {
  const BackendPtr world = make_world_backend();
  Replicated model(world->getRank()), expected(0);
  model->norm->running_mean.fill_(world->getRank());
  model->norm->num_batches_tracked.fill_(world->getRank());
  const DistributedDataParallel ddp(model, world);
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), expected->named_parameters()[item.key()])) << item.key();
  }
  EXPECT_TRUE(at::equal(model->norm->running_mean, torch::zeros({12})));
  EXPECT_EQ(model->norm->num_batches_tracked.item<int>(), 0);
}

TEST(MpiDistributedDataParallel, ReportsRankAndTensorThatDiffer) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) GTEST_SKIP() << "needs two ranks";
  const int last = world->getSize() - 1;
  const auto error_with = [&](const std::function<void(Replicated&)>& change) {
    Replicated model;
    if (world->getRank() == last) change(model);
    return message_of([&] { DistributedDataParallel(model, world); });
  };
  const std::string of_last = "rank " + std::to_string(last) + " has ";
  EXPECT_THAT(
      error_with([](Replicated& model) { model->register_parameter("more", torch::ones(1)); }),
      testing::AllOf(HasSubstr(of_last), HasSubstr("more")));
  EXPECT_THAT(
      error_with([](Replicated& model) { model->register_buffer("state", torch::ones(1)); }),
      testing::AllOf(HasSubstr(of_last), HasSubstr("state")));
  EXPECT_THAT(error_with([](Replicated& model) { model->in->bias.requires_grad_(false); }),
              testing::AllOf(HasSubstr("in.bias"), HasSubstr("does not require grad")));
  // The backend remains usable.
  Replicated model;
  DistributedDataParallel ddp(model, world);
  ddp(own_part(world, 0)).sum().backward();
}

TEST(MpiDistributedDataParallel, BuffersFollowRank0) {
  const BackendPtr world = make_world_backend();
  Replicated model, roots_alone;
  DistributedDataParallel ddp(model, world);
  mezzo::optim::SGD optimizer(model->parameters(), mezzo::optim::SGDOptions(0.1));
  for (int64_t step = 0; step < 4; ++step) {
    ddp->zero_grad();
    ddp(own_part(world, step)).square().sum().backward();
    const torch::NoGradGuard no_grad;
    roots_alone->train();
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      roots_alone->parameters()[i].copy_(model->parameters()[i]);
    }
    roots_alone->forward(whole_batch(step).chunk(world->getSize())[0]);
    optimizer.step();
  }
  if (world->getRank() == 0) {
    ddp->eval();
    ddp(own_part(world, 0));  // no collective in evaluation
    ddp->train();
  } else {
    EXPECT_FALSE(at::equal(model->norm->running_mean, roots_alone->norm->running_mean))
        << "since the last forward";
  }
  ddp.broadcast_buffers();
  EXPECT_TRUE(at::equal(model->norm->running_mean, roots_alone->norm->running_mean));
  EXPECT_TRUE(at::equal(model->norm->running_var, roots_alone->norm->running_var));
  EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 4);
  EXPECT_FALSE(model->unused.grad().defined());
  EXPECT_FALSE(model->frozen.grad().defined());
}

// In PyTorch the broadcast of the second forward breaks the backward of the first one.
TEST(MpiDistributedDataParallel, SupportsTwoForwardsPerBackward) {
  const BackendPtr world = make_world_backend();
  Replicated model;
  DistributedDataParallel ddp(model, world);
  const at::Tensor first = ddp(own_part(world, 0));
  const at::Tensor second = ddp(own_part(world, 1));
  (first.square().sum() + second.square().sum()).backward();
  expect_equal_on_all_ranks(world, model->in->weight.grad(), "a gradient");
}

}  // namespace
