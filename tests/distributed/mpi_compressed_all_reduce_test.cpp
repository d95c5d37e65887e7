#include <torch/torch.h>
//
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/scaling/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "ranks.h"
#include "recording_ranks.h"
#include "some_ranks.h"

// Each rank knows the gradients of all, and so what must arrive.
namespace compressed_all_reduce_test {
namespace {

using distributed_test::all_gather;
using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::Ranks;
using distributed_test::recording_ranks;
using mezzo::GradAllReduce;
using mezzo::GradAllReduceOptions;
using mezzo::GradBuckets;
using mezzo::GradBucketsOptions;
using test_support::error_of;

constexpr float kInf = std::numeric_limits<float>::infinity();

Ranks mpi_world() { return everyone(); }

GradBucketsOptions buckets_of(int64_t bytes) { return {.bucket_bytes = bytes}; }

/// A parameter whose gradient is whatever a pass is told.
struct Told {
  explicit Told(const Ranks& world, const GradAllReduceOptions& options, int64_t count = 1000,
                at::ScalarType dtype = at::kFloat)
      : weight(at::zeros({count}, dtype).requires_grad_()),
        buckets({weight}, buckets_of(1 << 20)),
        all_reduce(buckets, world, options) {}

  at::Tensor pass(const at::Tensor& gradient) {
    buckets.zero_grad();
    (weight * gradient).sum().backward();
    return weight.grad();
  }

  at::Tensor weight;
  GradBuckets buckets;
  GradAllReduce all_reduce;
};

/// The gradient of a rank, of magnitudes over six decades.
at::Tensor told_gradient(int rank, int64_t count = 1000, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(40 + rank);
  return (at::randn({count}, at::kDouble) * at::exp(at::randn({count}, at::kDouble) * 2)).to(dtype);
}

/// Gloo rounds each partial sum of more than two ranks to 16 bits.
bool rounds_once() {
  return !distributed_test::is_over_gloo() || distributed_test::world_size() <= 2;
}

/// What arrives, from its definition: parts rounded to `sent`, added up in float, rounded once.
at::Tensor expected_sum(int ranks, at::ScalarType dtype, at::ScalarType sent, bool average) {
  at::Tensor sum = at::zeros({1000});
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor part = told_gradient(rank, 1000, dtype).to(at::kDouble) / ranks;
    sum = sum + part.to(at::kFloat).to(sent).to(at::kFloat);
  }
  const at::Tensor arrived = sum.to(sent).to(dtype);
  return average ? arrived : arrived * ranks;
}

TEST(CompressedAllReduce, GivesTheSumOfRoundedPartsRoundedOnce) {
  if (!rounds_once()) GTEST_SKIP() << "Gloo rounds more often";
  Ranks world = mpi_world();
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto sent : {at::kBFloat16, at::kHalf}) {
      for (const bool average : {true, false}) {
        Told told(world, {.average = average, .compress_dtype = sent}, 1000, dtype);
        const at::Tensor arrived = told.pass(told_gradient(world->getRank(), 1000, dtype));
        EXPECT_EQ(arrived.scalar_type(), dtype);
        EXPECT_TRUE(at::equal(arrived, expected_sum(world->getSize(), dtype, sent, average)))
            << dtype << sent << average;
      }
    }
  }
}

TEST(CompressedAllReduce, WithFeedbackTheFirstPassIsTheSame) {
  Ranks world = mpi_world();
  for (const auto sent : {at::kBFloat16, at::kHalf}) {
    Told told(world, {.average = false, .compress_dtype = sent, .error_feedback = true});
    EXPECT_TRUE(at::equal(told.pass(told_gradient(world->getRank())),
                          expected_sum(world->getSize(), at::kFloat, sent, false)));
  }
}

TEST(CompressedAllReduce, SendsHalfTheBytesOfFloat) {
  std::vector<int64_t> bytes;
  for (const GradAllReduceOptions& options :
       {GradAllReduceOptions{}, GradAllReduceOptions{.compress_dtype = at::kHalf},
        GradAllReduceOptions{.compress_dtype = at::kBFloat16, .error_feedback = true}}) {
    int64_t& sent = bytes.emplace_back(0);
    const auto count = [&](const std::string& collective, const at::Tensor& tensor) {
      if (tensor.scalar_type() == at::kByte) return;  // which parameters have a gradient
      // An all-reduce goes over the wire twice, as a reduce-scatter and an all-gather.
      sent += static_cast<int64_t>(tensor.nbytes()) *
              (collective == "sum" || collective == "average" ? 2 : 1);
    };
    Told told(recording_ranks(mpi_world(), count), options, 1024);
    sent = 0;  // of the comparison of options
    told.pass(at::ones({1024}));
  }
  EXPECT_THAT(bytes, testing::ElementsAre(2 * 4096, 2 * 2048, 2 * 2048));
}

