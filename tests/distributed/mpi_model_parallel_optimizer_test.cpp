#include <torch/torch.h>
//
#include <mezzo/distributed/model_parallel_optimizer.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/loss_scale_optimizer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/owned_optimizer.h"
#include "recording_backend.h"
#include "test_backends.h"

// Each rank holds some parameters of a model, and gradients as tensor or pipeline parallelism leave
// them. One process with all parameters is the reference.
namespace model_parallel_optimizer_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using mezzo::GradScaler;
using mezzo::ModelParallelOptimizer;
using mezzo::OptimizerRef;
using mezzo::StepResult;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using test_support::message_of;
using test_support::OwnedOptimizer;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

using MakeOptimizer = std::function<OwnedOptimizer(const std::vector<at::Tensor>&)>;
using Step = std::function<StepResult(GradScaler&, OptimizerRef)>;

/// Parameters of all ranks, four a rank. The first of each rank is replicated on all; the last is
/// not used by rank 1, nor is any by the last of four ranks.
class Parts {
 public:
  Parts(int ranks, const MakeOptimizer& make, at::ScalarType dtype, std::optional<int> rank)
      : ranks_(ranks), rank_(rank) {
    torch::manual_seed(1);
    const at::Tensor norm = torch::randn({7});
    for (int part = 0; part < ranks; ++part) {
      for (int64_t i = 0; i < 4; ++i) {
        const at::Tensor value = i == 0 ? norm.clone() : torch::randn({5 + i, 900});
        if (rank && *rank != part) continue;
        if (!rank && i == 0 && part > 0) continue;  // one process holds one of them
        parameters_.push_back(value.to(dtype).set_requires_grad(true));
        places_.emplace_back(part, i);
      }
    }
    optimizer_ = std::make_unique<OwnedOptimizer>(make(parameters_));
  }

  /// Sets scaled gradients. One element of one rank is `bad`.
  void backward(GradScaler& scaler, int64_t step, double bad) {
    const at::Tensor scale = scaler.scale(torch::ones({}));
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto [part, number] = places_[i];
      const bool is_replicated = number == 0;
      torch::manual_seed(
          static_cast<uint64_t>(100 * step + 10 * (is_replicated ? 0 : part) + number));
      at::Tensor gradient = torch::randn(parameters_[i].sizes());
      if (part == step % ranks_ && number == 1 && !is_unused(part, number)) gradient[0][3] *= bad;
      parameters_[i].mutable_grad() = is_unused(part, number)
                                          ? at::Tensor()
                                          : (gradient * scale).to(parameters_[i].scalar_type());
    }
  }
  /// Expects the weights of this rank to be close to those of one process.
  void expect_near(const Parts& whole, double tolerance) const {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      for (std::size_t k = 0; k < whole.parameters_.size(); ++k) {
        const bool is_same = places_[i] == whole.places_[k] ||
                             (places_[i].second == 0 && whole.places_[k].second == 0);
        if (!is_same) continue;
        EXPECT_TRUE(at::allclose(parameters_[i], whole.parameters_[k], tolerance, tolerance)) << i;
      }
    }
  }
  OptimizerRef ref() const { return optimizer_->ref(); }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  mezzo::TensorsByName replicated() const { return {{"norm", parameters_[0]}}; }

 private:
  bool is_unused(int part, int64_t number) const {
    return (part == 1 && number == 3) || (part == 3 && number > 0);
  }

  int ranks_;
  std::optional<int> rank_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::pair<int, int64_t>> places_;
  std::unique_ptr<OwnedOptimizer> optimizer_;
};

template <class Optimizer, class Options, class... More>
MakeOptimizer make_factory(const Options& options, bool with_masters, More... more) {
  return [=](const std::vector<at::Tensor>& parameters) {
    return OwnedOptimizer(std::make_unique<Optimizer>(parameters, options, more...), with_masters);
  };
}

