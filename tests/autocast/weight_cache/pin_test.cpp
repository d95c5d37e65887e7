// Weights that the user pins: their writes show in their versions, by the user's word.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using mezzo::WeightCache;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::kHalf;
using torch::Tensor;

constexpr int64_t kPinnedSize = 4;

WeightCache installed_cache() { return mezzo::install_op_overrides(WeightCache()); }

Tensor unpinned_weight() { return torch::randn({kPinnedSize, kPinnedSize}); }

Tensor read_in_a_region(const WeightCache& cache, const Tensor& weight) {
  const Autocast<kCPU> autocast({.cache = cache});
  return what_linear_reads(weight);
}

TEST(PinnedWeights, AreCastOnceHoweverManyRegionsUseThem) {
  const auto cache = installed_cache();
  torch::nn::Linear linear(kPinnedSize, kPinnedSize);
  for (const bool trainable : {false, true}) {
    for (auto& each : linear->parameters()) each.set_requires_grad(trainable);
    cache.pin(linear->parameters());
    const auto input = torch::randn({2, kPinnedSize}).requires_grad_();
    for (int region = 0; region < 5; ++region) {
      const Autocast<kCPU> autocast({.cache = cache});
      linear(input * 1).sum().backward();  // a leaf that requires grad would be held as well
    }
    EXPECT_EQ(cache.statistics().casts, 2) << "weight and bias";
    EXPECT_EQ(cache.statistics().copies_held, 2);
    EXPECT_TRUE(cache.holds(linear->weight, kBFloat16));
  }
}

TEST(PinnedWeights, AreCastByNobodyButTheOpThatReadsThem) {
  const auto cache = installed_cache();
  const auto read = unpinned_weight();
  const auto unread = unpinned_weight();
  cache.pin({read, unread});
  EXPECT_EQ(cache.statistics().casts, 0);
  read_in_a_region(cache, read);
  EXPECT_EQ(cache.statistics().casts, 1);
  EXPECT_FALSE(cache.holds(unread, kBFloat16));
}

TEST(PinnedWeights, HaveACopyInEachDtype) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight();
  cache.pin({weight});
  for (int use = 0; use < 2; ++use) {
    EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
    const Autocast<kCPU, kHalf> autocast({.cache = cache});
    EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kHalf)));
  }
  EXPECT_EQ(cache.statistics().casts, 2);
}

TEST(PinnedWeights, AreCastAgainAfterAWriteThatShowsInTheirVersion) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight().requires_grad_();
  torch::optim::AdamW optimizer({weight}, 0.5);
  cache.pin({weight});
  for (int step = 1; step < 4; ++step) {
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const auto read = read_in_a_region(cache, weight);
      EXPECT_TRUE(torch::equal(read, weight.to(kBFloat16)));
      read.to(kFloat).pow(2).sum().backward();
    }
    optimizer.step();
    EXPECT_EQ(cache.statistics().casts, step) << "once a step";
  }
}

// torch::optim::SGD leaves no version, but the scaler that runs it knows.
TEST(PinnedWeights, AreCastAgainAfterAScalersStepOfTorchsSgd) {
  for (const bool enabled : {true, false}) {
    const auto cache = installed_cache();
    const auto weight = unpinned_weight().requires_grad_();
    torch::optim::SGD optimizer({weight}, 0.5);
    mezzo::GradScaler scaler({.enabled = enabled});
    cache.pin({weight});
    for (int step = 1; step < 5; ++step) {
      const auto read = read_in_a_region(cache, weight);
      EXPECT_TRUE(torch::equal(read, weight.to(kBFloat16))) << "step " << step;
      optimizer.zero_grad();
      scaler.scale(read.to(kFloat).pow(2).sum()).backward();
      if (step % 2 == 0) {
        scaler.step(optimizer);
      } else {
        scaler.step(optimizer, {.max_norm = 1.0});
      }
      scaler.update();
      EXPECT_EQ(cache.statistics().casts, step) << "once a step";
    }
  }
}

/// Writes the weights and then throws.
class ThrowingSgd : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    torch::optim::SGD::step(std::move(closure));
    throw std::runtime_error("half-way");
  }
};

TEST(PinnedWeights, AreCastAgainAfterAScalersStepThatThrows) {
  for (const bool enabled : {true, false}) {
    const auto cache = installed_cache();
    const auto weight = unpinned_weight().requires_grad_();
    ThrowingSgd optimizer({weight}, 0.5);
    mezzo::GradScaler scaler({.enabled = enabled});
    cache.pin({weight});
    scaler.scale(read_in_a_region(cache, weight).to(kFloat).pow(2).sum()).backward();
    EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
    EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
  }
}

// MasterWeights steps float weights by the optimizer that it holds.
TEST(PinnedWeights, AreCastAgainAfterAStepOfMasterWeightsOfTorchsSgd) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight().requires_grad_();
  torch::optim::SGD sgd({weight}, 0.5);
  mezzo::MasterWeights optimizer(sgd);
  mezzo::GradScaler scaler;
  cache.pin({weight});
  for (int step = 1; step < 4; ++step) {
    const auto read = read_in_a_region(cache, weight);
    EXPECT_TRUE(torch::equal(read, weight.to(kBFloat16))) << "step " << step;
    sgd.zero_grad();
    scaler.scale(read.to(kFloat).pow(2).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  }
}

