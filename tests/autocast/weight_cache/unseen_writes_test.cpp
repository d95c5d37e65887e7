// Writes that leave no version: by torch::optim::SGD, which steps through data(), and through
// memory that a weight shares. Frozen weights that are not pinned have no copies, and those of
// trainable weights end with the region, or when a gradient has gone through them.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using mezzo::WeightCache;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kFeatures = 4;

Tensor what_a_linear_module_reads(const Tensor& weight) {
  return torch::matmul(torch::eye(kFeatures), weight.t()).t();
}

/// Uses enough of a weight for any copy to be held.
void expect_present_values(const Tensor& weight) {
  for (int use = 0; use < 3; ++use) {
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
    EXPECT_TRUE(torch::equal(what_a_linear_module_reads(weight), weight.to(kBFloat16)));
  }
}

void evaluate(const WeightCache& cache, const Tensor& weight) {
  const torch::NoGradGuard no_grad;
  const Autocast<kCPU> autocast({.cache = cache});
  expect_present_values(weight);
}

enum class Where { cached, outside_the_cache };

Tensor loss_of(const WeightCache& cache, const Tensor& weight, Where where) {
  const Autocast<kCPU> autocast(where == Where::cached ? mezzo::AutocastSetting{.cache = cache}
                                                       : mezzo::AutocastSetting{.enabled = false});
  return torch::linear(torch::ones({1, kFeatures}), weight).to(torch::kFloat).pow(2).sum();
}

/// Trains a weight that is frozen before and after.
void thaw_and_step(const WeightCache& cache, Tensor weight, Where where, bool clear_gradient) {
  torch::optim::SGD optimizer({weight}, 0.5);
  weight.set_requires_grad(true);
  loss_of(cache, weight, where).backward();
  optimizer.step();
  if (clear_gradient) optimizer.zero_grad();
  weight.set_requires_grad(false);
}

TEST(UnseenSgdSteps, BetweenTwoFreezesAreNoticed) {
  for (const auto where : {Where::cached, Where::outside_the_cache}) {
    for (const bool clear_gradient : {true, false}) {
      const WeightCache cache = mezzo::install_op_overrides(WeightCache());
      const auto weight = torch::randn({kFeatures, kFeatures});
      for (int step = 0; step < 3; ++step) {
        evaluate(cache, weight);
        thaw_and_step(cache, weight, where, clear_gradient);
      }
      evaluate(cache, weight);
    }
  }
}

TEST(UnseenSgdSteps, OfAFrozenWeightInsideOneLongRegionAreNoticed) {
  for (const auto where : {Where::cached, Where::outside_the_cache}) {
    for (const bool clear_gradient : {true, false}) {
      const WeightCache cache = mezzo::install_op_overrides(WeightCache());
      auto weight = torch::randn({kFeatures, kFeatures});
      const Autocast<kCPU> autocast({.cache = cache});
      for (int step = 0; step < 3; ++step) {
        evaluate(cache, weight);
        thaw_and_step(cache, weight, where, clear_gradient);
      }
      evaluate(cache, weight);
    }
  }
}

TEST(UnseenSgdSteps, OfAGradientThatWentThroughACopyAreNoticedInsideOneLongRegion) {
  for (const bool clear_gradient : {true, false}) {
    const WeightCache cache = mezzo::install_op_overrides(WeightCache());
    auto weight = torch::randn({kFeatures, kFeatures}).requires_grad_();
    torch::optim::SGD optimizer({weight}, 0.5);
    const Autocast<kCPU> autocast({.cache = cache});
    for (int step = 0; step < 3; ++step) {
      evaluate(cache, weight);
      loss_of(cache, weight, Where::cached).backward();
      optimizer.step();
      if (clear_gradient) optimizer.zero_grad();
    }
    evaluate(cache, weight);
  }
}

// The one step that a region does not see. The page of the cache names it, and `forget`.
TEST(UnseenSgdSteps, OfAGradientThatWentThroughNoCopyAreForgottenByHand) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  auto weight = torch::randn({kFeatures, kFeatures}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  const Autocast<kCPU> region({.cache = cache});
  const auto first_use = what_linear_reads(weight);
  weight.square().sum().backward();
  optimizer.step();
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), first_use)) << "the page is out of date";
  cache.forget(weight);
  expect_present_values(weight);
}

// SGD steps what has a gradient, frozen or not.
TEST(UnseenSgdSteps, OfAFrozenWeightThatStillHasAGradientAreNoticed) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  auto weight = torch::randn({kFeatures, kFeatures});
  torch::optim::SGD optimizer({weight}, 0.5);
  thaw_and_step(cache, weight, Where::cached, /*clear_gradient=*/false);
  const Autocast<kCPU> region({.cache = cache});
  for (int step = 0; step < 3; ++step) {
    evaluate(cache, weight);
    optimizer.step();
  }
  optimizer.zero_grad();
  evaluate(cache, weight);
}

TEST(UnseenSgdSteps, AfterABackwardPassOfAGraphFromBeforeTheFreezeAreNoticed) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  auto weight = torch::randn({kFeatures, kFeatures}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  const auto loss = loss_of(cache, weight, Where::outside_the_cache);
  weight.set_requires_grad(false);
  evaluate(cache, weight);
  weight.set_requires_grad(true);
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  weight.set_requires_grad(false);
  evaluate(cache, weight);
}