/// The largest error of the mean over `steps` passes of one gradient, relative to the gradient.
double error_of_the_mean(const Ranks& world, const GradAllReduceOptions& options, int steps) {
  Told told(world, options);
  at::Tensor wanted = at::zeros({1000}, at::kDouble), mean = at::zeros({1000}, at::kDouble);
  for (int rank = 0; rank < world->getSize(); ++rank) {
    wanted += (told_gradient(rank).abs() + 0.1).to(at::kDouble) / world->getSize();
  }
  const at::Tensor own = told_gradient(world->getRank()).abs() + 0.1;
  for (int step = 0; step < steps; ++step) mean += told.pass(own) / steps;
  return ((mean - wanted).abs() / wanted).max().item<double>();
}

TEST(CompressedAllReduce, WithFeedbackTheErrorOfTheMeanGoesToZero) {
  Ranks world = mpi_world();
  for (const auto sent : {at::kBFloat16, at::kHalf}) {
    const double ulp = sent == at::kBFloat16 ? 1. / 256 : 1. / 2048;  // a rounding loses half of it
    GradAllReduceOptions options{.compress_dtype = sent};
    EXPECT_GT(error_of_the_mean(world, options, 64), ulp / 4) << "what rounding loses is lost";
    options.error_feedback = true;
    for (const int steps : {4, 128}) {
      // The two residuals that are left, of which each is at most half a unit of the last place.
      EXPECT_LT(error_of_the_mean(world, options, steps), 2.1 * ulp / steps) << sent;
    }
  }
}

TEST(CompressedAllReduce, OverflowsOnlyWhereTheAverageDoes) {
  Ranks world = mpi_world();
  for (const bool feedback : {false, true}) {
    Told sum(world, {.average = false, .compress_dtype = at::kHalf, .error_feedback = feedback});
    const auto ranks = static_cast<float>(world->getSize());
    const at::Tensor most = sum.pass(at::full({1000}, 65504.F));
    EXPECT_TRUE(at::equal(most, at::full({1000}, 65504.F * ranks)));

    // More than half can hold on one rank, not on average.
    Told told(world, {.compress_dtype = at::kHalf, .error_feedback = feedback});
    const at::Tensor one = told.pass(at::full({1000}, world->getRank() == 0 ? 120000.F : 0.F));
    const float average = world->getSize() == 1 ? kInf : 120000.F / ranks;
    EXPECT_TRUE(at::allclose(one, at::full({1000}, average), 1e-3)) << one[0];

    const at::Tensor too_much = told.pass(at::full({1000}, -70000.F));
    EXPECT_TRUE(at::equal(too_much, at::full({1000}, -kInf)));
  }
}

TEST(CompressedAllReduce, TheCheckAfterItFindsWhatOverflowedAndWhatWasInfOnOneRank) {
  Ranks world = mpi_world();
  for (const bool feedback : {false, true}) {
    for (const float bad : {70000.F, kInf, std::nanf("")}) {
      const at::Tensor weight = at::zeros({40}).requires_grad_();
      GradBuckets buckets({weight}, buckets_of(1 << 20));
      const GradAllReduce all_reduce(buckets, world,
                                     {.compress_dtype = at::kHalf, .error_feedback = feedback});
      torch::optim::SGD optimizer({weight}, 0.1);
      mezzo::GradScaler scaler({.init_scale = 4.0});
      scaler.on_skip(nullptr);
      const at::Tensor factor = at::full({40}, 0.25F);
      // An average that overflows in half alone takes all ranks; an inf or NaN one.
      if (bad == 70000.F || world->getRank() == world->getSize() - 1) factor[17] = bad / 4;
      scaler.scale((weight * factor).sum()).backward();
      EXPECT_FALSE(scaler.step(optimizer).ran()) << bad << " on rank " << world->getRank();
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 2.0);
      EXPECT_EQ(weight.grad()[3].item<float>(), 0.25F) << "the others are what they are";
    }
  }
}

