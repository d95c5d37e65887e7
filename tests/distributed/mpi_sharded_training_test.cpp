#include <torch/torch.h>
//
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/levels/initialize.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/clip_grad.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "ranks.h"
#include "sharded_model.h"

namespace sharded_training_test {
namespace {

using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::Ranks;
using distributed_test::ReduceOp;
using mezzo::GradScaler;
using mezzo::ShardedOptimizer;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using sharded_test::batches;
using sharded_test::kSmallBuckets;
using sharded_test::loss_of;
using sharded_test::Model;
using sharded_test::world;
using test_support::error_of;
using testing::HasSubstr;
using Sharded = ShardedOptimizer<AdamW>;

static_assert(mezzo::detail::StepsElementByElement<AdamW>);
static_assert(!mezzo::detail::StepsElementByElement<mezzo::optim::LAMB>);
static_assert(!mezzo::detail::StepsElementByElement<torch::optim::AdamW>);
/// Which would train this rank's slices and leave the other ranks behind.
template <class Optimizer>
concept StepsWithAten = requires(Optimizer& optimizer, mezzo::StepPlan plan) {
  optimizer.apply_with_aten(std::move(plan));
};
static_assert(StepsWithAten<AdamW> && !StepsWithAten<Sharded>);

constexpr double kInf = std::numeric_limits<double>::infinity();
at::Tensor own_loss(Model model, const sharded_test::Batch& batch, const Ranks& ranks) {
  return loss_of(model, batch.part(ranks->getRank(), ranks->getSize()), ranks->getRank());
}

/// The loss of the whole batch as the mean of its parts', as ranks make it.
at::Tensor whole_loss(Model model, const sharded_test::Batch& batch, int ranks) {
  at::Tensor loss = torch::zeros({});
  for (int rank = 0; rank < ranks; ++rank) {
    loss = loss + loss_of(model, batch.part(rank, ranks), rank);
  }
  return loss / ranks;
}

TEST(ShardedTraining, RanksWithPartsOfABatchFollowOneWithAllOfItClipped) {
  Ranks ranks = world();
  Model model, alone;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.003), {.bucket_bytes = 8192});
  AdamW whole(alone->parameters(), AdamWOptions(0.003));
  GradScaler scaler, scaler_alone;
  const auto data = batches(8);
  for (std::size_t i = 0; i < 60; ++i) {
    const auto& batch = data[i % data.size()];
    optimizer.zero_grad();
    scaler.scale(own_loss(model, batch, ranks)).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 0.5});
    scaler.update();
    whole.zero_grad();
    scaler_alone.scale(whole_loss(alone, batch, ranks->getSize())).backward();
    const auto result_alone = scaler_alone.step(whole, {.max_norm = 0.5});
    scaler_alone.update();
    if (i < data.size()) {
      EXPECT_GT(*result_alone.grad_norm(), 0.5);
    }
    EXPECT_NEAR(*result.grad_norm(), *result_alone.grad_norm(), 1e-3 * *result_alone.grad_norm());
  }
  sharded_test::expect_close(model, alone, 2e-4);
  sharded_test::expect_same_weights_on_all_ranks(ranks, model);
  EXPECT_FALSE(model->never.grad().defined());
  EXPECT_FALSE(model->frozen.grad().defined());
}

TEST(ShardedTraining, AddsUpMicroBatchesOf16BitWeightsInFloat) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}, torch::kBFloat16).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer(
      {weight}, ranks, mezzo::optim::SGDOptions(1.).accumulate_in_float(true));
  {
    const auto local = optimizer.no_sync();
    for (int i = 0; i < 999; ++i) weight.sum().backward();
  }
  weight.sum().backward();
  optimizer.step();
  EXPECT_TRUE(at::equal(weight, torch::full({301}, -1000., torch::kBFloat16))) << weight[0];
}

/// Known gradients: what is summed, clipped and reported can be computed by hand.
TEST(ShardedTraining, ClipsByTheNormOfTheWholeAverage) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, ranks, mezzo::optim::SGDOptions(1.));
  GradScaler scaler({.init_scale = 8.});
  // Averages are (ranks + 1) / 2 everywhere.
  scaler.scale((weight * (ranks->getRank() + 1)).sum()).backward();
  const auto result = scaler.step(optimizer, {.max_norm = 2.});
  const double norm = (ranks->getSize() + 1) / 2. * std::sqrt(301.);
  EXPECT_NEAR(*result.grad_norm(), norm, 1e-7 * norm);
  const at::Tensor wanted = torch::full({301}, -2. / std::sqrt(301.));
  EXPECT_TRUE(at::allclose(weight, wanted, 1e-5)) << weight[0] << wanted[0];
}