// Gradient buckets hold the nodes that collect gradients: no new one tells of a new graph.
TEST(UnseenSgdSteps, OfAWeightWhoseGradientsSomebodyCollectsAreNoticed) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  auto weight = torch::randn({kFeatures, kFeatures}).requires_grad_();
  const auto collector = torch::autograd::impl::grad_accumulator(weight);
  weight.set_requires_grad(false);
  for (int step = 0; step < 3; ++step) {
    evaluate(cache, weight);
    thaw_and_step(cache, weight, Where::outside_the_cache, /*clear_gradient=*/true);
  }
  evaluate(cache, weight);
}

TEST(UnseenSgdSteps, OfAGansFrozenDiscriminatorAreNoticed) {
  const auto train = [](const mezzo::AutocastSetting& options) {
    torch::manual_seed(3);
    torch::nn::Linear generator(kFeatures, kFeatures);
    torch::nn::Linear discriminator(kFeatures, 1);
    torch::optim::SGD generates(generator->parameters(), 0.1);
    torch::optim::SGD discriminates(discriminator->parameters(), 0.1);
    const auto freeze = [&](bool frozen) {
      for (auto& each : discriminator->parameters()) each.set_requires_grad(!frozen);
    };
    std::vector<float> losses;
    const auto judge = [&](const Tensor& input) {
      const Autocast<kCPU> autocast(options);
      const auto loss = torch::linear(input, discriminator->weight).to(torch::kFloat).pow(2).mean();
      losses.push_back(loss.item<float>());
      return loss;
    };
    const auto in_full_precision = [&](const Tensor& input) {
      return discriminator(input).pow(2).mean();
    };
    for (int step = 0; step < 6; ++step) {
      freeze(true);
      generates.zero_grad();
      judge(generator(torch::randn({3, kFeatures}))).backward();
      generates.step();
      freeze(false);
      discriminates.zero_grad();
      (in_full_precision(generator(torch::randn({3, kFeatures})).detach()) -
       in_full_precision(torch::randn({3, kFeatures})))
          .backward();
      discriminates.step();
      discriminates.zero_grad();
    }
    return losses;
  };
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  EXPECT_EQ(train({.cache = cache}), train({.cache = false}));
}

/// Ways to write to the memory of a weight under another version.
struct SharedMemory {
  const char* name;
  std::function<Tensor(Tensor&)> share;  // returns what shares it
};

std::vector<SharedMemory> ways_to_share() {
  return {
      {"PartOfAFlatBuffer",
       [](Tensor& weight) {
         const auto flat = torch::randn({3 * kFeatures * kFeatures});
         weight.set_data(flat.narrow(0, kFeatures * kFeatures, kFeatures * kFeatures)
                             .view({kFeatures, kFeatures}));
         return flat;
       }},
      {"WholeFlatBuffer",
       [](Tensor& weight) {
         const auto flat = torch::randn({kFeatures * kFeatures});
         weight.set_data(flat.view({kFeatures, kFeatures}));
         return flat;
       }},
      {"AnotherParameter",
       [](Tensor& weight) {
         auto other = torch::randn({kFeatures, kFeatures}).requires_grad_();
         other.set_data(weight);
         return other;
       }},
      {"DataThatIsKept", [](Tensor& weight) { return weight.data(); }},
  };
}

class UnseenWritesToMemory : public testing::TestWithParam<SharedMemory> {};

TEST_P(UnseenWritesToMemory, AreNoticedInAFrozenWeight) {
  for (const bool one_region : {true, false}) {
    const WeightCache cache = mezzo::install_op_overrides(WeightCache());
    auto weight = torch::randn({kFeatures, kFeatures});
    std::optional<Autocast<kCPU>> region;
    if (one_region) region.emplace(mezzo::AutocastSetting{.cache = cache});
    evaluate(cache, weight);
    const auto shared = GetParam().share(weight);
    for (int write = 0; write < 3; ++write) {
      evaluate(cache, weight);
      const torch::NoGradGuard no_grad;
      shared.add_(1);
    }
    evaluate(cache, weight);
  }
}

TEST_P(UnseenWritesToMemory, AreNoticedInATrainableWeightBetweenRegions) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  auto weight = torch::randn({kFeatures, kFeatures}).requires_grad_();
  const auto shared = GetParam().share(weight);
  for (int write = 0; write < 3; ++write) {
    evaluate(cache, weight);
    const torch::NoGradGuard no_grad;
    shared.add_(1);
  }
  evaluate(cache, weight);
}

INSTANTIATE_TEST_SUITE_P(Through, UnseenWritesToMemory, testing::ValuesIn(ways_to_share()),
                         [](const auto& way) { return way.param.name; });

TEST(TrainableWeights, AreCastOnceForTheUsesOfOneGraph) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  torch::nn::Linear cell(kFeatures, kFeatures);
  const Autocast<kCPU> autocast({.cache = cache});
  {
    const torch::NoGradGuard no_grad;
    cell(torch::randn({2, kFeatures}));
  }
  auto state = torch::randn({2, kFeatures});
  for (int step = 0; step < 10; ++step) state = cell(state);
  EXPECT_LE(cache.statistics().casts, 4);  // for the evaluation and for the graph
  EXPECT_GE(cache.statistics().hits, 18);
}

}  // namespace
