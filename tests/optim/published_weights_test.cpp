// An optimizer that writes the low-precision weights itself: regions find them, and cast nothing.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace {

using mezzo::WeightCache;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using testing::HasSubstr;
using testing::ThrowsMessage;

class PublishedWeights : public testing::TestWithParam<torch::ScalarType> {
 protected:
  PublishedWeights() { optimizer_.publish_to(cache_, GetParam()); }

  void backward(double factor = 1.0) {
    optimizer_.zero_grad();
    const mezzo::AutocastGuard autocast(
        {.device = torch::kCPU, .dtype = GetParam(), .cache = cache_});
    (first_->forward(torch::randn({4, 24})).sum() * factor).backward();
  }

  void expect_current() const {
    for (const auto& parameter : first_->parameters()) {
      ASSERT_TRUE(cache_.holds(parameter, GetParam()));
      const auto before = cache_.statistics();
      EXPECT_TRUE(torch::equal(cache_.buffer_for(parameter, GetParam()),
                               parameter.detach().to(GetParam())));
      EXPECT_EQ(cache_.statistics().casts, before.casts);
    }
  }

  torch::nn::Linear first_{24, 17};
  WeightCache cache_ = mezzo::install_op_overrides(WeightCache());
  AdamW optimizer_{first_->parameters(), AdamWOptions(1e-2)};
};

TEST_P(PublishedWeights, AreTheNewWeightsRoundedToNearestAfterEveryStep) {
  for (int step = 0; step < 3; ++step) {
    backward();
    optimizer_.step();
    expect_current();
  }
}

TEST_P(PublishedWeights, StayRightThroughASkippedStep) {
  backward();
  optimizer_.step();
  mezzo::GradScaler scaler;
  (void)scaler.scale(torch::zeros({}));
  backward(std::numeric_limits<double>::infinity());
  EXPECT_FALSE(scaler.step(optimizer_).ran());
  expect_current();
}

TEST_P(PublishedWeights, AreCastAnewAfterSomebodyElseWroteTheWeights) {
  backward();
  optimizer_.step();
  {
    const torch::NoGradGuard no_grad;
    first_->weight.fill_(0.7);
  }
  EXPECT_FALSE(cache_.holds(first_->weight, GetParam()));
  backward();
  optimizer_.step();
  expect_current();
}

TEST_P(PublishedWeights, AreTheRegionsAffairAgainAfterPublishingHasStopped) {
  backward();
  optimizer_.step();
  optimizer_.stop_publishing();
  expect_current();
  backward();
  optimizer_.step();
  for (const auto& parameter : first_->parameters()) {
    EXPECT_FALSE(cache_.holds(parameter, GetParam())) << "written, and no copy with it";
  }
  const auto casts = cache_.statistics().casts;
  backward();
  EXPECT_EQ(cache_.statistics().casts, casts + 2);
  optimizer_.publish_to(cache_, GetParam());
  optimizer_.step();
  expect_current();
}

INSTANTIATE_TEST_SUITE_P(Of, PublishedWeights, testing::Values(torch::kBFloat16, torch::kHalf),
                         [](const auto& test) { return torch::toString(test.param); });

TEST(PublishToCache, LeavesNoWeightToCastInATrainingStep) {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 8));
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  AdamW optimizer(model->parameters(), AdamWOptions(1e-2));
  optimizer.publish_to(cache, torch::kBFloat16);
  const auto input = torch::randn({5, 16}).to(torch::kBFloat16);
  int64_t casts = 0;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    cache.reset_statistics();
    {
      const mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
      model->forward(input).to(torch::kFloat).square().mean().backward();
    }
    casts = cache.statistics().casts;
    optimizer.step();
  }
  EXPECT_EQ(casts, 0);
}

TEST(PublishToCache, TrainsAsWithoutToTheBit) {
  const auto train = [](bool publishes) {
    torch::manual_seed(1);
    torch::nn::Linear model(16, 8);
    const WeightCache cache = mezzo::install_op_overrides(WeightCache());
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2));
    if (publishes) optimizer.publish_to(cache, torch::kBFloat16);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      {
        const mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
        model->forward(torch::randn({4, 16})).to(torch::kFloat).square().mean().backward();
      }
      optimizer.step();
    }
    return model->weight.detach().clone();
  };
  EXPECT_TRUE(torch::equal(train(true), train(false)));
}

TEST(PublishToCache, LeavesOutWhatIsNotFloatOrNotDense) {
  const auto doubles = torch::ones({6}, torch::kDouble).requires_grad_();
  const auto gaps = torch::ones({6, 8}).slice(1, 0, 8, 2).requires_grad_();
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  AdamW optimizer({doubles, gaps}, AdamWOptions(1e-2));
  optimizer.publish_to(cache, torch::kBFloat16);
  {
    const mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
    torch::linear(torch::ones({1, 4}), gaps).sum().backward();
  }
  doubles.mutable_grad() = torch::ones({6}, torch::kDouble);
  optimizer.step();
  EXPECT_LT(gaps.max().item<float>(), 1);
  EXPECT_EQ(cache.statistics().published, 0);
}

TEST(PublishToCache, LeavesOutWhatNoRegionAsksFor) {
  torch::nn::Embedding words(50, 16);
  torch::nn::Linear head(16, 4);
  auto parameters = head->parameters();
  parameters.push_back(words->weight);
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  AdamW optimizer(parameters, AdamWOptions(1e-2));
  optimizer.publish_to(cache, torch::kBFloat16);
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    {
      const mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
      head->forward(words->forward(torch::arange(9))).to(torch::kFloat).sum().backward();
    }
    optimizer.step();
  }
  EXPECT_TRUE(cache.is_asked_for(head->weight, torch::kBFloat16));
  EXPECT_FALSE(cache.is_asked_for(head->weight, torch::kHalf));
  EXPECT_FALSE(cache.is_asked_for(words->weight, torch::kBFloat16));
  EXPECT_TRUE(cache.holds(head->weight, torch::kBFloat16));
  EXPECT_FALSE(cache.holds(words->weight, torch::kBFloat16));
}

TEST(PublishToCache, LeavesOutAViewOfAllOfAnotherWeight) {
  torch::nn::Linear model(6, 4);
  torch::Tensor view;
  {
    const torch::NoGradGuard no_grad;
    view = model->weight.view({24}).requires_grad_();
  }
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  AdamW optimizer({view}, AdamWOptions(1e-2));
  optimizer.publish_to(cache, torch::kBFloat16);
  {
    const mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
    model->forward(torch::randn({3, 6})).sum().backward();
  }
  view.mutable_grad() = torch::ones({24});
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_EQ(cache.statistics().published, 0);
}

TEST(PublishToCache, RefusesADtypeThatAutocastDoesNotHave) {
  const WeightCache cache = mezzo::install_op_overrides(WeightCache());
  const auto parameter = torch::ones({1}).requires_grad_();
  AdamW optimizer({parameter}, AdamWOptions(1e-2));
  EXPECT_THAT([&] { optimizer.publish_to(cache, torch::kDouble); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("publish_to: dtype is Double; it should be torch::kBFloat16")));
}

}  // namespace
