#include <torch/torch.h>
//
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/save_to_string.h"
#include "single_process_reference.h"
#include "test_backends.h"

namespace sharded_optimizer_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using mezzo::ShardedOptimizer;
using mezzo::optim::WeightStorage;
using single_process_reference::batches;
using single_process_reference::compute_loss;
using single_process_reference::kSmallBuckets;
using single_process_reference::Model;
using test_support::message_of;
using torch::optim::OptimizerParamGroup;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Two param groups: weights with weight decay, and other parameters.
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

/// A sharded and an unsharded optimizer, which step with the same averages.
template <class Optimizer>
struct SideBySide {
  template <class Options, class... Weights>
  SideBySide(const Options& options, at::ScalarType dtype, const Weights&... weights)
      : model(dtype),
        alone(dtype),
        sharded(groups_of(model, options), backend, options, kSmallBuckets, weights...),
        whole(groups_of(alone, options), options, weights...) {
    scaler.on_skip(nullptr);
    scaler_alone.on_skip(nullptr);
  }

  /// Runs backward on this rank's shard of the batch, and copies the averages to the unsharded
  /// model.
  void backward(const single_process_reference::Batch& batch, double factor = 1,
                bool scales = true) {
    sharded.zero_grad();
    const at::Tensor loss =
        compute_loss(model, batch.part(backend->getRank(), backend->getSize()), backend->getRank());
    if (scales) (void)scaler_alone.scale(loss);
    ((scales ? scaler.scale(loss) : loss) * factor).backward();
    const auto averages = model->named_parameters();
    for (auto& item : alone->named_parameters()) {
      const at::Tensor& average = averages[item.key()].grad();
      item.value().mutable_grad() = average.defined() ? average.clone() : at::Tensor();
    }
  }
  /// Steps both if `runs`, and expects equal weights.
  void step(const std::string& what, const mezzo::StepOptions& options, bool runs = true) {
    EXPECT_EQ(scaler.step(sharded, options).applied(), runs) << what;
    EXPECT_EQ(scaler_alone.step(whole, options).applied(), runs) << what;
    scaler.update();
    scaler_alone.update();
    single_process_reference::expect_equal(model, alone, what);
  }
  void step_without_scale(const std::string& what) {
    sharded.step();
    whole.step();
    single_process_reference::expect_equal(model, alone, what);
  }
  void set_lr(double lr) {
    sharded.param_groups()[1].options().set_lr(lr);
    whole.param_groups()[1].options().set_lr(lr);
  }

  BackendPtr backend = make_world_backend();
  Model model, alone;
  ShardedOptimizer<Optimizer> sharded;
  Optimizer whole;
  mezzo::GradScaler scaler{
      mezzo::GradScalerOptions{.init_scale = 256., .allow_fp16_gradients = true}};
  mezzo::GradScaler scaler_alone{scaler.options()};
};

/// With a scaler that skips the second step, changing learning rates, and one step without scaler.
template <class Optimizer, class Options>
void expect_matches_unsharded_bitwise(const Options& options, at::ScalarType dtype,
                                      const std::string& what,
                                      const mezzo::optim::WeightStorageOptions& weights = {}) {
  SideBySide<Optimizer> both(options, dtype, weights);
  both.sharded.set_lr_factors({0.25, 0.5, 1.0});
  both.whole.set_lr_factors({0.25, 0.5, 1.0});
  int number = 0;
  for (const auto& batch : batches(6)) {
    both.backward(batch, number == 1 ? kInf : 1., /*scales=*/number != 3);
    if (number == 3) {
      both.step_without_scale(what + ", step 3");
    } else {
      both.step(what + ", step " + std::to_string(number), {.zero_grad = number == 4}, number != 1);
    }
    both.set_lr(0.01 / ++number);
  }
  EXPECT_EQ(both.sharded.applied_steps(), 5);
  EXPECT_EQ(both.whole.applied_steps(), 5);
  EXPECT_EQ(both.scaler.get_scale(), both.scaler_alone.get_scale());
  distributed_test::expect_equal_weights_on_all_ranks(both.backend, both.model);
}

