// N ranks that share a batch train as one process does with all of it: 200 steps of every optimizer
// at every level of precision, with micro-batches or without, state sharded or not.
#include <torch/torch.h>
//
#include <mezzo/autocast/autocast.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ranks.h"
#include "same_bits.h"

namespace {

using distributed_test::everyone;
using distributed_test::expect_same_bits_on_all_ranks;
using distributed_test::Ranks;
using mezzo::DataParallel;
using mezzo::ShardedOptimizer;
using mezzo::StepOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

/// What mezzo::initialize would make of a model of float at O0 to O3.
enum class Level { O0, O1, O2, O3 };

struct Case {
  std::string optimizer;
  Level level;
  int64_t micro_batches;
  bool is_sharded;
};

std::ostream& operator<<(std::ostream& stream, const Case& of) {
  return stream << of.optimizer << " O" << static_cast<int>(of.level) << " x" << of.micro_batches
                << (of.is_sharded ? " sharded" : "");
}

constexpr int kSteps = 200;

at::ScalarType weights_of(Level level) {
  return level == Level::O2 || level == Level::O3 ? at::kBFloat16 : at::kFloat;
}

Sequential make_model(Level level) {
  torch::manual_seed(5);
  Sequential model(Linear(8, 24), torch::nn::Tanh(), Linear(24, 24), torch::nn::Tanh(),
                   Linear(24, 4));
  model->to(weights_of(level));
  return model;
}

/// Batches of 16 rows for a function that can be learnt, with a large one now and then, so that
/// norms are clipped to what all ranks' gradients have together.
struct Samples {
  at::Tensor x, y;
  Samples chunk(int64_t number, int64_t of) const {
    return {x.chunk(of)[static_cast<std::size_t>(number)],
            y.chunk(of)[static_cast<std::size_t>(number)]};
  }
};

std::vector<Samples> make_batches() {
  torch::manual_seed(17);
  std::vector<Samples> all;
  const at::Tensor mix = torch::randn({8, 4});
  for (int i = 0; i < kSteps; ++i) {
    const at::Tensor x = torch::randn({16, 8});
    all.push_back({x, x.mm(mix).tanh() * (i % 10 == 0 ? 20. : 1.)});
  }
  return all;
}

at::Tensor loss_of(Sequential model, const Samples& batch, Level level) {
  std::optional<mezzo::Autocast<torch::kCPU>> autocast;
  if (level == Level::O1) autocast.emplace();
  const at::Tensor y = model->forward(batch.x.to(weights_of(level)));
  return torch::mse_loss(y.to(at::kFloat), batch.y);
}

/// `rank` of `ranks` trains on its rows of each micro-batch; `no_sync` makes the guard that the
/// micro-batches before the last run under.
template <class Optimizer, class NoSync>
void train(Sequential model, Optimizer& optimizer, const Case& of, int rank, int ranks,
           const NoSync& no_sync) {
  mezzo::GradScaler scaler({.init_scale = 1024, .growth_interval = 60});
  for (const Samples& batch : make_batches()) {
    model->zero_grad();
    for (int64_t i = 0; i < of.micro_batches; ++i) {
      using Guard = decltype(no_sync());
      std::unique_ptr<Guard> guard;
      if (i + 1 < of.micro_batches) guard.reset(new Guard(no_sync()));
      const Samples part = batch.chunk(i, of.micro_batches).chunk(rank, ranks);
      const double share = 1. / static_cast<double>(of.micro_batches);
      scaler.scale(loss_of(model, part, of.level) * share).backward();
    }
    scaler.step(optimizer, StepOptions{.max_norm = 1.0});
    scaler.update();
  }
}

struct Nothing {};
constexpr auto kNoGuard = [] { return Nothing(); };

/// The weights in float, one after another.
at::Tensor weights_after(Sequential model) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : model->parameters()) {
    all.push_back(parameter.detach().to(at::kFloat).flatten());
  }
  return at::cat(all);
}

template <class Optimizer>
void keep_masters_at_o2(const Case& of, Optimizer& optimizer) {
  if constexpr (requires { optimizer.enable_master_weights(); }) {
    if (of.level == Level::O2) optimizer.enable_master_weights();
  }
}

