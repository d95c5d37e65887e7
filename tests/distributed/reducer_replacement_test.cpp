#include <torch/torch.h>
//
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "fake_backend.h"
#include "recording_backend.h"

// Reducers, models and gradients that are replaced or changed between backward passes.
namespace {

using distributed_test::make_fake_backend;
using distributed_test::make_recording_backend;
using mezzo::DistributedDataParallel;
using mezzo::GradReducer;
using mezzo::GradScaler;
using test_support::message_of;

at::Tensor make_leaf(double value) { return torch::full({3}, value).requires_grad_(); }

TEST(ReducerReplacement, NewReducerSurvivesOldReducer) {
  const at::Tensor weight = make_leaf(1);
  const std::vector<at::Tensor> parameters{weight};
  auto reducer = std::make_unique<GradReducer>(parameters, make_fake_backend(2));
  // The new reducer is constructed before the old one is destroyed.
  std::vector<std::string> log;
  reducer =
      std::make_unique<GradReducer>(parameters, make_recording_backend(make_fake_backend(2), log));
  log.clear();
  weight.sum().backward();
  EXPECT_THAT(log, testing::ElementsAre("average", "max"));
  reducer.reset();
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(weight), nullptr);
}

TEST(ReducerReplacement, TwoReducersOfOneParamThrow) {
  const at::Tensor shared = make_leaf(1), left = make_leaf(2), right = make_leaf(3);
  const GradReducer first({left, shared}, make_fake_backend(2));
  (shared * left).sum().backward();
  const GradReducer second({right, shared}, make_fake_backend(2));
  EXPECT_THAT(message_of([&] { (shared * left * right).sum().backward(); }),
              testing::AllOf(testing::HasSubstr("the gradient of parameter 1 ("),
                             testing::HasSubstr("on cpu) is reduced by another")));
}

/// A small net, whose weights after `train` with SGD must be equal for 1, 2 and 4 ranks.
struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() {
    torch::manual_seed(5);
    body = register_module("body", torch::nn::Linear(6, 8));
    head = register_module("head", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return head->forward(torch::tanh(body->forward(x))); }
  at::Tensor loss(int64_t step) {
    return forward(torch::sin(torch::arange(24.).view({4, 6}) * static_cast<double>(step + 1)))
        .square()
        .sum();
  }
  torch::nn::Linear body{nullptr}, head{nullptr};
};
TORCH_MODULE(SmallNet);

using SmallDdp = DistributedDataParallel<SmallNet>;
using TrainFn = std::function<void(SmallNet&, std::unique_ptr<SmallDdp>&, int ranks)>;

void expect_equal_for_all_world_sizes(const TrainFn& train) {
  std::vector<at::Tensor> expected;
  for (const int ranks : {1, 2, 4}) {
    SmallNet net;
    auto ddp =
        std::make_unique<SmallDdp>(net, make_fake_backend(ranks),
                                   mezzo::DistributedDataParallelOptions{.bucket_cap_bytes = 128});
    train(net, ddp, ranks);
    std::vector<at::Tensor> got;
    for (const at::Tensor& parameter : net->parameters()) got.push_back(parameter.detach().clone());
    if (expected.empty()) expected = got;
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(torch::equal(expected[i], got[i])) << "parameter " << i << ", ranks " << ranks;
    }
  }
}

const mezzo::optim::SGDOptions kSgd = mezzo::optim::SGDOptions(1e-2).momentum(0.9);

TEST(ReducerReplacement, NewDdpAcceptsSameOptimizer) {
  expect_equal_for_all_world_sizes([](SmallNet& net, std::unique_ptr<SmallDdp>& ddp, int ranks) {
    mezzo::optim::SGD optimizer(net->parameters(), kSgd);
    for (int64_t i = 0; i < 4; ++i) {
      if (i % 2 == 0) net->zero_grad();
      net->loss(i).backward();
      if (i == 1) {
        ddp.reset(new SmallDdp(net, make_fake_backend(ranks),
                               mezzo::DistributedDataParallelOptions{.bucket_cap_bytes = 128}));
      }
      GradScaler scaler({.enabled = false});
      scaler.step(optimizer, {.max_norm = 0.5, .zero_grad = false});
    }
  });
}

TEST(ReducerReplacement, AcceptsAnyDestructionOrder) {
  expect_equal_for_all_world_sizes([](SmallNet& net, std::unique_ptr<SmallDdp>& ddp, int) {
    auto optimizer = std::make_unique<mezzo::optim::SGD>(net->parameters(), kSgd);
    net->loss(0).backward();
    optimizer = std::make_unique<mezzo::optim::SGD>(net->parameters(), kSgd);
    optimizer->step();
    net->loss(1).backward();
    ddp = nullptr;
    optimizer->step();
    net->loss(2).backward();  // without a reducer
    optimizer->step();
  });
}

TEST(ReducerReplacement, AcceptsAnyZeroGradMethod) {
  expect_equal_for_all_world_sizes([](SmallNet& net, std::unique_ptr<SmallDdp>& ddp, int) {
    mezzo::optim::SGD optimizer(net->parameters(), kSgd);
    for (int64_t i = 0; i < 14; ++i) {
      net->loss(i).backward();
      const auto clear = [&](int64_t way) {
        for (const at::Tensor& parameter : net->parameters()) {
          if (way == 0 && parameter.grad().defined()) parameter.grad().zero_();
          if (way == 1) parameter.mutable_grad() = at::Tensor();
          if (way == 2) parameter.mutable_grad() = torch::zeros_like(parameter);
        }
        if (way == 3) optimizer.zero_grad(true);
        if (way == 4) optimizer.zero_grad(false);
        if (way == 5) ddp->buckets().zero_grad(true);
        if (way == 6) ddp->buckets().zero_grad(false);
      };
      if (i % 2 == 0) {
        clear(i / 2);
        const auto no_sync = ddp->no_sync();
        net->loss(i + 20).backward();
      }
      optimizer.step();
      clear(i / 2);
    }
  });
}

TEST(ReducerReplacement, ThrowsForModelCastAfterConstruction) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    torch::nn::Linear net(3, 3);
    const GradReducer reducer(net->parameters(), make_fake_backend(2));
    net->to(dtype);
    EXPECT_THAT(message_of([&] {
                  net(torch::ones({2, 3}, dtype)).sum().backward();
                }),
                testing::HasSubstr("cast and move the model first"));
  }
}

TEST(ReducerReplacement, LoadsWeightsInOtherMemoryFormat) {
  std::vector<at::Tensor> expected;
  for (const int ranks : {1, 2, 4}) {
    torch::manual_seed(5);
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
    conv->to(at::kFloat);
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel ddp(conv, make_fake_backend(ranks));
    mezzo::optim::SGD optimizer(conv->parameters(), kSgd);
    for (int64_t i = 0; i < 4; ++i) {
      if (i == 2) conv->weight.set_data(conv->weight.detach().contiguous().clone());
      conv->zero_grad();
      ddp(torch::sin(torch::arange(150.).view({2, 3, 5, 5}) * double(i + 1)))
          .square()
          .sum()
          .backward();
      optimizer.step();
    }
    if (expected.empty()) expected = {conv->weight.detach().clone()};
    EXPECT_TRUE(torch::allclose(expected[0], conv->weight, 1e-6, 1e-7)) << ranks;
  }
}

}  // namespace