TEST(ShardedTraining, ADisabledScalerClipsToo) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, ranks, mezzo::optim::SGDOptions(1.));
  GradScaler scaler({.enabled = false});
  (weight * (ranks->getRank() + 1)).sum().backward();
  const auto result = scaler.step(optimizer, {.max_norm = 2.});
  const double norm = (ranks->getSize() + 1) / 2. * std::sqrt(301.);
  EXPECT_NEAR(*result.grad_norm(), norm, 1e-7 * norm);
  EXPECT_TRUE(at::allclose(weight, torch::full({301}, -2. / std::sqrt(301.)), 1e-5));
}

TEST(ShardedTraining, AnInfOnOneRankSkipsTheStepOnAll) {
  Ranks ranks = world();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Model model;
    model->to(dtype);
    Sharded optimizer(model->parameters(), ranks,
                      AdamWOptions(0.01).weight_storage(WeightStorage::master), kSmallBuckets);
    GradScaler scaler({.init_scale = 1024.});
    scaler.on_skip(nullptr);
    int number = 0;
    for (const auto& batch : batches(10, dtype)) {
      optimizer.zero_grad();
      std::vector<at::Tensor> before;
      for (const at::Tensor& parameter : model->parameters()) before.push_back(parameter.clone());
      at::Tensor loss = scaler.scale(own_loss(model, batch, ranks));
      // Every other step one rank is at fault, each in its turn, with one element, which is in the
      // part of one rank, mostly another.
      const bool is_bad = number % 2 == 1;
      if (is_bad && number / 2 % ranks->getSize() == ranks->getRank()) {
        loss = loss + model->out->bias[0] * kInf;
      }
      loss.backward();
      EXPECT_EQ(scaler.step(optimizer, {.max_norm = 1.}).ran(), !is_bad) << number;
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 1024. / std::pow(2., (number + 1) / 2));
      bool has_moved = false;
      for (std::size_t i = 0; i < before.size(); ++i) {
        has_moved = has_moved || !at::equal(model->parameters()[i], before[i]);
      }
      EXPECT_EQ(has_moved, !is_bad) << number;
      ++number;
    }
    EXPECT_EQ(optimizer.applied_steps(), 5);
    sharded_test::expect_same_weights_on_all_ranks(ranks, model);
  }
}

/// The sum of the ranks' finite gradients is beyond half.
TEST(ShardedTraining, AnOverflowOfTheSumItselfIsFound) {
  Ranks ranks = world();
  if (ranks->getSize() == 1) GTEST_SKIP() << "takes two ranks";
  const at::Tensor weight = torch::zeros({301}, at::kHalf).requires_grad_();
  Sharded optimizer({weight}, ranks, AdamWOptions(1.).weight_storage(WeightStorage::master));
  GradScaler scaler({.init_scale = 1024.});
  scaler.on_skip(nullptr);
  at::Tensor factor = torch::ones({301});
  factor[300] = 40.;  // 40 * 1024 is finite in half, and twice that is not
  scaler.scale((weight * factor).sum()).backward();
  EXPECT_FALSE(scaler.step(optimizer, {.max_norm = 1.}).ran());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 512.);
  EXPECT_TRUE(at::equal(weight, torch::zeros({301}, at::kHalf)));
}

TEST(ShardedTraining, MicroBatchesStayLocalUntilTheLast) {
  Ranks ranks = world();
  Model model, alone;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.01), kSmallBuckets);
  AdamW whole(alone->parameters(), AdamWOptions(0.01));
  const auto data = batches(6);
  for (std::size_t i = 0; i < data.size(); i += 2) {
    optimizer.zero_grad();
    {
      const auto no_sync = optimizer.no_sync();
      (own_loss(model, data[i], ranks) / 2).backward();
    }
    (own_loss(model, data[i + 1], ranks) / 2).backward();
    optimizer.step();
    whole.zero_grad();
    (whole_loss(alone, data[i], ranks->getSize()) / 2).backward();
    (whole_loss(alone, data[i + 1], ranks->getSize()) / 2).backward();
    whole.step();
  }
  sharded_test::expect_close(model, alone, 1e-4);
  sharded_test::expect_same_weights_on_all_ranks(ranks, model);
}