TEST(ShardedOptimizer, MatchesUnshardedOptimizerBitwise) {
  using namespace mezzo::optim;  // NOLINT(google-build-using-namespace)
  expect_matches_unsharded_bitwise<AdamW>(AdamWOptions(0.01).weight_decay(0.1), at::kFloat,
                                          "AdamW");
  expect_matches_unsharded_bitwise<AdamW>(AdamWOptions(0.01).amsgrad(true), at::kFloat, "amsgrad");
  expect_matches_unsharded_bitwise<Adam>(AdamOptions(0.01).weight_decay(0.1), at::kDouble,
                                         "Adam, double");
  expect_matches_unsharded_bitwise<SGD>(SGDOptions(0.05).momentum(0.9).nesterov(true), at::kFloat,
                                        "SGD");
  expect_matches_unsharded_bitwise<SGD>(SGDOptions(0.05), at::kFloat, "SGD without momentum");
  expect_matches_unsharded_bitwise<Lion>(LionOptions(0.01), at::kFloat, "Lion");
}

TEST(ShardedOptimizer, LowPrecisionWeightsMatchBitwise) {
  using namespace mezzo::optim;  // NOLINT(google-build-using-namespace)
  const auto expect_with = [](WeightStorage storage, at::ScalarType dtype, const char* what) {
    expect_matches_unsharded_bitwise<AdamW>(AdamWOptions(0.01), dtype, what,
                                            {.weight_storage = storage});
  };
  expect_with(WeightStorage::fp32_master, at::kBFloat16, "master, bfloat16");
  expect_with(WeightStorage::fp32_master, at::kHalf, "master, half");
  expect_with(WeightStorage::split_master, at::kBFloat16, "split");
  expect_with(WeightStorage::plain, at::kBFloat16, "plain, bfloat16");
}

// unscale_ and libtorch's clipping work as with any optimizer.
TEST(ShardedOptimizer, UnscaleAndClipMatchBitwise) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    SideBySide<mezzo::optim::AdamW> both(
        mezzo::optim::AdamWOptions(0.01), dtype,
        mezzo::optim::WeightStorageOptions{.weight_storage = WeightStorage::fp32_master});
    for (const auto& batch : batches(4)) {
      both.backward(batch);
      both.scaler.unscale_(both.sharded);
      both.scaler_alone.unscale_(both.whole);
      const double norm = torch::nn::utils::clip_grad_norm_(both.model->parameters(), 0.1);
      EXPECT_EQ(norm, torch::nn::utils::clip_grad_norm_(both.alone->parameters(), 0.1));
      both.step("unscaled and clipped", {});
    }
  }
}

// All ranks modify the weights between steps, as a program that clamps or loads them.
TEST(ShardedOptimizer, ExternalWeightWritesReachAllRanks) {
  using namespace mezzo::optim;  // NOLINT(google-build-using-namespace)
  for (const auto storage : {WeightStorage::fp32_master, WeightStorage::split_master}) {
    SideBySide<AdamW> both(AdamWOptions(0.01), at::kBFloat16,
                           WeightStorageOptions{.weight_storage = storage});
    int number = 0;
    for (const auto& batch : batches(5)) {
      both.backward(batch, 1, /*scales=*/false);
      both.step_without_scale("step " + std::to_string(number));
      for (const Model& each : {both.model, both.alone}) {
        const at::NoGradGuard no_grad;
        if (number == 1) each->left->weight.clamp_(-0.05, 0.05);
        if (number == 2) each->out->bias.data().fill_(0.3);
        if (number == 3) *static_cast<at::BFloat16*>(each->conv->bias.data_ptr()) = 2.F;
      }
      ++number;
    }
    distributed_test::expect_equal_weights_on_all_ranks(both.backend, both.model);
  }
}

template <class Optimizer, class Options>
void expect_unsharded_result(const Options& options) {
  SideBySide<Optimizer> both(options, at::kFloat);
  int number = 0;
  for (const auto& batch : batches(5)) {
    both.backward(batch, number == 1 ? kInf : 1.);
    both.step("step " + std::to_string(number), {.max_norm = 0.5}, number != 1);
    both.set_lr(0.01 / ++number);
  }
  std::stringstream file;
  torch::save(both.sharded, file);
  if (both.backend->getRank() == 0) {
    Optimizer loaded(groups_of(both.alone, options), options);
    torch::load(loaded, file);
    EXPECT_EQ(loaded.state().size(), both.whole.state().size());
  }
}

