/// \file
/// Trains a model on several ranks with a shard of each batch, and as reference in a single process
/// with the whole batch.
#pragma once

#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/distributed/grad_reducer.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/nn.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rank_equality.h"
#include "test_backends.h"

namespace single_process_reference {

using distributed_test::BackendPtr;

/// Small, so that the model has several buckets.
inline constexpr mezzo::GradReducerOptions kSmallBuckets{.bucket_cap_bytes = 1024};

/// Has sizes that no world size divides, a channels_last weight, two branches, a parameter that
/// only rank 0 uses, an unused, a frozen and an empty one.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(3);
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    left = register_module("left", torch::nn::Linear(45, 17));
    right = register_module("right", torch::nn::Linear(45, 17));
    out = register_module("out", torch::nn::Linear(17, 3));
    sometimes = register_parameter("sometimes", torch::randn({3}));
    never = register_parameter("never", torch::randn({7}));
    empty = register_parameter("empty", torch::randn({0, 4}));
    frozen = register_parameter("frozen", torch::randn({3}), /*requires_grad=*/false);
    to(dtype);
  }

  /// Only rank 0 uses `sometimes`; odd ranks compute the branches in reverse order.
  at::Tensor forward(const at::Tensor& x, int64_t rank) {
    const at::Tensor of_image = torch::tanh(conv->forward(x.to(frozen.scalar_type())).flatten(1));
    const at::Tensor first = (rank % 2 == 0 ? left : right)->forward(of_image);
    const at::Tensor second = (rank % 2 == 0 ? right : left)->forward(of_image);
    const at::Tensor y = out->forward(torch::tanh(first + second)) + frozen + empty.sum();
    return rank == 0 ? y * sometimes : y;
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear left{nullptr}, right{nullptr}, out{nullptr};
  at::Tensor sometimes, never, empty, frozen;
};
TORCH_MODULE(Model);

struct Batch {
  at::Tensor x, y;
  Batch part(int64_t index, int64_t num_parts) const {
    return {x.chunk(num_parts)[static_cast<std::size_t>(index)],
            y.chunk(num_parts)[static_cast<std::size_t>(index)]};
  }
};

/// Batches that divide into two micro-batches for 1, 2, 3 and 4 ranks.
inline std::vector<Batch> batches(int64_t count) {
  torch::manual_seed(11);
  std::vector<Batch> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back({torch::randn({24, 3, 5, 5}), torch::randn({24, 3})});
  }
  return all;
}

inline at::Tensor compute_loss(Model model, const Batch& batch, int64_t rank) {
  return torch::mse_loss(model->forward(batch.x, rank).to(at::kFloat), batch.y);
}

/// Mean loss over `ranks` shards of the batch.
inline at::Tensor mean_loss_of_ranks(Model model, const Batch& batch, int64_t ranks) {
  at::Tensor loss = torch::zeros({});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    loss = loss + compute_loss(model, batch.part(rank, ranks), rank);
  }
  return loss / ranks;
}

// --- Training ---

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

template <class Optimizer, class... Options>
MakeOptimizer make_optimizer_factory(Options... options) {
  return [options...](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options...);
  };
}

using StepFn = std::function<mezzo::StepResult(mezzo::GradScaler&, torch::optim::Optimizer&)>;

/// Configuration of a run.
struct TrainingConfig {
  MakeOptimizer optimizer;
  int64_t steps = 6;
  int64_t micro_batches = 1;
  mezzo::GradScalerOptions scaler{.init_scale = 1024, .growth_interval = 3};
  StepFn step = [](auto& scaling, auto& stepped) {
    return scaling.step(stepped, {.max_norm = 0.5});
  };
  /// Factor of the loss, by step and rank; null for 1.
  std::function<double(int64_t step, int64_t rank, int64_t ranks)> factor{};
  /// All ranks compute rank 0's loss of the whole batch: averages over 1, 2 and 4 ranks are exact.
  bool all_ranks_identical = false;
};

struct TrainingResult {
  Model model;
  std::vector<double> norms{};
  std::vector<double> decisions{};  ///< applied() of each step, and the state of the scaler
};