TEST(ShardedTraining, APassMoreAddsToTheSum) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, ranks, mezzo::optim::SGDOptions(1.));
  (weight * (ranks->getRank() + 1)).sum().backward();
  (weight * 10).sum().backward();
  const at::Tensor gradient = weight.grad().clone();
  all_reduce(ranks, gradient, ReduceOp::SUM);
  EXPECT_EQ(gradient.max().item<double>(),
            (ranks->getSize() + 1) * ranks->getSize() / 2. + 10 * ranks->getSize())
      << "a part a rank, and zeros elsewhere";
  optimizer.step();
  EXPECT_TRUE(at::equal(weight, torch::full({301}, -(ranks->getSize() + 1) / 2. - 10)));
}

TEST(ShardedTraining, GradientsThatNobodySummedAreRefused) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  Sharded optimizer({weight}, ranks, AdamWOptions(1.));
  {
    const auto no_sync = optimizer.no_sync();
    weight.sum().backward();
  }
  const std::string wanted = "no backward pass has summed the gradients over the ranks";
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr(wanted));
  weight.sum().backward();
  optimizer.step();
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr(wanted));
  weight.sum().backward();
  const mezzo::StepPlan plan = optimizer.plan();
  const mezzo::Verdict verdict = optimizer.read(plan, torch::ones({}));
  optimizer.apply(plan, verdict);
  EXPECT_THAT(error_of([&] { optimizer.apply(plan, verdict); }), HasSubstr(wanted))
      << "it serves one";
  weight.sum().backward();
  {
    const auto too_late = optimizer.no_sync();
    weight.sum().backward();
  }
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr(wanted));
  optimizer.zero_grad();
  optimizer.step();
  EXPECT_EQ(optimizer.applied_steps(), 3) << "the step without gradients counts too";
}

TEST(ShardedTraining, ClosuresRunOnce) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, ranks, mezzo::optim::SGDOptions(1.));
  const c10::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    const at::Tensor sum = ((weight + 2) * (ranks->getRank() + 1)).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<double>(), 602. * (ranks->getRank() + 1));
  EXPECT_TRUE(at::equal(weight, torch::full({301}, -(ranks->getSize() + 1) / 2.)));
}

/// Gradients are whole numbers, whose sums are exact in all of them, and so are averages where the
/// number of ranks is a power of two: a step multiplies the sum by 1/N.
TEST(ShardedTraining, DtypesGoTogether) {
  Ranks ranks = world();
  if ((ranks->getSize() & (ranks->getSize() - 1)) != 0) GTEST_SKIP() << "1/N is rounded";
  const auto options = AdamWOptions(0.01).weight_storage(WeightStorage::master);
  const auto parameters = [] {
    torch::manual_seed(5);
    std::vector<at::Tensor> all;
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kHalf, at::kDouble, at::kBFloat16}) {
      all.push_back(torch::randn({301}).to(dtype).requires_grad_());
    }
    return all;
  };
  const std::vector<at::Tensor> sharded = parameters(), alone = parameters();
  const at::Tensor slopes = torch::arange(301).remainder(7).to(at::kFloat);
  const auto backward = [&](GradScaler& scaler, const std::vector<at::Tensor>& all, double factor) {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& parameter : all) {
      loss = loss + (parameter.to(at::kFloat) * slopes * factor).sum();
    }
    scaler.scale(loss).backward();
  };
  Sharded optimizer(sharded, ranks, options, kSmallBuckets);
  AdamW whole(alone, options);
  GradScaler scaler({.init_scale = 8.});
  GradScaler scaler_alone({.init_scale = 8.});
  for (int i = 0; i < 3; ++i) {
    backward(scaler, sharded, 2. * (ranks->getRank() + 1));
    backward(scaler_alone, alone, ranks->getSize() + 1.);
    const auto result = scaler.step(optimizer, {.zero_grad = true});
    const auto wanted = scaler_alone.step(whole, {.zero_grad = true});
    EXPECT_EQ(*result.grad_norm(), *wanted.grad_norm()) << "whole numbers add up exactly";
    scaler.update();
    scaler_alone.update();
    for (std::size_t k = 0; k < alone.size(); ++k) {
      EXPECT_TRUE(at::equal(sharded[k], alone[k])) << i << ' ' << k;
      EXPECT_EQ(sharded[k].grad().abs().max().item<double>(), 0.);
    }
  }
}

