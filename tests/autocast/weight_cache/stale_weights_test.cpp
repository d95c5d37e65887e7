// A copy of what a weight once was is never used, however the weight was changed.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/autocast/weight_cache.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kSide = 6;

struct Change {
  std::string name;
  std::function<void(Tensor&)> apply;  // under NoGradGuard
};

std::ostream& operator<<(std::ostream& stream, const Change& change) {
  return stream << change.name;
}

void write_raw(Tensor& weight) {
  const auto other = torch::randn_like(weight);
  std::memcpy(weight.mutable_data_ptr(), other.const_data_ptr(), other.nbytes());
  weight.unsafeGetTensorImpl()->bump_version();
}

void step_adamw(Tensor& weight) {
  weight.mutable_grad() = torch::randn_like(weight);
  torch::optim::AdamW({weight}, 0.5).step();
  weight.mutable_grad().reset();  // SGD would step a frozen weight that has one, unseen
}

std::vector<Change> changes() {
  return {
      {"AddInPlace", [](Tensor& w) { w.add_(1); }},
      {"Copy", [](Tensor& w) { w.copy_(torch::randn_like(w)); }},
      {"PartThroughAView", [](Tensor& w) { w[2].fill_(7); }},
      {"ThroughDetach", [](Tensor& w) { w.detach().mul_(3); }},
      {"IndexPut", [](Tensor& w) { w.index_put_({0}, torch::zeros({kSide})); }},
      {"SetData", [](Tensor& w) { w.set_data(torch::randn_like(w)); }},
      {"SetDataToAView",
       [](Tensor& w) {
         w.set_data(torch::randn({2, kSide, kSide})[1]);
       }},
      {"SetDataToItsTransposeInPlace", [](Tensor& w) { w.set_data(w.detach().t()); }},
      {"SetSource",
       [](Tensor& w) {
         w.detach().set_(torch::randn_like(w));
         w.add_(1);
       }},
      {"RawPointerWithVersion", write_raw},
      {"InInferenceMode",
       [](Tensor& w) {
         const c10::InferenceMode mode;
         w.add_(1);
       }},
      {"Optimizer", step_adamw},
      {"Init", [](Tensor& w) { torch::nn::init::xavier_uniform_(w); }},
  };
}

class StaleWeights : public testing::TestWithParam<Change> {
 protected:
  void change(Tensor& weight) {
    const torch::NoGradGuard no_grad;
    GetParam().apply(weight);
  }

  static void expect_fresh(const Tensor& weight) {
    for (int use = 0; use < 2; ++use) {
      EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
      EXPECT_TRUE(torch::equal(what_mm_reads(weight), weight.to(kBFloat16)));
      EXPECT_TRUE(torch::equal(what_mm_reads(weight.t()), weight.t().to(kBFloat16)));
    }
  }

  mezzo::WeightCache cache_ = mezzo::install_op_overrides(mezzo::WeightCache());
};

TEST_P(StaleWeights, AreNotReadInsideTheRegion) {
  for (const bool trainable : {true, false}) {
    auto weight = torch::randn({kSide, kSide}).set_requires_grad(trainable);
    if (!trainable) cache_.pin({weight});
    const Autocast<kCPU> autocast({.cache = cache_});
    expect_fresh(weight);
    const auto before = cache_.statistics();
    change(weight);
    EXPECT_FALSE(cache_.holds(weight, kBFloat16));
    {
      const torch::NoGradGuard no_graph_that_dies_at_once;
      expect_fresh(weight);
    }
    EXPECT_EQ(cache_.statistics().casts, before.casts + 1) << "trainable: " << trainable;
    expect_fresh(weight);
  }
}

TEST_P(StaleWeights, AreNotReadInALaterRegion) {
  for (const bool trainable : {true, false}) {
    auto weight = torch::randn({kSide, kSide}).set_requires_grad(trainable);
    if (!trainable) cache_.pin({weight});
    {
      const Autocast<kCPU> autocast({.cache = cache_});
      expect_fresh(weight);
    }
    change(weight);
    const Autocast<kCPU> autocast({.cache = cache_});
    expect_fresh(weight);
  }
}

