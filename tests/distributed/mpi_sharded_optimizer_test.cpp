#include <torch/torch.h>
//
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../support/error_of.h"
#include "ranks.h"
#include "sharded_model.h"

namespace sharded_optimizer_test {
namespace {

using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::Ranks;
using distributed_test::ReduceOp;
using mezzo::ShardedOptimizer;
using mezzo::optim::WeightStorage;
using sharded_test::batches;
using sharded_test::kSmallBuckets;
using sharded_test::loss_of;
using sharded_test::Model;
using sharded_test::world;
using test_support::error_of;
using torch::optim::OptimizerParamGroup;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Weights and the rest apart, as weight decay wants them.
template <class Options>
std::vector<OptimizerParamGroup> groups_of(Model model, const Options& options) {
  std::vector<at::Tensor> weights, rest;
  for (const at::Tensor& parameter : model->parameters()) {
    (parameter.dim() > 1 ? weights : rest).push_back(parameter);
  }
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<Options>(options));
  auto undecayed = std::make_unique<Options>(options);
  undecayed->weight_decay(0).set_lr(options.get_lr() / 2);
  groups.emplace_back(rest, std::move(undecayed));
  return groups;
}

/// The gradients of `to` become the average of what the ranks have of `from`'s: a part each, and
/// zeros elsewhere.
void give_averages(const Ranks& ranks, Model from, Model to) {
  const auto sources = from->named_parameters();
  for (auto& item : to->named_parameters()) {
    const at::Tensor& part = sources[item.key()].grad();
    item.value().mutable_grad() = at::Tensor();
    if (!part.defined()) continue;
    const at::Tensor sum = part.clone();
    all_reduce(ranks, sum, ReduceOp::SUM);
    item.value().mutable_grad() = sum.div_(ranks->getSize());
  }
}

/// Steps side by side with the same averages, with a scale, whose second step is skipped, with
/// rates that move, and once without the scaler.
template <class Optimizer, class Options>
void expect_the_bits_of_one(const Options& options, at::ScalarType dtype, const std::string& what) {
  Ranks ranks = world();
  Model model, alone;
  model->to(dtype);
  alone->to(dtype);
  ShardedOptimizer<Optimizer> sharded(groups_of(model, options), ranks, options, kSmallBuckets);
  Optimizer whole(groups_of(alone, options), options);
  const auto scaling = mezzo::LossScaleOptions{.init_scale = 256., .allow_fp16_gradients = true};
  mezzo::GradScaler scaler(scaling), scaler_alone(scaling);
  scaler.on_skip(nullptr);
  scaler_alone.on_skip(nullptr);
  sharded.set_lr_factors({0.25, 0.5, 1.0});
  whole.set_lr_factors({0.25, 0.5, 1.0});
  int number = 0;
  for (const auto& batch : batches(6, dtype)) {
    sharded.zero_grad();
    const at::Tensor loss =
        loss_of(model, batch.part(ranks->getRank(), ranks->getSize()), ranks->getRank());
    if (number == 3) {
      loss.backward();
      give_averages(ranks, model, alone);
      sharded.step();
      whole.step();
    } else {
      (void)scaler_alone.scale(loss);
      (scaler.scale(loss) * (number == 1 ? kInf : 1.)).backward();
      give_averages(ranks, model, alone);
      EXPECT_EQ(scaler.step(sharded, {.zero_grad = number == 4}).ran(), number != 1) << what;
      EXPECT_EQ(scaler_alone.step(whole, {}).ran(), number != 1) << what;
      scaler.update();
      scaler_alone.update();
    }
    sharded_test::expect_equal(model, alone, what + ", step " + std::to_string(number));
    sharded.param_groups()[1].options().set_lr(0.01 / ++number);
    whole.param_groups()[1].options().set_lr(0.01 / number);
  }
  EXPECT_EQ(sharded.applied_steps(), 5);
  EXPECT_EQ(whole.applied_steps(), 5);
  EXPECT_EQ(scaler.get_scale(), scaler_alone.get_scale());
  sharded_test::expect_same_weights_on_all_ranks(ranks, model);
}

TEST(ShardedOptimizer, StepsToTheBitAsOneOptimizerWithTheAverage) {
  using namespace mezzo::optim;  // NOLINT(google-build-using-namespace)
  expect_the_bits_of_one<AdamW>(AdamWOptions(0.01).weight_decay(0.1), at::kFloat, "AdamW");
  expect_the_bits_of_one<AdamW>(AdamWOptions(0.01).amsgrad(true), at::kFloat, "amsgrad");
  expect_the_bits_of_one<Adam>(AdamOptions(0.01).weight_decay(0.1), at::kDouble, "Adam, double");
  expect_the_bits_of_one<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true), at::kFloat, "SGD");
  expect_the_bits_of_one<SGD>(SGDOptions(0.05), at::kFloat, "SGD without momentum");
  expect_the_bits_of_one<Lion>(LionOptions(0.01), at::kFloat, "Lion");
}

TEST(ShardedOptimizer, LowPrecisionWeightsStepToTheBitAsWell) {
  using namespace mezzo::optim;  // NOLINT(google-build-using-namespace)
  const auto stored = [](WeightStorage storage) {
    return AdamWOptions(0.01).weight_storage(storage);
  };
  expect_the_bits_of_one<AdamW>(stored(WeightStorage::master), at::kBFloat16, "master, bfloat16");
  expect_the_bits_of_one<AdamW>(stored(WeightStorage::master), at::kHalf, "master, half");
  expect_the_bits_of_one<AdamW>(stored(WeightStorage::split_master), at::kBFloat16, "split");
  expect_the_bits_of_one<AdamW>(stored(WeightStorage::plain), at::kBFloat16, "plain, bfloat16");
}

}  // namespace
}  // namespace sharded_optimizer_test