/// With four ranks some have nothing of a parameter of 3 elements.
TEST(ShardedTraining, ARankWithoutAnyPartGoesAlong) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({3}).requires_grad_();
  ShardedOptimizer<mezzo::optim::SGD> optimizer({weight}, ranks, mezzo::optim::SGDOptions(1.));
  optimizer.set_lr_factors({1., 0.5, 0.25});
  GradScaler scaler({.init_scale = 8.});
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    scaler.scale(weight.sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 10.}).ran());
    scaler.update();
  }
  EXPECT_TRUE(at::equal(weight, torch::full({3}, -1.75))) << weight;
  EXPECT_EQ(optimizer.applied_steps(), 3);
  optimizer.set_applied_steps(1);
  optimizer.zero_grad();
  weight.sum().backward();
  optimizer.step();
  EXPECT_TRUE(at::equal(weight, torch::full({3}, -2.25))) << weight;
}

TEST(ShardedTraining, GradientsCannotBeUnscaledOrClippedWhereTheyLie) {
  Ranks ranks = world();
  Model model;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.01), kSmallBuckets);
  for (const bool enabled : {true, false}) {
    GradScaler scaler({.enabled = enabled});
    optimizer.zero_grad();
    scaler.scale(own_loss(model, batches(1)[0], ranks)).backward();
    const std::string wanted = "use scaler.step(optimizer, {.max_norm = ...})";
    EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }), HasSubstr(wanted));
    EXPECT_THAT(error_of([&] { mezzo::clip_grad_norm_(scaler, optimizer, 1.); }),
                HasSubstr(wanted));
    EXPECT_THAT(error_of([&] { mezzo::clip_grad_value_(scaler, optimizer, 1.); }),
                HasSubstr(wanted));
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1.}).ran()) << "which has lost nothing";
    scaler.update();
  }
}

TEST(ShardedTraining, WhatItCannotShardIsRefused) {
  Ranks ranks = world();
  const auto made = [&](const AdamWOptions& options) {
    return error_of([&] {
      const at::Tensor weight = torch::zeros({3}, at::kBFloat16).requires_grad_();
      Sharded optimizer({weight}, ranks, options);
    });
  };
  EXPECT_EQ(made(AdamWOptions(0.01)), "no error");
  EXPECT_THAT(made(AdamWOptions(0.01).weight_storage(WeightStorage::stochastic)),
              HasSubstr("use WeightStorage::master"));
  EXPECT_THAT(made(AdamWOptions(-1.)), HasSubstr("lr"));

  const at::Tensor memory = torch::zeros({8});
  const at::Tensor left = memory.narrow(0, 0, 5).requires_grad_();
  const at::Tensor right = memory.narrow(0, 4, 4).requires_grad_();
  EXPECT_THAT(error_of([&] {
                Sharded({left, right}, ranks, AdamWOptions(0.01));
              }),
              HasSubstr("share memory"));

  Model model;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.01));
  EXPECT_THAT(error_of([&] { optimizer.enable_master_weights(); }),
              HasSubstr("make the optimizer from the cast model"));
  own_loss(model, batches(1)[0], ranks).backward();
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options())
      .weight_storage(WeightStorage::stochastic);
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("use WeightStorage::master"));
}

TEST(ShardedTraining, ParametersStayTheOnesItWasMadeWith) {
  Ranks ranks = world();
  Model model;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.01));
  own_loss(model, batches(1)[0], ranks).backward();
  model->frozen.set_requires_grad(true);
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("was frozen when the optimizer"));
  torch::serialize::OutputArchive file;
  optimizer.save(file);  // for the optimizer that is to train it
  model->frozen.set_requires_grad(false);
  const at::Tensor last = optimizer.param_groups()[0].params().back();
  optimizer.param_groups()[0].params().pop_back();
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("its groups lack 1"));
  optimizer.param_groups()[0].params().push_back(last);
  optimizer.step();
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({torch::zeros({3}).requires_grad_()}));
  EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("another parameter"));
  EXPECT_THAT(error_of([&] {
                torch::serialize::OutputArchive archive;
                optimizer.save(archive);
              }),
              HasSubstr("another parameter"));

  Model moved;
  Sharded before_the_cast(moved->parameters(), ranks, AdamWOptions(0.01));
  own_loss(moved, batches(1)[0], ranks).backward();
  before_the_cast.zero_grad();
  moved->to(at::kBFloat16);
  EXPECT_THAT(error_of([&] { before_the_cast.step(); }),
              HasSubstr("cast and move the model first"));
}

