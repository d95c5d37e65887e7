// An optimizer that stands on GradBuckets: the scaler's check takes what they have read.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace {

using mezzo::GradBuckets;
using mezzo::GradBucketsOptions;
using mezzo::GradStorage;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;

torch::nn::Sequential model() {
  torch::manual_seed(4);
  return torch::nn::Sequential(torch::nn::Linear(12, 30), torch::nn::Tanh(),
                               torch::nn::Linear(30, 5));
}

class OnBuckets : public testing::TestWithParam<GradBucketsOptions> {};

/// Ten steps with clipping, every fourth of which overflows; returns the last norm.
double train(torch::nn::Sequential& net, AdamW& optimizer, bool zero_grad) {
  mezzo::GradScaler scaler(mezzo::GradScalerOptions().init_scale(1024));
  double norm = 0;
  for (int i = 0; i < 10; ++i) {
    if (!zero_grad) optimizer.zero_grad(/*set_to_none=*/i % 2 == 0);
    const double factor = i % 4 == 3 ? std::numeric_limits<double>::infinity() : 1.0;
    torch::manual_seed(i);
    const auto loss = net->forward(torch::randn({7, 12})).square().mean() * factor;
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 0.5, .zero_grad = zero_grad});
    if (result.ran()) norm = *result.grad_norm();
    scaler.update();
  }
  return norm;
}

TEST_P(OnBuckets, TrainsAsOnParametersToTheBit) {
  for (const bool zero_grad : {false, true}) {
    auto plain = model();
    AdamW on_parameters(plain->parameters(), AdamWOptions(1e-2));
    const double norm = train(plain, on_parameters, zero_grad);

    auto bucketed = model();
    GradBuckets buckets(bucketed->parameters(), GetParam());
    AdamW on_buckets(buckets, AdamWOptions(1e-2));
    EXPECT_NEAR(train(bucketed, on_buckets, zero_grad), norm, 1e-12 * norm);
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(plain->parameters()[i], bucketed->parameters()[i])) << i;
    }
    EXPECT_EQ(on_buckets.applied_steps(), 8);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, OnBuckets,
    testing::Values(GradBucketsOptions(), GradBucketsOptions().storage(GradStorage::flat),
                    GradBucketsOptions().check_during_backward(true),
                    GradBucketsOptions().storage(GradStorage::flat).check_during_backward(true)));

/// The check takes the hooks' word: a write that nobody can see stays unseen.
TEST(OptimizerOnBuckets, ReadsNothingAgainThatWasReadDuringBackward) {
  const auto parameter = torch::ones({3}).requires_grad_();
  GradBuckets buckets({parameter}, GradBucketsOptions().check_during_backward(true));
  AdamW optimizer(buckets, AdamWOptions(1e-2));
  mezzo::GradScaler scaler;
  scaler.scale(parameter.sum()).backward();
  parameter.grad().data_ptr<float>()[1] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
  optimizer.zero_grad();
  scaler.scale(parameter.sum()).backward();
  parameter.mutable_grad().mul_(std::numeric_limits<double>::infinity());
  EXPECT_FALSE(scaler.step(optimizer).ran());
}

TEST(OptimizerOnBuckets, SeesTheGradientsOfGroupsThatAreAddedLater) {
  const auto first = torch::ones({3}).requires_grad_();
  const auto later = torch::ones({4}).requires_grad_();
  GradBuckets buckets({first}, GradBucketsOptions().storage(GradStorage::flat));
  AdamW optimizer(buckets, AdamWOptions(1e-2));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
  mezzo::GradScaler scaler;
  scaler.scale(first.sum() + later.sum() * std::numeric_limits<double>::infinity()).backward();
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_EQ(buckets.parameters().size(), 2U);
}

// The one that was there lies in the buckets still, with its gradient.
TEST(OptimizerOnBuckets, SeesTheGradientOfAParameterThatTookAnothersPlace) {
  const auto kept = torch::ones({3}).requires_grad_();
  const auto old = torch::ones({3}).requires_grad_();
  const auto young = torch::ones({3}).requires_grad_();
  GradBuckets buckets({kept, old});
  AdamW optimizer(buckets, AdamWOptions(1e-2));
  mezzo::GradScaler scaler(mezzo::GradScalerOptions().init_scale(1));
  (kept.sum() + old.sum()).backward();
  (void)scaler.scale(torch::zeros({}));
  EXPECT_NEAR(*scaler.step(optimizer).grad_norm(), std::sqrt(6.0), 1e-12);
  scaler.update();
  optimizer.param_groups()[0].params()[1] = young;
  young.mutable_grad() = torch::full({3}, 2.0F);
  EXPECT_NEAR(*scaler.step(optimizer).grad_norm(), std::sqrt(15.0), 1e-12);
  scaler.update();
  young.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(scaler.step(optimizer).ran());
}

TEST(OptimizerOnBuckets, OutlivesThem) {
  const auto parameter = torch::ones({3}).requires_grad_();
  auto buckets = std::make_unique<GradBuckets>(std::vector{parameter},
                                               GradBucketsOptions().check_during_backward(true));
  AdamW optimizer(*buckets, AdamWOptions(1e-2));
  buckets.reset();
  mezzo::GradScaler scaler;
  for (const double factor : {1.0, std::numeric_limits<double>::infinity()}) {
    optimizer.zero_grad();
    scaler.scale(parameter.sum() * factor).backward();
    EXPECT_EQ(scaler.step(optimizer).ran(), factor == 1.0);
    scaler.update();
  }
}

}  // namespace
