#include <torch/torch.h>
//
#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/levels/initialize.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "alike_ranks.h"
#include "recording_ranks.h"

// What goes wrong, or is changed, between one backward pass and the next: it is told, or does no
// harm.
namespace {

using distributed_test::alike_ranks;
using distributed_test::recording_ranks;
using mezzo::DataParallel;
using mezzo::GradAllReduce;
using mezzo::GradScaler;

std::string hard_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "(no error)";
}

at::Tensor leaf_number(double value) { return torch::full({3}, value).requires_grad_(); }

/// Its backward pass throws once it has come to `x`.
at::Tensor throwing(const at::Tensor& x) {
  const at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "on purpose"); });
  return y;
}

// Whoever clears gradients by the module tells the buckets nothing.
TEST(HardUse, APassThatThrewIsToldInTheNextHoweverGradientsWereCleared) {
  for (const bool by_buckets : {false, true}) {
    const at::Tensor first = leaf_number(1), second = leaf_number(2), unused = leaf_number(3);
    GradAllReduce all_reduce({first, second, unused}, alike_ranks(2));
    EXPECT_THAT(hard_error([&] { (throwing(first) * second).sum().backward(); }),
                testing::HasSubstr("on purpose"));
    if (by_buckets) all_reduce.buckets().zero_grad();
    for (const at::Tensor& one : {first, second}) one.mutable_grad() = at::Tensor();
    EXPECT_THAT(hard_error([&] { (first * second).sum().backward(); }),
                testing::HasSubstr("an earlier backward pass did not end"))
        << by_buckets;
  }
}

TEST(HardUse, AReductionThatTakesTheOldOnesPlaceStays) {
  const at::Tensor weight = leaf_number(1);
  const std::vector<at::Tensor> parameters{weight};
  auto all_reduce = std::make_unique<GradAllReduce>(parameters, alike_ranks(2));
  // The new one is there before the old one goes.
  std::vector<std::string> log;
  all_reduce = std::make_unique<GradAllReduce>(parameters, recording_ranks(alike_ranks(2), log));
  log.clear();
  weight.sum().backward();
  EXPECT_THAT(log, testing::ElementsAre("average", "max"));
  all_reduce.reset();
  EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(weight), nullptr);
}

TEST(HardUse, AParameterThatTwoReduceIsNamed) {
  const at::Tensor shared = leaf_number(1), left = leaf_number(2), right = leaf_number(3);
  const GradAllReduce first({left, shared}, alike_ranks(2));
  (shared * left).sum().backward();
  const GradAllReduce second({right, shared}, alike_ranks(2));
  EXPECT_THAT(hard_error([&] { (shared * left * right).sum().backward(); }),
              testing::AllOf(testing::HasSubstr("the gradient of parameter 1 ("),
                             testing::HasSubstr("on cpu) is reduced by another")));
}

TEST(HardUse, AShardedOptimizerOfADataParallelsModelIsRefused) {
  torch::nn::Linear net(3, 3);
  DataParallel ddp(net, alike_ranks(2));
  const mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(net->parameters(), alike_ranks(2),
                                                               mezzo::optim::AdamWOptions(1e-2));
  EXPECT_THAT(hard_error([&] {
                ddp(torch::ones({2, 3})).sum().backward();
              }),
              testing::HasSubstr("is reduced by another"));
}

/// As `train` leaves the weights of a small net with SGD: alone, and as one of 2 or 4 ranks.
struct HardNetImpl : torch::nn::Cloneable<HardNetImpl> {
  HardNetImpl() { reset(); }
  void reset() override {
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
TORCH_MODULE(HardNet);

using HardDdp = DataParallel<HardNet>;
using HardTrain = std::function<void(HardNet&, std::unique_ptr<HardDdp>&, int ranks)>;

void expect_same_as_alone(const HardTrain& train) {
  std::vector<at::Tensor> wanted;
  for (const int ranks : {1, 2, 4}) {
    HardNet net;
    auto ddp = std::make_unique<HardDdp>(net, alike_ranks(ranks),
                                         mezzo::DataParallelOptions{.bucket_bytes = 128});
    train(net, ddp, ranks);
    std::vector<at::Tensor> got;
    for (const at::Tensor& parameter : net->parameters()) got.push_back(parameter.detach().clone());
    if (wanted.empty()) wanted = got;
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(torch::equal(wanted[i], got[i])) << "parameter " << i << ", ranks " << ranks;
    }
  }
}

const mezzo::optim::SGDOptions kSgd = mezzo::optim::SGDOptions(1e-2).momentum(0.9);

TEST(HardUse, APassAfterUnscaleIsDividedForAnOptimizerOfLibtorch) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>&, int) {
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    GradScaler scaler({.init_scale = 1.0, .growth_interval = 1000});
    for (int64_t i = 0; i < 3; ++i) {
      net->zero_grad();
      scaler.scale(net->loss(2 * i)).backward();
      scaler.unscale_(optimizer);
      scaler.scale(net->loss(2 * i + 1)).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  });
}

TEST(HardUse, AScaleThatUndoesTheNumberOfRanksDividesAllTheSame) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>&, int) {
    torch::optim::SGD optimizer(net->parameters(), 1e-3);
    GradScaler scaler({.init_scale = 0.5, .growth_interval = 1000});
    for (int64_t i = 0; i < 3; ++i) {
      scaler.scale(net->loss(i)).backward();  // onto what the step before left
      scaler.step(optimizer, {.max_norm = 1e9, .zero_grad = false});
      scaler.update();
    }
  });
}

