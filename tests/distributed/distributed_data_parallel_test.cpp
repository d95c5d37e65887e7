#include <torch/torch.h>
//
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>
#include <mezzo/torchscript.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/script_model.h"
#include "fake_backend.h"
#include "recording_backend.h"

namespace {

using distributed_test::make_fake_backend;
using distributed_test::make_recording_backend;
using mezzo::DistributedDataParallel;
using test_support::message_of;
using testing::HasSubstr;

/// A module with a move-only argument and result.
struct ManyArgumentsImpl : torch::nn::Module {
  ManyArgumentsImpl() { weight = register_parameter("weight", torch::ones({2})); }
  std::tuple<at::Tensor, std::unique_ptr<int>> forward(const at::Tensor& x,
                                                       std::unique_ptr<int> passed,
                                                       std::string& written, int times = 3) {
    written += "!";
    return {x * weight * times, std::move(passed)};
  }
  at::Tensor weight;
};
TORCH_MODULE(ManyArguments);

template <class Ddp>
void expect_passes_all_arguments(Ddp& ddp) {
  auto passed = std::make_unique<int>(7);
  std::string written;
  auto [y, back] = ddp(torch::ones({2}), std::move(passed), written);
  EXPECT_EQ(y[0].template item<int>(), 3);
  EXPECT_EQ(*back, 7);
  std::tie(y, back) = ddp(torch::ones({2}), std::move(back), written, 5);
  EXPECT_EQ(y[0].template item<int>(), 5);
  EXPECT_EQ(written, "!!");
}

TEST(DistributedDataParallel, ForwardsArgumentsAndResults) {
  const ManyArguments model;
  DistributedDataParallel ddp(model, make_fake_backend(2));
  expect_passes_all_arguments(ddp);
  DistributedDataParallel autocast(mezzo::AutocastModule(model, {.device_type = torch::kCPU}),
                                   make_fake_backend(2));
  expect_passes_all_arguments(autocast);

  std::shared_ptr<torch::nn::LinearImpl> pointer = torch::nn::Linear(2, 1).ptr();
  DistributedDataParallel of_pointer(pointer, make_fake_backend(2));
  EXPECT_EQ(of_pointer(torch::ones({3, 2})).size(1), 1);
  torch::nn::Sequential layers(torch::nn::Linear(2, 4), torch::nn::ReLU());
  DistributedDataParallel of_layers(layers, make_fake_backend(2));
  EXPECT_EQ(of_layers(torch::ones({3, 2})).size(1), 4);
}

TEST(DistributedDataParallel, SharesModelAndStateDictKeys) {
  torch::nn::Linear model(2, 1);
  DistributedDataParallel ddp(model, make_fake_backend(2));
  EXPECT_EQ(ddp->weight.unsafeGetTensorImpl(), model->weight.unsafeGetTensorImpl());
  EXPECT_EQ(ddp->named_parameters().keys(), (std::vector<std::string>{"weight", "bias"}));
  EXPECT_EQ(ddp.module().get(), model.get());
  DistributedDataParallel autocast(mezzo::AutocastModule(model, {.device_type = torch::kCPU}),
                                   make_fake_backend(2));
  EXPECT_EQ(autocast->named_parameters().keys(), (std::vector<std::string>{"weight", "bias"}));
}

// PyTorch's DistributedDataParallel loses the autocast state in new threads.
TEST(DistributedDataParallel, AutocastModuleWorksInNewThread) {
  const auto dtype_in_new_thread = [](auto& ddp) {
    at::ScalarType dtype = at::kFloat;
    std::thread([&] { dtype = ddp(torch::ones({3, 2})).scalar_type(); }).join();
    return dtype;
  };
  torch::nn::Linear model(2, 1);
  DistributedDataParallel ddp(
      mezzo::AutocastModule(model, {.device_type = torch::kCPU, .dtype = at::kBFloat16}),
      make_fake_backend(2));
  EXPECT_EQ(dtype_in_new_thread(ddp), at::kBFloat16);
  DistributedDataParallel without(model, make_fake_backend(2));
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_EQ(dtype_in_new_thread(without), at::kFloat) << "AutocastGuard is thread-local";
}

TEST(DistributedDataParallel, BackwardRunsInOtherThread) {
  torch::nn::Linear model(2, 1);
  DistributedDataParallel ddp(model, make_fake_backend(4));
  std::thread([&] { ddp(torch::ones({3, 2})).sum().backward(); }).join();
  EXPECT_TRUE(at::equal(model->weight.grad(), torch::full({1, 2}, 3.)));
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    first = register_module("first", torch::nn::Linear(64, 64));
    second = register_module("second", torch::nn::Linear(64, 64));
    norm = register_module("norm", torch::nn::BatchNorm1d(64));
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(second->forward(torch::tanh(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(TwoLayers);

TEST(DistributedDataParallel, OverlapsReductionWithBackward) {
  std::vector<std::string> log;
  TwoLayers model;
  DistributedDataParallel ddp(model, make_recording_backend(make_fake_backend(2), log),
                              {.bucket_cap_bytes = 64 * 64 * 4});
  model->first->weight.register_hook([&](const at::Tensor&) { log.push_back("first layer"); });
  model->second->weight.register_hook([&](const at::Tensor&) { log.push_back("second layer"); });
  const at::Tensor loss = ddp(torch::randn({8, 64})).square().sum();
  log.clear();
  loss.backward();
  EXPECT_THAT(log, testing::ElementsAre("average", "second layer", "average", "average",
                                        "first layer", "average", "max"))
      << "norm and second bias; second weight, first bias; first weight, and the map of gradients";
}

TEST(DistributedDataParallel, StepAddsNoCollective) {
  std::vector<std::string> log;
  TwoLayers model;
  DistributedDataParallel ddp(model, make_recording_backend(make_fake_backend(2), log));
  mezzo::optim::AdamW optimizer(model->parameters());
  mezzo::GradScaler scaler;
  log.clear();
  const at::Tensor loss = ddp(torch::randn({8, 64})).square().sum();
  EXPECT_THAT(log, testing::ElementsAre("broadcast", "broadcast")) << "float and integer buffers";
  log.clear();
  scaler.scale(loss).backward();
  EXPECT_THAT(log, testing::ElementsAre("average", "max"));
  log.clear();
  scaler.step(optimizer, {.max_norm = 1.0});
  scaler.update();
  EXPECT_TRUE(log.empty());
}

TEST(DistributedDataParallel, BroadcastsBuffersOnlyInTraining) {
  std::vector<std::string> log;
  TwoLayers model;
  DistributedDataParallel ddp(model, make_recording_backend(make_fake_backend(2), log));
  const at::Tensor x = torch::randn({8, 64});
  log.clear();
  {
    const torch::NoGradGuard no_grad;
    ddp(x);
  }
  {
    const auto no_sync = ddp.no_sync();
    ddp(x);
  }
  ddp->eval();
  ddp(x);
  ddp->train();
  EXPECT_TRUE(log.empty());
  ddp(x);
  EXPECT_EQ(log.size(), 2U);
  ddp.broadcast_buffers();
  EXPECT_EQ(log.size(), 4U);

  DistributedDataParallel never(model, make_recording_backend(make_fake_backend(2), log),
                                {.broadcast_buffers = false});
  log.clear();
  never(x);
  EXPECT_TRUE(log.empty());
}

TEST(DistributedDataParallel, ThrowsForUnfrozenParameter) {
  TwoLayers model;
  model->first->bias.requires_grad_(false);
  DistributedDataParallel ddp(model, make_fake_backend(2));
  EXPECT_EQ(ddp.buckets().parameters().size(), model->parameters().size() - 1);
  ddp(torch::randn({8, 64})).sum().backward();
  EXPECT_FALSE(model->first->bias.grad().defined());
  model->first->bias.requires_grad_(true);
  EXPECT_THAT(message_of([&] {
                ddp(torch::randn({8, 64}));
              }),
              HasSubstr("the parameter first.bias was frozen at construction"));
  ddp->eval();
  ddp(torch::randn({8, 64}));
}

TEST(DistributedDataParallel, ReducesTiedWeightOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      in = register_module("in", torch::nn::Linear(3, 3));
      out = register_module("out", in);
    }
    at::Tensor forward(const at::Tensor& x) { return out->forward(in->forward(x)); }
    torch::nn::Linear in{nullptr}, out{nullptr};
  };
  auto model = std::make_shared<Tied>();
  DistributedDataParallel ddp(model, make_fake_backend(2));
  EXPECT_EQ(ddp.buckets().parameters().size(), 2U);
  ddp(torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(model->in->weight.grad().defined());
}

TEST(DistributedDataParallel, ThrowsForUntrainableModel) {
  EXPECT_THAT(
      message_of([] { DistributedDataParallel(torch::nn::Linear(nullptr), make_fake_backend(2)); }),
      HasSubstr("`model` is empty"));
  EXPECT_THAT(message_of([] { DistributedDataParallel(torch::nn::ReLU(), make_fake_backend(2)); }),
              HasSubstr("doesn't have any parameter that requires a gradient"));
  torch::nn::Linear model(2, 1);
  EXPECT_THAT(message_of([&] {
                DistributedDataParallel(model, make_fake_backend(2), {.bucket_cap_bytes = 0});
              }),
              HasSubstr("bucket_cap_bytes is 0"));
}

TEST(DistributedDataParallel, TorchScriptMatchesCppModel) {
  const mezzo::ScriptModule script(test_support::script_model());
  const auto model = test_support::twin();
  DistributedDataParallel ddp(script, make_fake_backend(2));
  DistributedDataParallel of_twin(model, make_fake_backend(2));
  DistributedDataParallel wrapped(
      mezzo::AutocastModule(mezzo::ScriptModule(test_support::script_model()),
                            {.device_type = torch::kCPU}),
      make_fake_backend(2));
  const auto x = torch::randn({4, 3, 6, 6});
  {
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    ddp(x).toTensor().to(torch::kFloat).square().sum().backward();
    of_twin(x).to(torch::kFloat).square().sum().backward();
  }
  const auto of_script = ddp->named_parameters();
  for (const auto& item : of_twin->named_parameters()) {
    EXPECT_TRUE(torch::equal(of_script[item.key()].grad(), item.value().grad())) << item.key();
  }
  EXPECT_EQ(wrapped(x).toTensor().scalar_type(), torch::kBFloat16);
}

}  // namespace