TEST(ShardedTraining, AFrozenParameterStaysAsItIs) {
  Ranks ranks = world();
  Model model;
  Sharded optimizer(model->parameters(), ranks, AdamWOptions(0.01), kSmallBuckets);
  model->wide->weight.set_requires_grad(false);
  const at::Tensor before = model->wide->weight.clone();
  const at::Tensor out_before = model->out->weight.clone();
  own_loss(model, batches(1)[0], ranks).backward();
  optimizer.step();
  EXPECT_TRUE(at::equal(model->wide->weight, before));
  EXPECT_FALSE(at::equal(model->out->weight, out_before));
}

TEST(ShardedTraining, RanksBeginWithTheValuesOfRank0) {
  Ranks ranks = world();
  const at::Tensor trained = torch::full({301}, ranks->getRank() + 1.).requires_grad_();
  const at::Tensor frozen = torch::full({3}, ranks->getRank() + 1.);
  const Sharded optimizer({trained, frozen}, ranks, AdamWOptions(0.01));
  EXPECT_TRUE(at::equal(trained, torch::ones({301})));
  EXPECT_TRUE(at::equal(frozen, torch::ones({3})));
  if (ranks->getSize() == 1) return;
  const at::Tensor other = torch::zeros({ranks->getRank() == 1 ? 4 : 3}).requires_grad_();
  EXPECT_THAT(error_of([&] { Sharded({other}, ranks, AdamWOptions(0.01)); }),
              testing::AllOf(HasSubstr("rank 1 has \"parameter"),
                             HasSubstr("parameter 0 of group 0: Float [4]")));
}

/// As far as anybody can see, a parameter has memory of its own, in the format that it had.
TEST(ShardedTraining, ParametersLookAsTheyDidBefore) {
  Ranks ranks = world();
  Model model;
  const at::Tensor spread = torch::arange(12.).view({4, 3}).slice(1, 0, 2).requires_grad_();
  const at::Tensor values = spread.clone();
  auto parameters = model->parameters();
  parameters.push_back(spread);
  const Sharded optimizer(parameters, ranks, AdamWOptions(0.01));
  EXPECT_TRUE(model->conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(at::equal(spread, values));
  for (const at::Tensor& parameter : parameters) {
    EXPECT_TRUE(parameter.is_leaf());
    if (parameter.requires_grad()) {
      EXPECT_EQ(parameter.storage().nbytes(), parameter.nbytes());
    }
  }
}

template <class Write>
void expect_write_counts(const Write& write) {
  Ranks ranks = world();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Model model, alone;
    model->to(dtype);
    alone->to(dtype);
    const auto options = AdamWOptions(0.01).weight_storage(WeightStorage::master);
    Sharded optimizer(model->parameters(), ranks, options, kSmallBuckets);
    AdamW whole(alone->parameters(), options);
    for (int i = 0; i < 3; ++i) {
      for (const auto& net : {model, alone}) {
        for (auto parameter : net->parameters()) parameter.mutable_grad().reset();
        // The same on all ranks, so that sums and averages are exact.
        loss_of(net, batches(1, dtype)[0], 0).backward();
      }
      optimizer.step();
      whole.step();
      if (i != 1) continue;
      write(model);
      write(alone);
    }
    sharded_test::expect_equal(model, alone, "after a write");
  }
}

TEST(ShardedTraining, WhatOthersWriteToAParameterCounts) {
  expect_write_counts([](Model model) {
    const c10::NoGradGuard no_grad;
    model->wide->weight.narrow(0, 3, 20).mul_(2);
    model->out->bias.fill_(0.125);
  });
}

/// Autograd, and caches of weights, are told that they are others.
TEST(ShardedTraining, AStepShowsInTheVersionsOfParameters) {
  Ranks ranks = world();
  const at::Tensor weight = torch::ones({301}).requires_grad_();
  Sharded optimizer({weight}, ranks, AdamWOptions(0.01));
  const at::Tensor saves_weight = (weight * weight).sum();
  weight.sum().backward();
  const auto version = weight._version();
  optimizer.step();
  EXPECT_GT(weight._version(), version);
  EXPECT_THAT(error_of([&] { saves_weight.backward(); }), HasSubstr("inplace operation"));
}

TEST(ShardedTraining, AModelThatIsLoadedCounts) {
  expect_write_counts([](Model model) {
    Model other;
    other->to(model->out->bias.scalar_type());
    {
      const c10::NoGradGuard no_grad;
      other->wide->weight.mul_(3);
    }
    std::stringstream file;
    torch::save(other, file);
    torch::load(model, file);
  });
}