TEST(CompressedAllReduce, NothingOfAPassWithAnInfReachesTheNextOne) {
  Ranks world = mpi_world();
  for (const float bad : {kInf, std::nanf(""), 3e38F}) {
    const GradAllReduceOptions options{.compress_dtype = at::kHalf, .error_feedback = true};
    Told told(world, options);
    at::Tensor gradient = told_gradient(world->getRank());
    told.pass(gradient);
    at::Tensor spoilt = gradient * 1e5;  // large values beside it, some of which half can hold
    if (world->getRank() == 0) spoilt[5] = bad;
    told.pass(spoilt);
    ASSERT_FALSE(at::isfinite(told.weight.grad()).all().item<bool>());
    for (const at::Tensor& residual : told.all_reduce.residuals()) {
      EXPECT_EQ(residual.abs().max().item<float>(), 0.F) << bad;
    }
    Told fresh(world, options);
    EXPECT_TRUE(at::equal(told.pass(gradient), fresh.pass(gradient)));
  }
}

TEST(CompressedAllReduce, AnInfInOneBucketDropsWhatAllBucketsLost) {
  Ranks world = mpi_world();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {  // the second is sent as it is
    const at::Tensor a = at::zeros({64}).requires_grad_();
    const at::Tensor b = at::zeros({64}, dtype).requires_grad_();
    GradBuckets buckets({a, b}, buckets_of(256));
    ASSERT_EQ(buckets.buckets().size(), 2U);
    const GradAllReduce all_reduce(buckets, world,
                                   {.compress_dtype = at::kBFloat16, .error_feedback = true});
    const auto lost = [&] {
      double most = 0;
      for (const auto& residual : all_reduce.residuals()) {
        most = std::max(most, residual.abs().max().item<double>());
      }
      return most;
    };
    const at::Tensor gradient = told_gradient(world->getRank(), 64);
    ((a * gradient).sum() + (b * gradient.to(dtype)).sum()).backward();
    EXPECT_GT(lost(), 0.);
    buckets.zero_grad();
    const float bad = world->getRank() == world->getSize() - 1 ? kInf : 1.F;
    ((a * gradient).sum() + (b * bad).sum()).backward();
    EXPECT_EQ(lost(), 0.) << dtype;
  }
}

TEST(CompressedAllReduce, WhatWasLostSurvivesAChangeOfTheLossScale) {
  Ranks world = mpi_world();
  double scale = 1;
  const auto gradient_of = [&](int rank) { return told_gradient(rank).abs() + 0.1; };
  at::Tensor wanted = at::zeros({1000}, at::kDouble), mean = wanted.clone();
  for (int rank = 0; rank < world->getSize(); ++rank)
    wanted += gradient_of(rank) / world->getSize();
  Told told(world, {.compress_dtype = at::kBFloat16, .error_feedback = true, .loss_scale = [&] {
                      return at::scalar_tensor(scale);
                    }});
  constexpr int kSteps = 128;
  for (int step = 0; step < kSteps; ++step) {
    scale = step % 3 == 0 ? 65536 : step % 3 == 1 ? 1 : 1024;
    mean += told.pass(gradient_of(world->getRank()) * scale) / (scale * kSteps);
  }
  EXPECT_LT(((mean - wanted).abs() / wanted).max().item<double>(), 2.1 / 256 / kSteps);
}

TEST(CompressedAllReduce, ALossScaleThatIsNoneIsRefused) {
  Ranks world = mpi_world();
  at::Tensor scale = at::zeros({});
  const GradAllReduceOptions options{
      .compress_dtype = at::kHalf, .error_feedback = true, .loss_scale = [&] { return scale; }};
  Told zero(world, options);
  EXPECT_THAT(error_of([&] { zero.pass(at::ones({1000})); }),
              testing::HasSubstr("`loss_scale` must return a positive number, but returned 0"));
  scale = at::ones({2});
  Told two(world, options);
  EXPECT_THAT(error_of([&] { two.pass(at::ones({1000})); }),
              testing::HasSubstr("`loss_scale` must return a tensor of one element"));
}

TEST(CompressedAllReduce, ResidualsResumeARunToTheBit) {
  Ranks world = mpi_world();
  const GradAllReduceOptions options{.compress_dtype = at::kBFloat16, .error_feedback = true};
  Told told(world, options);
  const at::Tensor gradient = told_gradient(world->getRank());
  told.pass(gradient);
  told.pass(gradient);
  Told resumed(world, options), forgetful(world, options);
  const auto from = told.all_reduce.residuals(), to = resumed.all_reduce.residuals();
  ASSERT_EQ(from.size(), 2U);
  ASSERT_EQ(to.size(), 2U);
  for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  const at::Tensor next = told.pass(gradient);
  EXPECT_TRUE(at::equal(resumed.pass(gradient), next));
  EXPECT_FALSE(at::equal(forgetful.pass(gradient), next));
}

