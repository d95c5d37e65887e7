/// \file
/// One model, its batches, and one way to train it: by ranks that share each batch, and by one
/// process that has all of it, which is what they are compared with.
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

/// So that the model below takes several.
inline constexpr mezzo::GradReducerOptions kSmallBuckets{.bucket_cap_bytes = 1024};

/// Sizes that no number of ranks divides, a weight in another memory format, two branches, a
/// parameter that only some ranks use, one that nobody does, a frozen one, one without elements.
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

  /// Rank 0 alone uses `sometimes`; odd ranks make the branches' gradients in the other order.
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
  Batch part(int64_t number, int64_t of) const {
    return {x.chunk(of)[static_cast<std::size_t>(number)],
            y.chunk(of)[static_cast<std::size_t>(number)]};
  }
};

/// Of rows for 1, 2, 3 and 4 ranks, with two micro-batches each.
inline std::vector<Batch> batches(int64_t count) {
  torch::manual_seed(11);
  std::vector<Batch> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back({torch::randn({24, 3, 5, 5}), torch::randn({24, 3})});
  }
  return all;
}

inline at::Tensor loss_of(Model model, const Batch& batch, int64_t rank) {
  return torch::mse_loss(model->forward(batch.x, rank).to(at::kFloat), batch.y);
}

/// The mean of the losses that ranks with a part of the batch each have.
inline at::Tensor loss_of_ranks(Model model, const Batch& batch, int64_t ranks) {
  at::Tensor loss = torch::zeros({});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    loss = loss + loss_of(model, batch.part(rank, ranks), rank);
  }
  return loss / ranks;
}

// --- A course of training ---

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

template <class Optimizer, class... Options>
MakeOptimizer make_optimizer_factory(Options... options) {
  return [options...](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options...);
  };
}

using StepFn = std::function<mezzo::StepResult(mezzo::GradScaler&, torch::optim::Optimizer&)>;

/// What ranks and one process do alike.
struct Course {
  MakeOptimizer optimizer;
  int64_t steps = 6;
  int64_t micro_batches = 1;
  mezzo::GradScalerOptions scaler{.init_scale = 1024, .growth_interval = 3};
  StepFn step = [](auto& scaling, auto& stepped) {
    return scaling.step(stepped, {.max_norm = 0.5});
  };
  /// A factor of a rank's loss in a step; none: 1.
  std::function<double(int64_t step, int64_t rank, int64_t ranks)> factor{};
  /// All ranks have the whole batch, and are rank 0: averages of 1, 2 and 4 of them are exact.
  bool are_alike = false;
};

struct Outcome {
  Model model;
  std::vector<double> norms{};
  std::vector<double> decisions{};  ///< whether steps ran, and the scaler's state after them
};

/// `loss(batch, step)` is what one process differentiates, `no_sync` the guard of micro-batches
/// before the last.
template <class Loss, class NoSync>
void train(Outcome& outcome, const Course& of, torch::optim::Optimizer& optimizer, const Loss& loss,
           const NoSync& no_sync) {
  mezzo::GradScaler scaler(of.scaler);
  scaler.on_skip(nullptr);
  const auto all = batches(of.steps);
  for (int64_t step = 0; step < of.steps; ++step) {
    outcome.model->zero_grad();
    for (int64_t i = 0; i < of.micro_batches; ++i) {
      std::optional<decltype(no_sync())> guard;
      if (i + 1 < of.micro_batches) guard.emplace(no_sync());
      const Batch micro = all[static_cast<std::size_t>(step)].part(i, of.micro_batches);
      scaler.scale(loss(micro, step) / of.micro_batches).backward();
    }
    const auto result = of.step(scaler, optimizer);
    scaler.update();
    outcome.norms.push_back(result.grad_norm().value_or(-1));
    outcome.decisions.push_back(result.applied() ? 1. : 0.);
    for (const auto& [key, value] : scaler.state_dict()) outcome.decisions.push_back(value);
  }
}

/// The loss of rank `rank` of `ranks`.
inline auto loss_of_rank(Model model, const Course& of, int64_t rank, int64_t ranks) {
  return [=](const Batch& batch, int64_t step) {
    const at::Tensor loss =
        of.are_alike ? loss_of(model, batch, 0) : loss_of(model, batch.part(rank, ranks), rank);
    return of.factor ? loss * of.factor(step, rank, ranks) : loss;
  };
}

/// One process with the whole batches, where `ranks` ranks would have a part each.
inline Outcome train_alone(const Course& of, int64_t ranks) {
  Outcome outcome{Model()};
  const auto optimizer = of.optimizer(outcome.model->parameters());
  const auto loss = [&](const Batch& batch, int64_t step) {
    if (of.are_alike) {  // one stands for all, with the factors of all
      at::Tensor one = loss_of(outcome.model, batch, 0);
      for (int64_t rank = 0; of.factor && rank < ranks; ++rank) one *= of.factor(step, rank, ranks);
      return one;
    }
    at::Tensor sum = torch::zeros({});
    for (int64_t rank = 0; rank < ranks; ++rank) {
      sum = sum + loss_of_rank(outcome.model, of, rank, ranks)(batch, step);
    }
    return sum / ranks;
  };
  train(outcome, of, *optimizer, loss, [] { return 0; });
  return outcome;
}

/// The ranks of `group` under a DistributedDataParallel; all end with the same bits.
inline Outcome train_together(const Course& of, const BackendPtr& group) {
  Outcome outcome{Model()};
  mezzo::DistributedDataParallel ddp(outcome.model, group,
                                     {.bucket_cap_bytes = kSmallBuckets.bucket_cap_bytes});
  const auto optimizer = of.optimizer(outcome.model->parameters());
  train(outcome, of, *optimizer,
        loss_of_rank(outcome.model, of, group->getRank(), group->getSize()),
        [&] { return ddp.no_sync(); });
  distributed_test::expect_same_weights_on_all_ranks(group, outcome.model);
  return outcome;
}

// --- Comparisons ---

/// `what` says where, should they differ.
inline void expect_equal(Model model, Model other, const std::string& what) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::equal(item.value(), wanted))
        << what << ": " << item.key() << (item.value() - wanted).abs().max();
  }
}

inline void expect_close(Model model, Model other, double tolerance) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::allclose(item.value(), wanted, tolerance, tolerance))
        << item.key() << (item.value() - wanted).abs().max();
  }
}

inline void expect_close(const Outcome& outcome, const Outcome& wanted, double tolerance) {
  expect_close(outcome.model, wanted.model, tolerance);
  ASSERT_EQ(outcome.norms.size(), wanted.norms.size());
  for (std::size_t i = 0; i < wanted.norms.size(); ++i) {
    EXPECT_NEAR(outcome.norms[i], wanted.norms[i], tolerance * wanted.norms[i]);
  }
}

}  // namespace single_process_reference