/// Users find, read and drop the state of a parameter as with any optimizer.
TEST(ShardedTraining, TheStateOfASliceIsKeptAsItsParameters) {
  Ranks ranks = world();
  const at::Tensor weight = torch::zeros({301}).requires_grad_();
  Sharded optimizer({weight}, ranks, AdamWOptions(0.01));
  const auto step = [&] {
    optimizer.zero_grad();
    weight.sum().backward();
    optimizer.step();
    const auto found = optimizer.state().find(weight.unsafeGetTensorImpl());
    return found == optimizer.state().end()
               ? nullptr
               : static_cast<mezzo::optim::AdamWParamState*>(found->second.get());
  };
  (void)step();
  const auto* const state = step();
  const at::Tensor elements = at::tensor({state == nullptr ? 0 : state->exp_avg().numel()});
  all_reduce(ranks, elements, ReduceOp::SUM);
  EXPECT_EQ(elements.item<int64_t>(), 301);
  if (state != nullptr) {
    EXPECT_EQ(state->step(), 2);
  }
  optimizer.state().erase(weight.unsafeGetTensorImpl());
  const auto* const anew = step();
  if (anew == nullptr) return;
  EXPECT_EQ(anew->step(), 1);
  optimizer.state()[weight.unsafeGetTensorImpl()] = std::make_unique<mezzo::optim::SGDParamState>();
  EXPECT_THAT(error_of([&] { (void)optimizer.bytes(); }), HasSubstr("is another optimizer's"));
}

/// Bytes a rank keeps for 20,000 parameters, in tensors of which none is a multiple of 64 bytes.
struct Counted {
  mezzo::ShardedOptimizerBytes bytes;
  int64_t elements = 0;  // of the buckets, padding included
};

Counted count_bytes(at::ScalarType dtype, WeightStorage storage) {
  Ranks ranks = world();
  std::vector<at::Tensor> parameters;
  for (const int64_t size : {9999, 9991, 10}) {
    parameters.push_back(torch::zeros({size}, dtype).requires_grad_());
  }
  Sharded optimizer(parameters, ranks, AdamWOptions(0.01).weight_storage(storage));
  for (const at::Tensor& parameter : parameters) parameter.sum().backward();
  optimizer.step();
  Counted counted{.bytes = optimizer.bytes()};
  for (const auto& bucket : optimizer.buckets().buckets()) counted.elements += bucket.flat.numel();
  return counted;
}

TEST(ShardedTraining, ARankKeepsItsPartOfTheState) {
  Ranks ranks = world();
  constexpr int64_t kParameters = 20000;
  struct Case {
    const char* name;
    at::ScalarType dtype;
    WeightStorage storage;
    int64_t weight_bytes, state_bytes;
  };
  for (const Case& one :
       {Case{"float", at::kFloat, WeightStorage::plain, 4, 8},
        Case{"bfloat16 with masters", at::kBFloat16, WeightStorage::master, 2, 12},
        Case{"bfloat16, split masters", at::kBFloat16, WeightStorage::split_master, 2, 10}}) {
    const Counted counted = count_bytes(one.dtype, one.storage);
    EXPECT_EQ(counted.bytes.weights, one.weight_bytes * counted.elements) << one.name;
    EXPECT_EQ(counted.bytes.gradients, one.weight_bytes * counted.elements) << one.name;
    // A bucket's end is padded to 1,024 bytes a rank, and each of the three to 1,024.
    EXPECT_LE((counted.elements - kParameters) * one.weight_bytes, 1024 * (ranks->getSize() + 3));
    const at::Tensor state = at::tensor({counted.bytes.state});
    all_reduce(ranks, state, ReduceOp::SUM);
    EXPECT_EQ(state.item<int64_t>(), one.state_bytes * kParameters)
        << one.name << ": of every element one rank has the state, and none of the padding";
    EXPECT_LE(counted.bytes.state, one.state_bytes * counted.elements / ranks->getSize());
    if (ranks->getRank() != 0) continue;
    const auto each = [&](int64_t bytes) { return static_cast<double>(bytes) / kParameters; };
    std::cout << ranks->getSize() << " ranks, " << one.name
              << ": bytes a parameter on rank 0: weights " << each(counted.bytes.weights)
              << ", gradients " << each(counted.bytes.gradients) << ", state "
              << each(counted.bytes.state) << ", together "
              << each(counted.bytes.weights + counted.bytes.gradients + counted.bytes.state)
              << std::endl;
  }
}

}  // namespace
}  // namespace sharded_training_test
