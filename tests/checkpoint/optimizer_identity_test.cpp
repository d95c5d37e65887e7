// An optimizer loads only the state of its class and parameters.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using mezzo::optim::WeightStorage;
using test_support::message_of;
using test_support::TempDir;
using testing::AllOf;
using testing::HasSubstr;

/// Two square layers, whose parameters have equal shapes.
torch::nn::Sequential make_model(at::ScalarType dtype) {
  torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  model->to(dtype);
  return model;
}

template <class Optimizer>
void take_step(const torch::nn::Sequential& model, Optimizer& optimizer) {
  for (const torch::Tensor& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::rand_like(parameter);
  }
  optimizer.step();
}

/// Saves `saved`, and returns the error of loading it into `loaded`, which must not change if it
/// throws.
template <class Make, class MakeOther>
std::string load_error(const Make& make, const MakeOther& make_other,
                       at::ScalarType dtype = torch::kFloat) {
  const TempDir temp_dir;
  torch::nn::Sequential model = make_model(dtype), other = make_model(dtype);
  auto saved = make(model->parameters());
  auto loaded = make_other(other->parameters());
  take_step(model, saved);
  take_step(other, loaded);
  const std::size_t states = loaded.state().size();
  const torch::Tensor before = other->parameters()[0].detach().clone();
  const auto file = CheckpointManager(temp_dir.path())
                        .save(TrainingState().add("model", model).add("optimizer", saved), 1)
                        .path;
  const std::string error = message_of([&] {
    mezzo::load_checkpoint(file, TrainingState().add("model", other).add("optimizer", loaded));
  });
  if (error != "no error") {
    EXPECT_TRUE(torch::equal(other->parameters()[0], before)) << error;
    EXPECT_EQ(loaded.state().size(), states);
  }
  take_step(other, loaded);
  return error;
}

template <class Optimizer>
auto make_factory() {
  return [](std::vector<torch::Tensor> parameters) {
    return Optimizer(std::move(parameters), {1e-3});
  };
}

auto make_factory(WeightStorage storage) {
  return [storage](std::vector<torch::Tensor> parameters) {
    return mezzo::optim::AdamW(std::move(parameters), mezzo::optim::AdamWOptions(1e-3),
                               {.weight_storage = storage});
  };
}

TEST(CheckpointOptimizerIdentity, ThrowsForOtherClass) {
  using mezzo::optim::AdamW;
  const auto is_refused = [](const std::string& saved, const std::string& here) {
    return AllOf(HasSubstr("class mismatch: " + saved + " in the checkpoint, " + here +
                           " in the current state"),
                 HasSubstr("nothing was loaded"),
                 HasSubstr("construct an optimizer of the saved class"));
  };
  EXPECT_THAT(load_error(make_factory<AdamW>(), make_factory<mezzo::optim::Adam>()),
              is_refused("AdamW", "Adam"));
  EXPECT_THAT(load_error(make_factory<AdamW>(), make_factory<mezzo::optim::Lion>()),
              is_refused("AdamW", "Lion"));
  EXPECT_THAT(load_error(make_factory<AdamW>(), make_factory<torch::optim::Adam>()),
              is_refused("AdamW", "Adam"));
  EXPECT_THAT(load_error(make_factory<mezzo::optim::LAMB>(), make_factory<mezzo::optim::Lion>()),
              is_refused("LAMB", "Lion"));
  EXPECT_THAT(load_error(make_factory<torch::optim::Adam>(), make_factory<torch::optim::AdamW>()),
              is_refused("Adam", "AdamW"));
}

TEST(CheckpointOptimizerIdentity, MezzoAndTorchStateAreInterchangeable) {
  EXPECT_EQ(load_error(make_factory<mezzo::optim::AdamW>(), make_factory<torch::optim::AdamW>()),
            "no error");
  EXPECT_EQ(load_error(make_factory<torch::optim::AdamW>(), make_factory<mezzo::optim::AdamW>()),
            "no error");
  EXPECT_EQ(load_error(make_factory<mezzo::optim::SGD>(), make_factory<torch::optim::SGD>()),
            "no error");
  EXPECT_EQ(load_error(make_factory<torch::optim::SGD>(), make_factory<mezzo::optim::SGD>()),
            "no error");
  EXPECT_EQ(load_error(make_factory(WeightStorage::fp32_master),
                       make_factory<torch::optim::AdamW>(), torch::kBFloat16),
            "no error");
}

TEST(CheckpointOptimizerIdentity, ReportsInnerOptimizerOfMasterWeights) {
  const TempDir temp_dir;
  torch::nn::Sequential model = make_model(torch::kBFloat16);
  torch::optim::SGD sgd(model->parameters(), {0.1});
  torch::optim::RMSprop other(model->parameters(), {0.1});
  mezzo::MasterWeights masters(sgd), other_masters(other);
  const auto file =
      CheckpointManager(temp_dir.path()).save(TrainingState().add("optimizer", masters), 1).path;
  const auto error = [&](auto& optimizer) {
    return message_of(
        [&] { mezzo::load_checkpoint(file, TrainingState().add("optimizer", optimizer)); });
  };
  EXPECT_THAT(error(other_masters), HasSubstr("MasterWeights of SGD in the checkpoint, "
                                              "MasterWeights of RMSprop in the current state"));
  EXPECT_THAT(error(sgd),
              HasSubstr("MasterWeights of SGD in the checkpoint, SGD in the current state"));
  EXPECT_EQ(error(masters), "no error");
}