template <class Optimizer, class Options>
at::Tensor train_alone(const Case& of, const Options& options) {
  const Sequential model = make_model(of.level);
  Optimizer optimizer(model->parameters(), options);
  keep_masters_at_o2(of, optimizer);
  train(model, optimizer, of, 0, 1, kNoGuard);
  return weights_after(model);
}

template <class Optimizer, class Options>
at::Tensor train_together(const Ranks& world, const Case& of, const Options& options) {
  const Sequential model = make_model(of.level);
  if constexpr (!std::is_same_v<Optimizer, mezzo::optim::LAMB>) {
    if (of.is_sharded) {
      ShardedOptimizer<Optimizer> optimizer(model->parameters(), world, options,
                                            {.bucket_bytes = 2048});
      keep_masters_at_o2(of, optimizer);
      train(model, optimizer, of, world->getRank(), world->getSize(),
            [&] { return optimizer.no_sync(); });
      return weights_after(model);
    }
  }
  DataParallel ddp(model, world, mezzo::DataParallelOptions{.bucket_bytes = 2048});
  Optimizer optimizer(model->parameters(), options);
  keep_masters_at_o2(of, optimizer);
  train(model, optimizer, of, world->getRank(), world->getSize(), [&] { return ddp.no_sync(); });
  return weights_after(model);
}

/// How far apart sums in another order may bring weights, of the way that they went. A last bit of
/// bfloat16 is 2^-8: of gradients at O1 and O2, of weights at O3.
double tolerance(Level level) {
  switch (level) {
    case Level::O0:
      return 2e-6;
    case Level::O1:
    case Level::O2:
      return 0.015;
    case Level::O3:
      break;
  }
  return 0.05;
}

template <class Optimizer, class Options>
void expect_same_numbers(const Case& of, const Options& options) {
  const Ranks world = everyone();
  const at::Tensor wanted = train_alone<Optimizer>(of, options);
  const at::Tensor weights = train_together<Optimizer>(world, of, options);

  const double moved = (wanted - weights_after(make_model(of.level))).norm().item<double>();
  const double apart = (weights - wanted).norm().item<double>() / moved;
  EXPECT_LE(apart, tolerance(of.level)) << of << " of the way that they went";
  expect_same_bits_on_all_ranks(world, weights, of.optimizer);
}

struct SameNumbers : testing::TestWithParam<std::tuple<const char*, Level, int64_t, bool>> {};

TEST_P(SameNumbers, AsOneProcessWithTheWholeBatch) {
  const auto& [optimizer, level, micro_batches, is_sharded] = GetParam();
  const Case of{optimizer, level, micro_batches, is_sharded};
  // No ShardedOptimizer takes LAMB, which keeps no masters itself.
  if (of.optimizer == "LAMB" && (is_sharded || level == Level::O2)) return;
  using namespace mezzo::optim;
  if (of.optimizer == "AdamW") expect_same_numbers<AdamW>(of, AdamWOptions(3e-3));
  if (of.optimizer == "Adam") expect_same_numbers<Adam>(of, AdamOptions(3e-3));
  if (of.optimizer == "SGD") expect_same_numbers<SGD>(of, SGDOptions(0.05).momentum(0.9));
  if (of.optimizer == "Lion") expect_same_numbers<Lion>(of, LionOptions(3e-4));
  if (of.optimizer == "LAMB") expect_same_numbers<LAMB>(of, LAMBOptions(3e-3));
}

using testing::Bool;
using testing::Combine;
using testing::Values;

INSTANTIATE_TEST_SUITE_P(Some, SameNumbers,
                         Combine(Values("AdamW"), Values(Level::O2), Values(2), Bool()));
INSTANTIATE_TEST_SUITE_P(Every, SameNumbers,  // some 30 s: of the label `full`
                         Combine(Values("AdamW", "Adam", "SGD", "Lion", "LAMB"),
                                 Values(Level::O0, Level::O1, Level::O2, Level::O3), Values(1, 2),
                                 Bool()));

}  // namespace