struct Case {
  const char* name;
  MakeOptimizer make;
  at::ScalarType dtype = at::kFloat;
  double tolerance = 1e-6;
};

std::vector<Case> cases() {
  using mezzo::optim::WeightStorage;
  using mezzo::optim::WeightStorageOptions;
  const auto adamw = AdamWOptions(1e-2).eps(1e-3);
  const auto sgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
  return {{"AdamW", make_factory<AdamW>(adamw, false)},
          {"AdamW split_master",
           make_factory<AdamW>(adamw, false, WeightStorageOptions{WeightStorage::split_master}),
           at::kBFloat16, 1e-2},
          {"torch::optim::AdamW", make_factory<torch::optim::AdamW>(adamw, false)},
          {"torch::optim::SGD", make_factory<torch::optim::SGD>(sgd, false)},
          {"AdamW8bit",
           make_factory<mezzo::optim::AdamW8bit>(torch::optim::AdamWOptions(1e-2).eps(1e-3), false),
           at::kFloat, 1e-3},
          {"MasterWeights", make_factory<torch::optim::SGD>(sgd, true), at::kBFloat16, 1e-2}};
}

TEST(MpiModelParallelOptimizer, MatchesSingleProcess) {
  const BackendPtr world = make_world_backend();
  const Step plain = [](GradScaler& scaler, OptimizerRef optimizer) {
    return scaler.step(optimizer, {.max_norm = 2.0});
  };
  const Step unscaled = [](GradScaler& scaler, OptimizerRef optimizer) {
    scaler.unscale_(optimizer);
    for (const auto& group : optimizer.optimizer().param_groups()) {
      for (const at::Tensor& parameter : group.params()) {  // as a user who removes an inf
        if (parameter.grad().defined()) parameter.mutable_grad().nan_to_num_(0., 0., 0.).mul_(0.5);
      }
    }
    return scaler.step(optimizer, {.max_norm = 2.0});
  };
  const Step without_clipping = [](GradScaler& scaler, OptimizerRef optimizer) {
    return scaler.step(optimizer, {.zero_grad = true});
  };
  for (const Case& c : cases()) {
    for (const Step& step : {plain, unscaled, without_clipping}) {
      SCOPED_TRACE(c.name);
      Parts part(world->getSize(), c.make, c.dtype, world->getRank());
      Parts whole(world->getSize(), c.make, c.dtype, std::nullopt);
      ModelParallelOptimizer optimizer(part.ref(), world, {.replicated = part.replicated()});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2}), reference(scaler.options());
      scaler.on_skip(nullptr);
      reference.on_skip(nullptr);
      mezzo::LinearSchedule schedule(part.ref(), {.total_steps = 20}),
          expected_schedule(whole.ref(), {.total_steps = 20});
      for (int64_t i = 0; i < 7; ++i) {
        const double bad = i % 3 == 1 ? (i % 2 == 0 ? kInf : std::nan("")) : 1.0;
        part.backward(scaler, i, bad);
        whole.backward(reference, i, bad);
        const StepResult result = step(scaler, optimizer), expected = step(reference, whole.ref());
        EXPECT_EQ(result.applied(), expected.applied());
        EXPECT_EQ(result.found_inf(), expected.found_inf());
        if (expected.grad_norm() && expected.applied()) {
          EXPECT_NEAR(*result.grad_norm(), *expected.grad_norm(), 1e-6 * *expected.grad_norm());
          EXPECT_EQ(*result.grad_max_abs(), *expected.grad_max_abs());
        }
        scaler.update();
        reference.update();
        schedule.step(result);
        expected_schedule.step(expected);
        EXPECT_EQ(scaler.state_dict(), reference.state_dict());
        EXPECT_EQ(schedule.lrs(), expected_schedule.lrs());
      }
      part.expect_near(whole, c.tolerance);
    }
  }
}