TEST(CheckpointOptimizerIdentity, ThrowsForOtherWeightStorage) {
  const auto error = [](WeightStorage saved, WeightStorage loaded, at::ScalarType dtype) {
    return load_error(make_factory(saved), make_factory(loaded), dtype);
  };
  EXPECT_THAT(
      error(WeightStorage::split_master, WeightStorage::stochastic_rounding, torch::kBFloat16),
      HasSubstr("weight storage mismatch: split_master in the checkpoint, stochastic_rounding in "
                "the current optimizer"));
  EXPECT_THAT(error(WeightStorage::fp32_master, WeightStorage::split_master, torch::kBFloat16),
              HasSubstr("fp32_master in the checkpoint"));
  EXPECT_EQ(error(WeightStorage::plain, WeightStorage::fp32_master, torch::kBFloat16), "no error");
  EXPECT_EQ(error(WeightStorage::fp32_master, WeightStorage::plain, torch::kFloat), "no error")
      << "float32 weights need no master";
}

TEST(CheckpointOptimizerIdentity, PlainWeightsLoadIntoAnyStorage) {
  const auto storage_after_load = [](WeightStorage storage) {
    const TempDir temp_dir;
    torch::nn::Sequential model = make_model(torch::kBFloat16),
                          other = make_model(torch::kBFloat16);
    auto saved = make_factory(WeightStorage::plain)(model->parameters());
    auto loaded = make_factory(storage)(other->parameters());
    const auto file =
        CheckpointManager(temp_dir.path()).save(TrainingState().add("optimizer", saved), 1).path;
    mezzo::load_checkpoint(file, TrainingState().add("optimizer", loaded));
    return loaded.weight_storage_options().weight_storage;
  };
  for (const auto storage : {WeightStorage::fp32_master, WeightStorage::split_master,
                             WeightStorage::stochastic_rounding}) {
    EXPECT_EQ(storage_after_load(storage), storage);
  }
}

TEST(CheckpointOptimizerIdentity, ThrowsForReorderedParameters) {
  const auto turned = [](std::vector<torch::Tensor> parameters) {
    std::rotate(parameters.begin(), parameters.begin() + 2, parameters.end());
    return torch::optim::AdamW(std::move(parameters), {1e-3});
  };
  EXPECT_THAT(load_error(make_factory<torch::optim::AdamW>(), turned),
              AllOf(HasSubstr("size mismatch for parameter 0 of group 0: [3, 3] model.0.weight in "
                              "the checkpoint, [3, 3] model.1.weight in the current optimizer"),
                    HasSubstr("the order")));
  const auto fewer = [](std::vector<torch::Tensor> parameters) {
    parameters.pop_back();
    return torch::optim::AdamW(std::move(parameters), {1e-3});
  };
  EXPECT_THAT(load_error(make_factory<torch::optim::AdamW>(), fewer),
              HasSubstr("group 0 has 4 parameters in the checkpoint, 3 in the current optimizer"));
  EXPECT_THAT(load_error(fewer, make_factory<torch::optim::AdamW>()),
              HasSubstr("group 0 has 3 parameters in the checkpoint, 4 in the current optimizer"));
}

TEST(CheckpointOptimizerIdentity, ComparesShapesWithoutNames) {
  const TempDir temp_dir;
  torch::nn::Linear model(3, 2);
  std::vector<torch::Tensor> parameters = model->parameters();
  torch::optim::AdamW saved(parameters);
  std::reverse(parameters.begin(), parameters.end());
  torch::optim::AdamW loaded(parameters);
  const auto file = CheckpointManager(temp_dir.path())
                        .save(TrainingState().add("model", model).add("optimizer", saved), 1)
                        .path;
  const auto error = [&](auto& optimizer) {
    return message_of([&] {
      mezzo::load_checkpoint(file, TrainingState().add("optimizer", optimizer),
                             {.ignore_unexpected = true});
    });
  };
  EXPECT_THAT(error(loaded),
              HasSubstr("size mismatch for parameter 0 of group 0: [2, 3] model.weight in "
                        "the checkpoint, [2] in the current optimizer"));
  EXPECT_EQ(error(saved), "no error");
}

TEST(CheckpointOptimizerIdentity, TiedParameterIgnoresModuleOrder) {
  const TempDir temp_dir;
  torch::nn::Sequential model = make_model(torch::kFloat);
  torch::nn::Module& layer = *model->ptr(0);
  torch::optim::AdamW optimizer(model->parameters());
  const auto file =
      CheckpointManager(temp_dir.path())
          .save(TrainingState().add("model", model).add("layer", layer).add("optimizer", optimizer),
                1)
          .path;
  TrainingState turned;
  turned.add("layer", layer).add("model", model).add("optimizer", optimizer);
  EXPECT_EQ(message_of([&] { mezzo::load_checkpoint(file, turned); }), "no error");
}

}  // namespace
