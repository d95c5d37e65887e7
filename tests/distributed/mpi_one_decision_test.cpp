#include <torch/torch.h>
//
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ranks.h"
#include "same_bits.h"

// An inf on one rank skips the step of all, and the scale of all backs off: what the gradients say
// after the reduction is the same everywhere. What a single process does that sees every inf is
// what all ranks do, to the bit, where their batches are the same and their number a power of two.
namespace {

using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::expect_same_bits_on_all_ranks;
using distributed_test::Ranks;
using distributed_test::ReduceOp;
using mezzo::DataParallel;
using mezzo::GradScaler;
using mezzo::LossScaleOptions;

/// Of `left` and `right` a forward uses one, or both.
struct DecidedImpl : torch::nn::Module {
  DecidedImpl() {
    torch::manual_seed(9);
    body = register_module("body", torch::nn::Linear(4, 6));
    left = register_module("left", torch::nn::Linear(6, 2));
    right = register_module("right", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_left, bool uses_right) {
    const at::Tensor y = torch::tanh(body->forward(x));
    if (!uses_left) return right->forward(y);
    return uses_right ? left->forward(y) + right->forward(y) : left->forward(y);
  }
  torch::nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(Decided);

using OptimizerFor = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<at::Tensor>& parameters)>;
using StepWith = std::function<mezzo::StepResult(GradScaler&, torch::optim::Optimizer&)>;

template <class Optimizer, class Options>
OptimizerFor made_of(Options options) {
  return [options](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

mezzo::StepResult clip_and_step(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  return scaler.step(optimizer, {.max_norm = 1.0});
}

/// One run: who makes an inf in which iteration, and with what is trained.
struct Run {
  int64_t iterations = 10;
  OptimizerFor optimizer = made_of<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2));
  StepWith step = clip_and_step;
  LossScaleOptions scaler{.init_scale = 1024, .growth_interval = 3};
  int64_t bucket_bytes = 128;
  bool ranks_differ = false;  ///< in their batches, and in what they use of the model
};

/// Every iteration but the third, sixth ... has an inf, or a NaN, on one rank, each in turn.
std::optional<int> rank_with_inf(int64_t iteration, int ranks) {
  if (iteration % 3 == 2) return std::nullopt;
  return static_cast<int>((iteration / 3 + iteration) % ranks);
}

at::Tensor loss_of(Decided& model, int64_t iteration, int rank, const Run& run) {
  const double seed = static_cast<double>(iteration + 1 + (run.ranks_differ ? 100 * rank : 0));
  const at::Tensor x = torch::sin(torch::arange(12.).view({3, 4}) * seed);
  const bool uses_left = !run.ranks_differ || rank % 2 == 0;
  const bool uses_right = !run.ranks_differ || rank % 2 == 1;
  return model->forward(x, uses_left, uses_right).square().sum();
}

at::Tensor spoiled(const at::Tensor& loss, int64_t iteration) {
  const double bad = iteration % 2 == 0 ? std::numeric_limits<double>::infinity()
                                        : std::numeric_limits<double>::quiet_NaN();
  return loss * bad;
}

/// What an iteration came to, in numbers that can be compared and sent.
std::vector<double> numbers_of(const mezzo::StepResult& result, const GradScaler& scaler) {
  std::vector<double> numbers = {result.ran() ? 1. : 0., result.found_inf() ? 1. : 0.};
  for (const auto& [key, value] : scaler.state_dict()) numbers.push_back(value);
  return numbers;
}

struct Course {
  std::vector<double> decisions;
  at::Tensor weights;
};

at::Tensor weights_of(Decided& model) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& weight : model->parameters()) all.push_back(weight.detach().view({-1}));
  return at::cat(all);
}

Course train_on_ranks(Ranks world, const Run& run) {
  Decided model;
  DataParallel ddp(model, world, {.bucket_bytes = run.bucket_bytes});
  const auto optimizer = run.optimizer(model->parameters());
  GradScaler scaler(run.scaler);
  scaler.on_skip(nullptr);
  Course course;
  for (int64_t i = 0; i < run.iterations; ++i) {
    ddp->zero_grad();
    at::Tensor loss = loss_of(model, i, world->getRank(), run);
    if (rank_with_inf(i, world->getSize()) == world->getRank()) loss = spoiled(loss, i);
    scaler.scale(loss).backward();
    const auto result = run.step(scaler, *optimizer);
    scaler.update();
    const auto numbers = numbers_of(result, scaler);
    course.decisions.insert(course.decisions.end(), numbers.begin(), numbers.end());
  }
  course.weights = weights_of(model);
  return course;
}

