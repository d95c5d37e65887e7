// libtorch's containers of modules and parameters, passed to APIs that take a module.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../distributed/fake_backend.h"
#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using test_support::message_of;
using testing::HasSubstr;
using torch::Tensor;
using NamedModules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

/// Every container in libtorch.
struct NestedImpl : torch::nn::Module {
  NestedImpl() {
    torch::manual_seed(1);
    using namespace torch::nn;
    list = register_module("list", ModuleList(Linear(4, 4), BatchNorm1d(4), Linear(4, 4)));
    dict = register_module(
        "dict", ModuleDict(NamedModules{{"first", Linear(4, 4).ptr()},
                                        {"last", LayerNorm(LayerNormOptions({4})).ptr()}}));
    factors =
        register_module("factors", ParameterList(torch::ones({4}, torch::requires_grad()),
                                                 torch::full({4}, 2.0, torch::requires_grad())));
    named = register_module("named", ParameterDict());
    named->insert("factor", torch::ones({4}, torch::requires_grad()));
    sequential = register_module("sequential", Sequential(Linear(4, 4), ReLU()));
    any = AnyModule(Linear(4, 4));
    register_module("any", any.ptr());
  }

  Tensor forward(Tensor x) {
    x = list[0]->as<torch::nn::Linear>()->forward(x);
    x = list[1]->as<torch::nn::BatchNorm1d>()->forward(x);
    x = list[2]->as<torch::nn::Linear>()->forward(x);
    x = dict["first"]->as<torch::nn::Linear>()->forward(x);
    x = dict["last"]->as<torch::nn::LayerNorm>()->forward(x);
    for (const Tensor& factor : factors->parameters()) x = x * factor.to(x.scalar_type());
    x = x * named->get("factor").to(x.scalar_type());
    return any.forward(sequential->forward(x));
  }

  torch::nn::ModuleList list{nullptr};
  torch::nn::ModuleDict dict{nullptr};
  torch::nn::ParameterList factors{nullptr};
  torch::nn::ParameterDict named{nullptr};
  torch::nn::Sequential sequential{nullptr};
  torch::nn::AnyModule any;
};
TORCH_MODULE(Nested);

Tensor batch() {
  torch::manual_seed(2);
  return torch::randn({6, 4});
}

void expect_same_parameters(const Nested& left, const Nested& right) {
  for (const auto& item : left->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), right->named_parameters()[item.key()])) << item.key();
  }
}

/// Runs forward and backward under autocast; returns the output.
Tensor train_in_guard(Nested model) {
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  const Tensor result = model->forward(batch());
  result.to(torch::kFloat).square().sum().backward();
  return result;
}

TEST(ModuleContainers, AutocastModuleBitwiseEqualsGuard) {
  Nested guarded, model;
  const Tensor expected = train_in_guard(guarded);
  mezzo::AutocastModule wrapped(model, {.device_type = torch::kCPU});
  EXPECT_EQ(wrapped->named_parameters().keys(), model->named_parameters().keys());
  const Tensor result = torch::nn::AnyModule(wrapped).forward(batch());
  EXPECT_TRUE(torch::equal(result, expected));
  result.to(torch::kFloat).square().sum().backward();
  for (const auto& item : guarded->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value().grad(), model->named_parameters()[item.key()].grad()))
        << item.key();
  }
}

TEST(ModuleContainers, HoldAutocastModules) {
  const torch::nn::Linear linear(4, 4);
  const mezzo::AutocastModule wrapped(linear, {.device_type = torch::kCPU});
  torch::nn::ModuleList list(wrapped);
  torch::nn::ModuleDict dict(NamedModules{{"layer", wrapped.ptr()}});
  torch::nn::Sequential sequential(wrapped, torch::nn::ReLU());
  using Wrapped = mezzo::AutocastModuleImpl<torch::nn::LinearImpl>;
  for (const Tensor& result :
       {list[0]->as<Wrapped>()->forward(batch()), dict["layer"]->as<Wrapped>()->forward(batch()),
        sequential->forward(batch())}) {
    EXPECT_EQ(result.scalar_type(), torch::kBFloat16);
  }
  EXPECT_TRUE(list->named_parameters()["0.weight"].is_same(linear->weight));
  EXPECT_TRUE(dict->named_parameters()["layer.weight"].is_same(linear->weight));
}

TEST(ModuleContainers, CastAndSteppedByAmp) {
  Nested model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2({.loss_scale = 1.0}),
                               {.verbosity = 0});
  for (const auto& item : model->named_parameters()) {
    const bool is_float32 = item.key().starts_with("list.1.");  // the batch norm
    EXPECT_EQ(item.value().scalar_type(), is_float32 ? torch::kFloat : torch::kHalf) << item.key();
  }
  const Tensor before = model->factors->parameters()[1].detach().clone();
  amp.backward(amp.forward(model, batch()).sum(), optimizer);
  EXPECT_TRUE(amp.step(optimizer).applied());
  EXPECT_FALSE(torch::equal(model->factors->parameters()[1], before));
  EXPECT_EQ(amp.forward(model->sequential, batch()).scalar_type(), torch::kFloat) << "a submodule";
}

TEST(ModuleContainers, AcceptedByInitialize) {
  const Nested model;
  const auto amp =
      mezzo::initialize({model->list, model->sequential}, mezzo::OptLevel::O3(), {.verbosity = 0});
  for (const Tensor& each : model->list->parameters()) EXPECT_EQ(each.scalar_type(), torch::kHalf);
  EXPECT_EQ(amp.forward(model->sequential, batch()).scalar_type(), torch::kFloat);
}

TEST(ModuleContainers, DdpEqualsSingleProcess) {
  Nested alone, model;
  mezzo::optim::SGD optimizer(alone->parameters(), mezzo::optim::SGDOptions(1e-2));
  alone->forward(batch()).square().sum().backward();
  optimizer.step();
  mezzo::DistributedDataParallel ddp(model, distributed_test::make_fake_backend(2));
  mezzo::optim::SGD shared(model->parameters(), mezzo::optim::SGDOptions(1e-2));
  ddp(batch()).square().sum().backward();
  shared.step();
  expect_same_parameters(alone, model);
}

TEST(ModuleContainers, LoadFromCheckpointWrappedOrNot) {
  const test_support::TempDir temp_dir;
  Nested saved, loaded;
  mezzo::AutocastModule wrapped(saved, {.device_type = torch::kCPU});
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& each : saved->parameters()) each.mul_(3);
  }
  mezzo::CheckpointManager checkpoints(temp_dir.path());
  checkpoints.save(mezzo::TrainingState().add("model", wrapped), 1);
  checkpoints.load_latest(mezzo::TrainingState().add("model", loaded));
  expect_same_parameters(saved, loaded);
  saved->list->push_back(torch::nn::Linear(1, 1));
  checkpoints.save(mezzo::TrainingState().add("model", saved), 2);
  EXPECT_THAT(
      message_of([&] { checkpoints.load_latest(mezzo::TrainingState().add("model", loaded)); }),
      HasSubstr("Unexpected key(s) in state_dict: \"list.3.weight\""));
}

}  // namespace