TEST_P(StaleWeights, AreNotReadFromAPublishedCopy) {
  auto weight = torch::randn({kSide, kSide}).requires_grad_();
  cache_.publish(weight, cache_.buffer_for(weight, kBFloat16));
  const auto address = cache_.buffer_for(weight, kBFloat16).const_data_ptr();
  change(weight);
  EXPECT_FALSE(cache_.holds(weight, kBFloat16));
  const Autocast<kCPU> autocast({.cache = cache_});
  expect_fresh(weight);
  const bool as_before = weight.is_contiguous();
  EXPECT_EQ(cache_.buffer_for(weight, kBFloat16).const_data_ptr() == address, as_before);
}

INSTANTIATE_TEST_SUITE_P(After, StaleWeights, testing::ValuesIn(changes()),
                         [](const auto& change) { return change.param.name; });

TEST(StaleWeightsOfAModule, AreNotReadAfterItLoadsAState) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  torch::nn::Linear source(kSide, kSide);
  torch::nn::Linear target(kSide, kSide);
  std::stringstream stream;
  torch::save(source, stream);
  cache.pin(target->parameters());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto x = torch::randn({3, kSide});
  target(x);
  torch::load(target, stream);
  EXPECT_TRUE(torch::equal(target(x), source(x)));
}

TEST(StaleWeightsOfAModule, AreNotReadAfterItMovesToAnotherDtypeAndBack) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  torch::nn::Linear net(kSide, kSide);
  const auto x = torch::randn({3, kSide});
  cache.pin(net->parameters());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto before = net(x);
  net->to(torch::kDouble);
  EXPECT_EQ(net(x.to(torch::kDouble)).scalar_type(), torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    net->weight.mul_(2);
    net->bias.mul_(2);
  }
  net->to(torch::kFloat);
  EXPECT_TRUE(torch::equal(net(x), before * 2));
}

// A tensor that is allocated where a dead one was must not be taken for it.
TEST(StaleWeightsOfTheDead, AreNotReadThroughAReusedAddress) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  for (int i = 0; i < 200; ++i) {
    const auto weight = torch::full({kSide, kSide}, static_cast<float>(i)).requires_grad_();
    if (i % 2 == 0) cache.pin({weight});
    EXPECT_EQ(what_linear_reads(weight).max().item<float>(), static_cast<float>(i));
  }
}

TEST(StaleWeightsOfTheDead, AreNotReadThroughReusedMemory) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  auto weight = torch::zeros({kSide, kSide}).requires_grad_();
  for (int i = 0; i < 200; ++i) {
    i % 2 == 0 ? cache.pin({weight}) : cache.unpin();
    weight.set_data(torch::full({kSide, kSide}, static_cast<float>(i)));
    EXPECT_EQ(what_linear_reads(weight).max().item<float>(), static_cast<float>(i));
    weight.set_data(torch::zeros({1}));  // the allocator may now give the memory away
  }
}

std::vector<float> train_with_sgd(const mezzo::AutocastSetting& options, bool step_in_region) {
  torch::manual_seed(5);
  const auto weight = torch::randn({kSide, kSide}).requires_grad_();
  const auto x = torch::randn({3, kSide});
  torch::optim::SGD optimizer({weight}, 0.1);
  std::vector<float> losses;
  std::optional<Autocast<kCPU>> around;
  if (step_in_region) around.emplace(options);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    std::optional<Autocast<kCPU>> region(options);
    const auto loss =
        torch::linear(torch::linear(x, weight), weight).to(torch::kFloat).pow(2).mean();
    region.reset();
    losses.push_back(loss.item<float>());
    loss.backward();
    optimizer.step();
  }
  return losses;
}

// torch::optim::SGD writes through data(), which leaves no trace in the weight's version.
TEST(StaleWeightsOfSgd, AreNotReadAfterAStepBetweenRegions) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  EXPECT_EQ(train_with_sgd({.cache = cache}, false), train_with_sgd({.cache = false}, false));
  EXPECT_EQ(cache.statistics().casts, 5);
  EXPECT_EQ(cache.statistics().hits, 5);
}

TEST(StaleWeightsOfSgd, AreNotReadAfterABackwardPassAndAStepInsideTheRegion) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  EXPECT_EQ(train_with_sgd({.cache = cache}, true), train_with_sgd({.cache = false}, true));
  EXPECT_EQ(cache.statistics().casts, 5);
}

TEST(StaleWeightsOfSgd, AreNotReadAfterTheyAreFrozen) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  auto weight = torch::ones({kSide, kSide}).requires_grad_();
  const Autocast<kCPU> outer({.cache = cache});
  what_linear_reads(weight).sum().backward();
  torch::optim::SGD({weight}, 0.5).step();
  weight.set_requires_grad(false);
  EXPECT_TRUE(torch::equal(what_linear_reads(weight), weight.to(kBFloat16)));
}