/// A single process whose every loss is the mean of the ranks'.
Course train_alone(int ranks, const Run& run) {
  Decided model;
  const auto optimizer = run.optimizer(model->parameters());
  GradScaler scaler(run.scaler);
  scaler.on_skip(nullptr);
  Course course;
  for (int64_t i = 0; i < run.iterations; ++i) {
    model->zero_grad();
    at::Tensor loss = loss_of(model, i, 0, run);
    if (run.ranks_differ) {
      for (int rank = 1; rank < ranks; ++rank) loss = loss + loss_of(model, i, rank, run);
      loss = loss / ranks;
    }
    if (rank_with_inf(i, ranks)) loss = spoiled(loss, i);
    scaler.scale(loss).backward();
    const auto result = run.step(scaler, *optimizer);
    scaler.update();
    const auto numbers = numbers_of(result, scaler);
    course.decisions.insert(course.decisions.end(), numbers.begin(), numbers.end());
  }
  course.weights = weights_of(model);
  return course;
}

void expect_decided_as_one(const Run& run, const Ranks& world = everyone()) {
  const Course course = train_on_ranks(world, run);
  expect_same_bits_on_all_ranks(world, torch::tensor(course.decisions, at::kDouble), "decisions");
  expect_same_bits_on_all_ranks(world, course.weights, "weights");
  const Course alone = train_alone(world->getSize(), run);
  EXPECT_EQ(course.decisions, alone.decisions);
  // Gloo divides before it adds: the smallest gradients lose their last bits.
  const bool is_exact = !distributed_test::is_over_gloo() && !run.ranks_differ &&
                        (world->getSize() & (world->getSize() - 1)) == 0;
  const double tolerance = is_exact ? 0 : 1e-4;
  EXPECT_TRUE(at::allclose(course.weights, alone.weights, tolerance, tolerance));
  EXPECT_TRUE(course.weights.isfinite().all().item<bool>());
}

std::vector<OptimizerFor> optimizers() {
  return {made_of<mezzo::optim::AdamW>(mezzo::optim::AdamWOptions(1e-2).eps(1e-3)),
          made_of<mezzo::optim::SGD>(mezzo::optim::SGDOptions(1e-2).momentum(0.9)),
          made_of<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-2).eps(1e-3)),
          made_of<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9)),
          made_of<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).eps(1e-3))};
}

TEST(MpiOneDecision, AnInfOnOneRankSkipsTheStepOfAll) {
  for (const OptimizerFor& optimizer : optimizers()) {
    expect_decided_as_one({.optimizer = optimizer});
    expect_decided_as_one({.optimizer = optimizer, .ranks_differ = true});
  }
}

// Where there are more ranks than a small machine has cores, every collective waits for the
// system's scheduler: 200 iterations then.
TEST(MpiOneDecision, HoldsForAThousandIterations) {
  const int ranks = everyone()->getSize();
  expect_decided_as_one(
      {.iterations = ranks > 2 ? 200 : 1000, .bucket_bytes = mezzo::kDefaultBucketBytes},
      everyone());
}

TEST(MpiOneDecision, HoldsForStepsInAllForms) {
  const std::vector<StepWith> forms = {[](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
                                         scaler.unscale_(optimizer);
                                         return scaler.step(optimizer);
                                       },
                                       [](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
                                         return scaler.step(optimizer,
                                                            mezzo::StepOptions{.zero_grad = true});
                                       },
                                       [](GradScaler& scaler, torch::optim::Optimizer& optimizer) {
                                         return scaler.step(optimizer);
                                       }};
  for (const StepWith& step : forms) {
    for (const OptimizerFor& optimizer : optimizers()) {
      expect_decided_as_one(
          {.optimizer = optimizer, .step = step, .bucket_bytes = mezzo::kDefaultBucketBytes});
    }
  }
}

TEST(MpiOneDecision, CountsHysteresisAlikeOnAllRanks) {
  const auto options =
      LossScaleOptions{.init_scale = 1024, .growth_interval = 3, .min_scale = 64, .hysteresis = 3};
  expect_decided_as_one({.iterations = 20, .scaler = options});
  expect_decided_as_one({.iterations = 20, .scaler = options, .ranks_differ = true});
}

// A rank's gradient is finite in half, and the scaled average of all is not where one is inf.
TEST(MpiOneDecision, AnAverageOfHalfOverflowsNowhereButWhereItIsTooLarge) {
  const Ranks world = everyone();
  const auto model = std::make_shared<torch::nn::Module>();
  const at::Tensor weight = model->register_parameter("weight", torch::zeros({8}, at::kHalf));
  DataParallel ddp(model, world);
  mezzo::optim::SGD optimizer(ddp->parameters(), mezzo::optim::SGDOptions(1e-5));
  GradScaler scaler({.init_scale = 1, .allow_fp16_gradients = true});
  (scaler.scale(weight.to(at::kFloat)) * 40000.).sum().backward();
  EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1e9}).ran()) << "a sum would be 80,000";
  EXPECT_TRUE(at::equal(weight, torch::full({8}, -0.4, at::kHalf)));
}

}  // namespace