TEST(ShardedOptimizer, AcceptsTorchOptimizers) {
  expect_unsharded_result<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  expect_unsharded_result<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));
}

TEST(ShardedOptimizer, NoSyncKeepsMicroBatchesLocal) {
  const BackendPtr backend = make_world_backend();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, backend, mezzo::optim::SGDOptions(1.));
  {
    const auto no_sync = optimizer.no_sync();
    (weight * 8 * (backend->getRank() + 1)).sum().backward();
  }
  (weight * 4 * (backend->getRank() + 1)).sum().backward();
  optimizer.step();
  EXPECT_TRUE(at::equal(weight, torch::full({301}, -6. * (backend->getSize() + 1))));
}

TEST(ShardedOptimizer, KeepsOnlyOwnedState) {
  const BackendPtr backend = make_world_backend();
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) model->push_back(torch::nn::Linear(16, 16));
  ShardedOptimizer<mezzo::optim::AdamW> optimizer(model->parameters(), backend,
                                                  mezzo::optim::AdamWOptions(0.01));
  model->forward(torch::ones({2, 16})).sum().backward();
  optimizer.step();
  const auto expect_owned_state = [&] {
    int64_t elements = 0;
    for (const auto& [parameter, state] : optimizer.state()) {
      elements += static_cast<mezzo::optim::AdamWParamState&>(*state).exp_avg().numel();
    }
    EXPECT_EQ(elements, 8 * 17 * 16 / backend->getSize()) << "divisible by 1, 2 and 4 ranks";
  };
  expect_owned_state();
  const std::string file = test_support::save_to_string(optimizer);
  test_support::load_from_string(optimizer, mezzo::detail::broadcast_string(backend, file, 0));
  expect_owned_state();  // after a load too
}

TEST(ShardedOptimizer, AcceptsRankWithoutParameters) {
  const BackendPtr backend = make_world_backend();
  const at::Tensor weight = torch::zeros({3}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, backend, mezzo::optim::SGDOptions(1.));
  mezzo::GradScaler scaler({.init_scale = 8.});
  for (int i = 0; i < 3; ++i) {
    scaler.scale(weight.sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 10., .zero_grad = true}).applied());
    EXPECT_EQ(weight.grad().abs().max().item<double>(), 0.);
    scaler.update();
  }
  EXPECT_TRUE(at::equal(weight, torch::full({3}, -3.))) << weight;
  EXPECT_EQ(optimizer.applied_steps(), 3);
}

TEST(ShardedOptimizer, BroadcastsRank0AndReportsDifferences) {
  const BackendPtr backend = make_world_backend();
  using Sharded = ShardedOptimizer<mezzo::optim::AdamW>;
  const mezzo::optim::AdamWOptions options(0.01);
  const at::Tensor trained = torch::full({301}, backend->getRank() + 1.).requires_grad_();
  const at::Tensor frozen = torch::full({3}, backend->getRank() + 1.);
  Sharded optimizer({trained, frozen}, backend, options);
  EXPECT_TRUE(at::equal(trained, torch::ones({301})));
  EXPECT_TRUE(at::equal(frozen, torch::ones({3})));
  frozen.requires_grad_();
  (trained.sum() + frozen.sum()).backward();
  EXPECT_THAT(message_of([&] { optimizer.step(); }), testing::HasSubstr("was frozen"));
  if (backend->getSize() == 1) return;
  const bool is_other = backend->getRank() == 1;
  const at::Tensor other = torch::zeros({is_other ? 4 : 3}).requires_grad_();
  EXPECT_THAT(message_of([&] { Sharded({other}, backend, options); }),
              testing::HasSubstr("rank 1 has \"parameter 0 of group 0: Float [4]"));
  const at::Tensor same = torch::zeros({3}).requires_grad_();
  EXPECT_THAT(message_of([&] {
                Sharded({same}, backend, mezzo::optim::AdamWOptions(is_other ? 0.02 : 0.01));
              }),
              testing::HasSubstr("rank 1 has \"group 0: lr 0.02"));
}

}  // namespace
}  // namespace sharded_optimizer_test