/// Calls `call` on all ranks, and expects its message on each.
template <class Call>
void expect_error(const Call& call, const std::string& text) {
  EXPECT_THAT(message_of(call), HasSubstr(text));
}

TEST(MpiModelParallelOptimizer, ThrowsOnAllRanksIfScalesDiffer) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) GTEST_SKIP() << "one rank";
  for (const bool unscales : {false, true}) {
    Parts part(world->getSize(), cases()[0].make, at::kFloat, world->getRank());
    const at::Tensor before = part.parameters()[1].detach().clone();
    ModelParallelOptimizer optimizer(part.ref(), world);
    GradScaler scaler({.init_scale = world->getRank() == 1 ? 512. : 1024.});
    part.backward(scaler, 0, 1.0);
    const at::Tensor gradient = part.parameters()[0].grad().clone();
    expect_error(
        [&] { unscales ? void(scaler.unscale_(optimizer)) : void(scaler.step(optimizer)); },
        "ModelParallelOptimizer: rank 1 has the loss scale 512 where rank 0 has 1024");
    EXPECT_TRUE(at::equal(part.parameters()[1], before));
    EXPECT_TRUE(at::equal(part.parameters()[0].grad(), gradient));
  }
}

TEST(MpiModelParallelOptimizer, ChecksReplicatedParametersOnAllRanks) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) GTEST_SKIP() << "one rank";
  const bool is_last = world->getRank() == world->getSize() - 1;
  Parts part(world->getSize(), cases()[0].make, at::kFloat, world->getRank());
  const auto construct = [&](const mezzo::TensorsByName& replicated) {
    return [&part, &world, replicated] {
      ModelParallelOptimizer optimizer(part.ref(), world, {.replicated = replicated});
    };
  };
  const std::string last = "rank " + std::to_string(world->getSize() - 1);
  expect_error(construct(is_last ? part.replicated() : mezzo::TensorsByName()), last);
  expect_error(construct({{"norm", part.parameters()[is_last ? 1 : 0]}}),
               "`replicated` has norm, which is not on another rank");
  expect_error(construct({{"norm", is_last ? torch::ones({7}) : part.parameters()[0]}}),
               "not a parameter of the optimizer");
  expect_error([&] { ModelParallelOptimizer optimizer(part.ref(), nullptr); }, "`backend` is null");
}

TEST(MpiModelParallelOptimizer, GathersOnceInEachStep) {
  std::vector<std::string> calls;
  const BackendPtr world = distributed_test::make_recording_backend(make_world_backend(), calls);
  for (const Case& c : cases()) {
    Parts part(world->getSize(), c.make, c.dtype, world->getRank());
    ModelParallelOptimizer optimizer(part.ref(), world);
    GradScaler scaler;
    part.backward(scaler, 0, 1.0);
    calls.clear();
    (void)scaler.step(optimizer, {.max_norm = 1.0});
    EXPECT_THAT(calls, testing::SizeIs(world->getSize() > 1 ? 1 : 0)) << c.name;
  }
}

TEST(MpiModelParallelOptimizer, StepsWithLossScaleOptimizerAndDisabledScaler) {
  const BackendPtr world = make_world_backend();
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Parts part(world->getSize(), c.make, c.dtype, world->getRank()),
        whole(world->getSize(), c.make, c.dtype, std::nullopt);
    ModelParallelOptimizer optimizer(part.ref(), world, {.replicated = part.replicated()});
    mezzo::LossScaleOptimizer keras(optimizer, {.init_scale = 256}),
        expected(whole.ref(), {.init_scale = 256});
    int skips = 0;
    keras.scaler().on_skip([&skips](const mezzo::SkippedStep&) { ++skips; });
    expected.scaler().on_skip(nullptr);
    for (int64_t i = 0; i < 4; ++i) {
      part.backward(keras.scaler(), i, i == 1 ? kInf : 1.0);
      whole.backward(expected.scaler(), i, i == 1 ? kInf : 1.0);
      EXPECT_EQ(keras.step({.max_norm = 2.0}).applied(),
                expected.step({.max_norm = 2.0}).applied());
    }
    EXPECT_EQ(keras.iterations(), 3);
    EXPECT_EQ(skips, 1);
    GradScaler disabled({.enabled = false});
    part.backward(disabled, 5, 1.0);
    whole.backward(disabled, 5, 1.0);
    EXPECT_NEAR(*disabled.step(optimizer, {.max_norm = 0.5}).grad_norm(),
                *disabled.step(whole.ref(), {.max_norm = 0.5}).grad_norm(), 1e-4);
    part.expect_near(whole, c.tolerance);
  }
}