TEST(HardUse, FilesAndClonesMayBeMadeBetweenBackwardAndStep) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>&, int) {
    mezzo::optim::SGD optimizer(net->parameters(), kSgd);
    for (int64_t i = 0; i < 3; ++i) {
      net->zero_grad();
      net->loss(i).backward();
      std::stringstream file;
      torch::save(net, file);
      const auto clone = std::dynamic_pointer_cast<HardNetImpl>(net->clone());
      clone->loss(i).backward();  // reduced by nobody
      EXPECT_TRUE(clone->parameters()[0].grad().defined());
      optimizer.step();
      HardNet other;
      torch::load(other, file);
      other->loss(i).backward();
      EXPECT_TRUE(torch::equal(other->parameters()[0].grad(), clone->parameters()[0].grad()));
      if (i != 1) continue;
      std::stringstream same(file.str());
      torch::load(net, same);
    }
  });
}

TEST(HardUse, ANewDataParallelMayTakeTheOldOnesPlaceUnderTheOptimizer) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>& ddp, int ranks) {
    mezzo::optim::SGD optimizer(net->parameters(), kSgd);
    for (int64_t i = 0; i < 4; ++i) {
      if (i % 2 == 0) net->zero_grad();
      net->loss(i).backward();
      if (i == 1) {
        ddp.reset(
            new HardDdp(net, alike_ranks(ranks), mezzo::DataParallelOptions{.bucket_bytes = 128}));
      }
      GradScaler scaler({.enabled = false});
      scaler.step(optimizer, {.max_norm = 0.5, .zero_grad = false});
    }
  });
}

TEST(HardUse, TheOptimizerAndTheDataParallelMayGoInAnyOrder) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>& ddp, int) {
    auto optimizer = std::make_unique<mezzo::optim::SGD>(net->parameters(), kSgd);
    net->loss(0).backward();
    optimizer = std::make_unique<mezzo::optim::SGD>(net->parameters(), kSgd);
    optimizer->step();
    net->loss(1).backward();
    ddp = nullptr;
    optimizer->step();
    net->loss(2).backward();  // nobody reduces now
    optimizer->step();
  });
}

TEST(HardUse, GradientsMayBeClearedInEveryWay) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>& ddp, int) {
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

TEST(HardUse, AModelThatIsCastUnderItsBucketsIsNamed) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    torch::nn::Linear net(3, 3);
    const GradAllReduce all_reduce(net->parameters(), alike_ranks(2));
    net->to(dtype);
    EXPECT_THAT(hard_error([&] {
                  net(torch::ones({2, 3}, dtype)).sum().backward();
                }),
                testing::HasSubstr("cast and move the model first"));
  }
}

TEST(HardUse, LossesOfAmpAddUpOnMasters) {
  expect_same_as_alone([](HardNet& net, std::unique_ptr<HardDdp>& ddp, int ranks) {
    ddp = nullptr;
    mezzo::optim::SGD optimizer(net->parameters(), kSgd);
    auto amp = mezzo::initialize(net, optimizer, mezzo::OptLevel::O2_bf16(),
                                 {.num_losses = 2, .verbosity = 0});
    ddp = std::make_unique<HardDdp>(net, alike_ranks(ranks),
                                    mezzo::DataParallelOptions{.bucket_bytes = 128});
    EXPECT_EQ(net->parameters()[0].scalar_type(), at::kBFloat16);
    for (int64_t i = 0; i < 4; ++i) {
      amp.zero_grad(optimizer);
      for (int64_t id = 0; id < 2; ++id) {
        const double factor = static_cast<double>(2 * i + id + 1);
        const at::Tensor x = torch::sin(torch::arange(24.).view({4, 6}) * factor);
        const at::Tensor y = (*ddp)(x.to(at::kBFloat16)).to(at::kFloat);
        amp.scale_loss(y.square().sum(), optimizer, {.loss_id = id});
      }
      amp.step(optimizer, {.max_norm = 0.5});
    }
  });
}

TEST(HardUse, CheckpointedLayersHaveTheAveragesOfTheRanks) {
  std::vector<std::string> log;
  HardNet net, like;
  DataParallel ddp(net, recording_ranks(alike_ranks(2), log), {.bucket_bytes = 128});
  log.clear();
  at::Tensor x = torch::ones({4, 6}).requires_grad_();
  x = mezzo::activation_checkpoint(net->body, x);
  mezzo::activation_checkpoint(net->head, x).square().sum().backward();
  like->forward(torch::ones({4, 6})).square().sum();
  at::Tensor y = like->body->forward(torch::ones({4, 6}));
  like->head->forward(y).square().sum().backward();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(torch::equal(net->parameters()[i].grad(), like->parameters()[i].grad())) << i;
  }
  EXPECT_EQ(std::count(log.begin(), log.end(), "max"), 1);
}

TEST(HardUse, WeightsMayBeLoadedInAnotherLayout) {
  std::vector<at::Tensor> wanted;
  for (const int ranks : {1, 2, 4}) {
    torch::manual_seed(5);
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
    conv->to(at::kFloat);
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    DataParallel ddp(conv, alike_ranks(ranks));
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
    if (wanted.empty()) wanted = {conv->weight.detach().clone()};
    EXPECT_TRUE(torch::allclose(wanted[0], conv->weight, 1e-6, 1e-7)) << ranks;
  }
}

}  // namespace