// By the promise of a pin there are no such writes, so this is what a broken promise gives.
TEST(PinnedWeights, AreReadAsTheyWereAfterAWriteThatLeavesNoVersionUntilItIsForgotten) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight();
  cache.pin({weight});
  const auto before = read_in_a_region(cache, weight);
  weight.data().add_(1);
  EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), before));
  cache.forget(weight);
  EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
  EXPECT_TRUE(cache.holds(weight, kBFloat16)) << "the pin stays";
}

TEST(UnpinnedWeights, HaveNoCopiesThatOutliveTheRegion) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight();
  const auto other = unpinned_weight();
  const auto trainable = unpinned_weight().requires_grad_();
  const std::vector<Tensor> all = {weight, other, trainable};
  cache.pin(all);
  for (const auto& each : all) read_in_a_region(cache, each);
  cache.unpin({weight, trainable, Tensor()});
  EXPECT_FALSE(cache.holds(weight, kBFloat16));
  EXPECT_TRUE(cache.holds(other, kBFloat16));
  EXPECT_EQ(cache.statistics().copies_held, 1);
  for (const auto& each : all) {
    each.data().add_(1);
    if (!each.is_same(other)) {
      EXPECT_TRUE(torch::equal(read_in_a_region(cache, each), each.to(kBFloat16)));
    }
  }
  cache.unpin();
  EXPECT_EQ(cache.statistics().copies_held, 0);
  EXPECT_TRUE(torch::equal(read_in_a_region(cache, other), other.to(kBFloat16)));
}

TEST(UnpinnedWeights, KeepTheirPublishedCopies) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight().requires_grad_();
  cache.pin({weight});
  cache.publish(weight, cache.buffer_for(weight, kBFloat16));
  cache.unpin();
  EXPECT_TRUE(cache.holds(weight, kBFloat16));
}

// A state is loaded, say, after the last step.
TEST(PinnedWeights, AreCastIntoTheirPublishedCopiesWhenTheseAreStale) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight();
  cache.pin({weight});
  const auto buffer = cache.buffer_for(weight, kBFloat16);
  weight.add_(1);
  const auto casts = cache.statistics().casts;
  for (int use = 0; use < 3; ++use) {
    EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
  }
  EXPECT_TRUE(torch::equal(buffer, weight.to(kBFloat16)));
  EXPECT_TRUE(cache.buffer_for(weight, kBFloat16).is_same(buffer));
  EXPECT_EQ(cache.statistics().casts, casts + 1);
}

TEST(PinnedWeights, MayBePinnedInsideTheRegionThatReadsThem) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight().requires_grad_();
  const Autocast<kCPU> autocast({.cache = cache});
  what_linear_reads(weight);
  cache.pin({weight});
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
  cache.unpin({weight});
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
}

TEST(PinnedWeights, ServeThreadsThatBeginLater) {
  const auto cache = installed_cache();
  const auto weight = unpinned_weight();
  cache.pin({weight});
  read_in_a_region(cache, weight);
  std::thread([&] {
    EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
  }).join();
  EXPECT_EQ(cache.statistics().casts, 1);
}

TEST(PinnedWeights, MayBeViewsOfAllOfAnotherTensor) {
  const auto cache = installed_cache();
  const auto flat = torch::randn({kPinnedSize * kPinnedSize});
  const auto weight = flat.view({kPinnedSize, kPinnedSize});
  cache.pin({weight});
  for (int use = 0; use < 2; ++use) {
    EXPECT_TRUE(torch::equal(read_in_a_region(cache, weight), weight.to(kBFloat16)));
    flat.add_(1);
  }
  EXPECT_EQ(cache.statistics().casts, 2);
  cache.unpin({weight});
  EXPECT_EQ(cache.statistics().copies_held, 0);
}

TEST(PinnedWeights, OfOtherDtypesAreLeftOut) {
  const auto cache = installed_cache();
  EXPECT_NO_THROW(cache.pin({torch::ones({2}, torch::kLong), unpinned_weight()}));
}

std::string error_of_pinning(const std::function<void()>& call) {
  try {
    call();
    return "no error";
  } catch (const c10::Error& error) {
    return error.what();
  }
}

TEST(PinnedWeights, AreRefusedWhereACopyCouldNotStandForThem) {
  const auto cache = installed_cache();
  const auto good = unpinned_weight();
  const auto refused = [&](const Tensor& weight, const std::string& words) {
    EXPECT_NE(error_of_pinning([&] { cache.pin({good, weight}); }).find(words), std::string::npos);
  };
  refused(Tensor(), "weight is undefined");
  refused(unpinned_weight().requires_grad_() * 2, "is no dense leaf");
  Tensor without_version;
  {
    const c10::InferenceMode inference;
    without_version = unpinned_weight();
  }
  refused(without_version, "inference mode");
  read_in_a_region(cache, good);
  EXPECT_FALSE(cache.holds(good, kBFloat16)) << "nothing was pinned";
}

}  // namespace