TEST(CompressedAllReduce, GradientsOfTwoBytesGoAsTheyAre) {
  Ranks world = mpi_world();
  const at::Tensor gradient = told_gradient(world->getRank(), 1000, at::kBFloat16);
  Told plain(world, {}, 1000, at::kBFloat16);
  for (const bool feedback : {false, true}) {
    Told told(world, {.compress_dtype = at::kHalf, .error_feedback = feedback}, 1000,
              at::kBFloat16);
    EXPECT_TRUE(at::equal(told.pass(gradient), plain.pass(gradient)));
    EXPECT_TRUE(told.all_reduce.residuals().empty());
  }
}

/// A shared layer, one that only rank 0 uses, one that nobody does, and a frozen one.
struct PartlyUsedImpl : torch::nn::Module {
  PartlyUsedImpl() {
    torch::manual_seed(3);
    in = register_module("in", torch::nn::Linear(8, 32));
    out = register_module("out", torch::nn::Linear(32, 4));
    sometimes = register_parameter("sometimes", torch::ones({4}));
    never = register_parameter("never", torch::ones({4}));
    frozen = register_parameter("frozen", torch::ones({4}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x, bool uses_it) {
    const at::Tensor y = out->forward(torch::tanh(in->forward(x))) + frozen;
    return uses_it ? y * sometimes : y;
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  at::Tensor sometimes, never, frozen;
};
TORCH_MODULE(PartlyUsed);

/// 50 steps of two micro-batches, each rank with a part of the data.
PartlyUsed trained(Ranks world, const GradAllReduceOptions& options) {
  PartlyUsed model;
  GradBuckets buckets(model->parameters(), buckets_of(512));
  const GradAllReduce all_reduce(buckets, world, options);
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  const auto backward = [&](int step) {
    torch::manual_seed(step * 64 + world->getRank());
    const at::Tensor x = torch::randn({8, 8});
    const at::Tensor wanted = x.narrow(1, 0, 4).sin();
    (torch::mse_loss(model->forward(x, world->getRank() == 0), wanted) / 2).backward();
  };
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    {
      const auto no_sync = buckets.no_sync();
      backward(2 * step);
    }
    backward(2 * step + 1);
    EXPECT_TRUE(model->sometimes.grad().defined());
    EXPECT_FALSE(model->never.grad().defined());
    optimizer.step();
  }
  return model;
}

at::Tensor weights(PartlyUsed& model) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.flatten());
  return at::cat(all).detach();
}

TEST(CompressedAllReduce, TrainingFollowsTrainingInFloatAndRanksStayAlike) {
  Ranks world = mpi_world();
  PartlyUsed in_float = trained(world, {});
  PartlyUsed untrained;
  const double moved = (weights(in_float) - weights(untrained)).norm().item<double>();
  for (const auto sent : {at::kBFloat16, at::kHalf}) {
    for (const bool feedback : {false, true}) {
      PartlyUsed model = trained(world, {.compress_dtype = sent, .error_feedback = feedback});
      const double apart = (weights(model) - weights(in_float)).norm().item<double>();
      EXPECT_LT(apart, (sent == at::kHalf ? 0.01 : 0.05) * moved) << sent << feedback;
      EXPECT_GT(apart, 0.);

      const at::Tensor bits = weights(model).view(at::kInt);
      const at::Tensor all = at::empty({world->getSize(), bits.numel()}, at::kInt);
      all_gather(world, all, bits);
      for (int rank = 0; rank < world->getSize(); ++rank) EXPECT_TRUE(at::equal(all[rank], bits));
    }
  }
}

TEST(CompressedAllReduce, WrongOptionsAreRefused) {
  Ranks world = mpi_world();
  const auto error = [&](const GradAllReduceOptions& options) {
    return error_of([&] { Told(world, options); });
  };
  EXPECT_THAT(error({.compress_dtype = at::kFloat}),
              testing::HasSubstr("`compress_dtype` must be bfloat16 or half, but is Float"));
  EXPECT_THAT(error({.error_feedback = true}), testing::HasSubstr("set compress_dtype too"));
  EXPECT_THAT(error({.compress_dtype = at::kHalf, .loss_scale = [] { return at::ones({}); }}),
              testing::HasSubstr("`loss_scale` is for `error_feedback`, which is off"));
}

}  // namespace
}  // namespace compressed_all_reduce_test