// Two groups of two ranks share a model, whose optimizer state is sharded over the other two.
template <class Optimizer>
void expect_composes_with_zero() {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 4) GTEST_SKIP() << "needs four ranks";
  const int part = rank / 2, replica = rank % 2;
  MPI_Comm model_ranks = MPI_COMM_NULL, data_ranks = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, replica, rank, &model_ranks);
  MPI_Comm_split(MPI_COMM_WORLD, part, rank, &data_ranks);
  {
    const BackendPtr model_group = distributed_test::make_backend(model_ranks),
                     data_group = distributed_test::make_backend(data_ranks);
    const auto make_weights = [](int seed) {
      torch::manual_seed(static_cast<uint64_t>(seed));
      return std::vector<at::Tensor>{torch::randn({300}, at::requires_grad()),
                                     torch::randn({200}, at::requires_grad())};
    };
    const std::vector<at::Tensor> weights = make_weights(part);
    std::vector<at::Tensor> all = make_weights(0);
    for (const at::Tensor& weight : make_weights(1)) all.push_back(weight);
    const AdamWOptions options = AdamWOptions(1e-2).eps(1e-3);
    mezzo::ShardedOptimizer<Optimizer> sharded(weights, data_group, options);
    Optimizer whole(all, options);
    ModelParallelOptimizer optimizer(sharded, model_group);
    GradScaler scaler({.init_scale = 64}), reference(scaler.options());
    scaler.on_skip(nullptr);
    reference.on_skip(nullptr);
    for (int64_t step = 0; step < 5; ++step) {
      // One rank of four has an inf in step 1.
      const auto factor = [&](int of_part, int of_replica) {
        return step == 1 && of_part == 1 && of_replica == 0 ? kInf : 1.0 + of_replica;
      };
      sharded.zero_grad();
      scaler.scale((weights[0].square().sum() + weights[1].sum()) * factor(part, replica))
          .backward();
      whole.zero_grad();
      at::Tensor loss = torch::zeros({});
      for (int p = 0; p < 2; ++p) {
        const auto k = static_cast<std::size_t>(2 * p);
        loss =
            loss + (all[k].square().sum() + all[k + 1].sum()) * ((factor(p, 0) + factor(p, 1)) / 2);
      }
      reference.scale(loss).backward();
      const StepResult result = scaler.step(optimizer, {.max_norm = 3.0}),
                       expected = reference.step(whole, {.max_norm = 3.0});
      EXPECT_EQ(result.applied(), expected.applied());
      EXPECT_EQ(result.applied(), step != 1);
      if (expected.applied()) {
        EXPECT_NEAR(*result.grad_norm(), *expected.grad_norm(), 1e-6 * *expected.grad_norm());
      }
      scaler.update();
      reference.update();
    }
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(weights[i], all[static_cast<std::size_t>(2 * part) + i], 1e-6, 1e-6))
          << i;
    }
  }
  MPI_Comm_free(&model_ranks);
  MPI_Comm_free(&data_ranks);
}

TEST(MpiModelParallelOptimizer, ComposesWithShardedOptimizer) {
  expect_composes_with_zero<AdamW>();
  expect_composes_with_zero<torch::optim::AdamW>();
}

}  // namespace
}  // namespace model_parallel_optimizer_test