// Where a parameter's memory is that of a tensor that requires no grad, as of a flat buffer.
TEST(StaleWeightsOfSgd, AreNotReadWhereAParameterShowsAllOfABuffer) {
  const auto transposed = [](const Tensor& weight) {
    return torch::matmul(torch::eye(kSide), weight.t()).t();
  };
  for (const auto& read : {std::function<Tensor(const Tensor&)>(what_linear_reads),
                           std::function<Tensor(const Tensor&)>(transposed)}) {
    const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
    const auto weight = torch::ones({kSide * kSide}).view({kSide, kSide}).requires_grad_();
    torch::optim::SGD optimizer({weight}, 0.5);
    for (int step = 0; step < 3; ++step) {
      for (int use = 0; use < 3; ++use) {
        const torch::NoGradGuard no_grad;  // an evaluation
        const Autocast<kCPU> autocast({.cache = cache});
        EXPECT_TRUE(torch::equal(read(weight), weight.to(kBFloat16)));
      }
      optimizer.zero_grad();
      {
        const Autocast<kCPU> autocast({.cache = cache});
        read(weight).sum().backward();
      }
      optimizer.step();
    }
  }
}

// A region that began earlier in another thread must not keep this thread's old copies alive.
TEST(StaleWeightsOfSgd, AreNotReadWhileAnotherThreadIsInARegion) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weight = torch::ones({kSide, kSide}).requires_grad_();
  std::promise<void> inside;
  std::promise<void> done;
  std::thread other([&] {
    const Autocast<kCPU> autocast({.cache = cache});
    what_linear_reads(weight);
    inside.set_value();
    done.get_future().wait();
  });
  inside.get_future().wait();
  weight.data().fill_(2);
  {
    const Autocast<kCPU> autocast({.cache = cache});
    EXPECT_EQ(what_linear_reads(weight).max().item<float>(), 2.F);
  }
  done.set_value();
  other.join();
}

TEST(StaleWeightsByHand, AreForgottenThroughAViewToo) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto weight = torch::ones({kSide, kSide});
  cache.pin({weight});
  what_linear_reads(weight);
  EXPECT_TRUE(cache.holds(weight.t(), kBFloat16));
  weight.data().fill_(2);
  cache.forget(weight.t());
  EXPECT_EQ(what_linear_reads(weight).max().item<float>(), 2.F);
}

// The one write that leaves no trace, and what to do about it.
TEST(StaleWeightsByHand, AreForgotten) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto weight = torch::ones({kSide, kSide}).requires_grad_();
  const auto published = torch::ones({kSide, kSide}).requires_grad_();
  cache.publish(published, cache.buffer_for(published, kBFloat16));
  what_linear_reads(weight);
  weight.data().fill_(2);
  published.data().fill_(2);
  cache.forget(weight);
  cache.forget(published);
  EXPECT_EQ(what_linear_reads(weight).max().item<float>(), 2.F);
  EXPECT_EQ(what_linear_reads(published).max().item<float>(), 2.F);
  weight.data().fill_(3);
  published.data().fill_(3);
  cache.clear();
  EXPECT_EQ(what_linear_reads(weight).max().item<float>(), 3.F);
  EXPECT_EQ(what_linear_reads(published).max().item<float>(), 3.F);
}

// What the plain libtorch cache does, for the record: if it changes, so may this library.
TEST(StaleWeightsOfLibtorch, AreReadWithinARegion) {
  const auto weight = torch::ones({kSide, kSide}).requires_grad_();
  const Autocast<kCPU> autocast;
  what_linear_reads(weight);
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  EXPECT_EQ(what_linear_reads(weight).max().item<float>(), 1.F);
}

// prelu is lowered on the CPU, scaled_dot_product_attention too; the latter does not ask the cache.
TEST(StaleWeightsOfOtherOps, AreNotReadEither) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const Autocast<kCPU> autocast({.cache = cache});
  const auto key = torch::ones({1, 1, 2, 4}).requires_grad_();
  const auto attend = [&] {
    return torch::scaled_dot_product_attention(key, key, key).max().item<float>();
  };
  EXPECT_EQ(attend(), 1.F);
  {
    const torch::NoGradGuard no_grad;
    key.add_(1);
  }
  EXPECT_EQ(attend(), 2.F);
}

}  // namespace