/// `no_sync` returns the guard of micro-batches except the last.
template <class Loss, class NoSync>
void train(TrainingResult& result, const TrainingConfig& config, torch::optim::Optimizer& optimizer,
           const Loss& loss, const NoSync& no_sync) {
  mezzo::GradScaler scaler(config.scaler);
  scaler.on_skip(nullptr);
  const auto all = batches(config.steps);
  for (int64_t step = 0; step < config.steps; ++step) {
    result.model->zero_grad();
    for (int64_t i = 0; i < config.micro_batches; ++i) {
      std::optional<decltype(no_sync())> guard;
      if (i + 1 < config.micro_batches) guard.emplace(no_sync());
      const Batch micro = all[static_cast<std::size_t>(step)].part(i, config.micro_batches);
      scaler.scale(loss(micro, step) / config.micro_batches).backward();
    }
    const auto step_result = config.step(scaler, optimizer);
    scaler.update();
    result.norms.push_back(step_result.grad_norm().value_or(-1));
    result.decisions.push_back(step_result.applied() ? 1. : 0.);
    for (const auto& [key, value] : scaler.state_dict()) result.decisions.push_back(value);
  }
}

/// Returns the loss function of rank `rank` of `ranks`.
inline auto make_rank_loss(Model model, const TrainingConfig& config, int64_t rank, int64_t ranks) {
  return [=](const Batch& batch, int64_t step) {
    const at::Tensor loss = config.all_ranks_identical
                                ? compute_loss(model, batch, 0)
                                : compute_loss(model, batch.part(rank, ranks), rank);
    return config.factor ? loss * config.factor(step, rank, ranks) : loss;
  };
}

/// Trains in a single process on the whole batches of `ranks` ranks.
inline TrainingResult train_single_process(const TrainingConfig& config, int64_t ranks) {
  TrainingResult result{Model()};
  const auto optimizer = config.optimizer(result.model->parameters());
  const auto loss = [&](const Batch& batch, int64_t step) {
    if (config.all_ranks_identical) {  // the loss of one rank, with the factors of all ranks
      at::Tensor one = compute_loss(result.model, batch, 0);
      for (int64_t rank = 0; config.factor && rank < ranks; ++rank)
        one *= config.factor(step, rank, ranks);
      return one;
    }
    at::Tensor sum = torch::zeros({});
    for (int64_t rank = 0; rank < ranks; ++rank) {
      sum = sum + make_rank_loss(result.model, config, rank, ranks)(batch, step);
    }
    return sum / ranks;
  };
  train(result, config, *optimizer, loss, [] { return 0; });
  return result;
}

/// Trains the ranks of `group` with DistributedDataParallel, and expects equal weights on all.
inline TrainingResult train_on_ranks(const TrainingConfig& config, const BackendPtr& backend) {
  TrainingResult result{Model()};
  mezzo::DistributedDataParallel ddp(result.model, backend,
                                     {.bucket_cap_bytes = kSmallBuckets.bucket_cap_bytes});
  const auto optimizer = config.optimizer(result.model->parameters());
  train(result, config, *optimizer,
        make_rank_loss(result.model, config, backend->getRank(), backend->getSize()),
        [&] { return ddp.no_sync(); });
  distributed_test::expect_equal_weights_on_all_ranks(backend, result.model);
  return result;
}

// --- Comparisons ---

/// `what` is printed on failure.
inline void expect_equal(Model model, Model other, const std::string& what) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor expected = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::equal(item.value(), expected))
        << what << ": " << item.key() << (item.value() - expected).abs().max();
  }
}

inline void expect_close(Model model, Model other, double tolerance) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor expected = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::allclose(item.value(), expected, tolerance, tolerance))
        << item.key() << (item.value() - expected).abs().max();
  }
}

inline void expect_close(const TrainingResult& result, const TrainingResult& expected,
                         double tolerance) {
  expect_close(result.model, expected.model, tolerance);
  ASSERT_EQ(result.norms.size(), expected.norms.size());
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    EXPECT_NEAR(result.norms[i], expected.norms[i], tolerance * expected.norms[i]);
  }
}

}  // namespace single_process_reference
