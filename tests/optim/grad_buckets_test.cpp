#include <mezzo/optim/adamw.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "../support/message_of.h"

// GradBuckets preserves gradient values through any change of `.grad`.
namespace grad_buckets_test {
namespace {

using mezzo::GradBuckets;
using test_support::message_of;
using testing::HasSubstr;
using torch::Tensor;

Tensor make_leaf(torch::IntArrayRef sizes, torch::ScalarType dtype = torch::kFloat) {
  return torch::randn(sizes, dtype).requires_grad_();
}

/// A loss whose gradient is `weight` everywhere.
Tensor compute_loss(const std::vector<Tensor>& parameters, double weight = 1.0) {
  auto loss = torch::zeros({}, torch::kDouble);
  for (const auto& parameter : parameters) {
    loss = loss + weight * parameter.sum().to(torch::kDouble);
  }
  return loss;
}

/// Copies all gradients to the buckets. Returns the squared norm of the buffers, padding included.
double norm_sq(GradBuckets& buckets) {
  buckets.copy_grads_to_buckets();
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    sum += bucket.buffer.to(torch::kDouble).square().sum().item<double>();
    for (const std::size_t param_index : bucket.param_indices) {
      const Tensor& gradient = buckets.parameters()[param_index].grad();
      if (!gradient.defined()) continue;
      EXPECT_TRUE(gradient.storage().is_alias_of(bucket.buffer.storage())) << param_index;
      EXPECT_EQ(gradient.scalar_type(), bucket.dtype) << param_index;
    }
  }
  return sum;
}

TEST(GradBuckets, GroupsByDtypeInReverseOrder) {
  const std::vector<Tensor> parameters{make_leaf({16}), make_leaf({16}, torch::kBFloat16),
                                       make_leaf({16}), make_leaf({16}),
                                       make_leaf({4}, torch::kDouble)};
  const GradBuckets buckets(parameters, {.bucket_cap_bytes = 128});
  ASSERT_EQ(buckets.buckets().size(), 4U);
  const auto param_indices = [&](std::size_t i) { return buckets.buckets()[i].param_indices; };
  EXPECT_EQ(param_indices(0), (std::vector<std::size_t>{4}));
  EXPECT_EQ(buckets.buckets()[0].dtype, torch::kDouble);
  EXPECT_EQ(param_indices(1), (std::vector<std::size_t>{3, 2}));
  EXPECT_EQ(param_indices(2), (std::vector<std::size_t>{1}));
  EXPECT_EQ(param_indices(3), (std::vector<std::size_t>{0}));
  EXPECT_EQ(buckets.buckets()[1].buffer.numel(), 32);
}

TEST(GradBuckets, AlignsGradientsTo64Bytes) {
  const std::vector<Tensor> parameters{make_leaf({3}), make_leaf({20})};
  GradBuckets buckets(parameters);
  compute_loss(parameters, 2).backward();
  EXPECT_EQ(norm_sq(buckets), 4 * 23);
  const auto& flat = buckets.buckets()[0].buffer;
  EXPECT_EQ(parameters[0].grad().storage_offset(), 32);
  flat.mul_(0.5);  // as an all-reduce would
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::ones({3})));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({20})));
}

TEST(GradBuckets, PreservesGradientsOverSteps) {
  const std::vector<Tensor> parameters{make_leaf({3, 5}), make_leaf({7}, torch::kDouble),
                                       make_leaf({2, 2}, torch::kBFloat16),
                                       make_leaf({9}, torch::kHalf)};
  GradBuckets buckets(parameters);
  for (int step = 1; step <= 3; ++step) {
    if (step == 1) buckets.zero_grad();
    if (step == 2) buckets.zero_grad(/*set_to_none=*/false);
    for (const auto& parameter : parameters) {
      if (step == 3) parameter.mutable_grad().reset();
    }
    compute_loss(parameters, step).backward();
    compute_loss(parameters, step).backward();
    EXPECT_EQ(norm_sq(buckets), (15 + 7 + 4 + 9) * 4 * step * step);
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 2 * step)));
    }
  }
}

TEST(GradBuckets, CopiesReplacedGradientsIn) {
  const std::vector<Tensor> parameters{make_leaf({3, 4}), make_leaf({4}), make_leaf({3})};
  GradBuckets buckets(parameters);
  compute_loss(parameters).backward();
  buckets.copy_grads_to_buckets();
  const auto values = torch::randn({4, 3});
  parameters[0].mutable_grad() = values.t();  // other strides than the parameter
  parameters[1].mutable_grad() = torch::ones({1}).expand({4});
  parameters[2].mutable_grad() = torch::_neg_view(torch::ones({3}));
  EXPECT_NEAR(norm_sq(buckets), 7 + values.square().sum().item<double>(), 1e-5);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), values.t()));
  EXPECT_TRUE(parameters[0].grad().is_contiguous());
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({4})));
  EXPECT_TRUE(torch::equal(parameters[2].grad(), torch::full({3}, -1.0F)));
}

TEST(GradBuckets, PreservesSwappedGradients) {
  const std::vector<torch::Tensor> parameters{torch::zeros({3}).requires_grad_(),
                                              torch::zeros({3}).requires_grad_()};
  mezzo::GradBuckets buckets(parameters);
  for (int i = 0; i < 2; ++i) parameters[i].mutable_grad() = torch::full({3}, float(i + 1));
  buckets.copy_grads_to_buckets();
  std::swap(parameters[0].mutable_grad(), parameters[1].mutable_grad());
  buckets.copy_grads_to_buckets();
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::full({3}, 2.0F)));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::full({3}, 1.0F)));
  EXPECT_TRUE(parameters[0].grad().is_same(buckets.bucket_view(0)));
}

TEST(GradBuckets, ZeroesUnusedAndFrozenParams) {
  const std::vector<Tensor> parameters{make_leaf({3}), make_leaf({4}), torch::ones({5})};
  GradBuckets buckets(parameters);
  compute_loss(parameters).backward();
  EXPECT_EQ(norm_sq(buckets), 7);
  buckets.zero_grad();
  parameters[1].set_requires_grad(false);
  compute_loss(parameters).backward();
  EXPECT_EQ(norm_sq(buckets), 3) << "earlier contents are overwritten";
  EXPECT_FALSE(parameters[1].grad().defined());
}

TEST(GradBuckets, AcceptsAnyStridesAndSize) {
  const auto transposed = torch::randn({4, 3}).t().requires_grad_();
  const auto non_dense = torch::randn({4, 6}).slice(1, 0, 3).detach().requires_grad_();
  const std::vector<Tensor> parameters{transposed, non_dense, make_leaf({}), make_leaf({0, 3}),
                                       make_leaf({2, 3, 4, 5})
                                           .detach()
                                           .contiguous(torch::MemoryFormat::ChannelsLast)
                                           .requires_grad_()};
  GradBuckets buckets(parameters);
  for (int step = 0; step < 2; ++step) {
    buckets.zero_grad();
    auto loss = torch::zeros({});
    for (const auto& parameter : parameters) loss = loss + parameter.square().sum();
    loss.backward();
    double expected = 0;
    for (const auto& parameter : parameters) {
      expected += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    }
    EXPECT_NEAR(norm_sq(buckets), expected, 1e-9 * expected);
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter.grad(), 2 * parameter.detach()));
    }
    EXPECT_EQ(transposed.grad().strides(), transposed.strides());
    EXPECT_EQ(parameters[4].grad().strides(), parameters[4].strides());
  }
}

TEST(GradBuckets, AcceptsEmptyParamList) {
  GradBuckets buckets(std::vector<Tensor>{});
  EXPECT_TRUE(buckets.buckets().empty());
  EXPECT_EQ(norm_sq(buckets), 0);
  buckets.zero_grad(false);
  buckets.zero_grad();
}

TEST(GradBuckets, ZeroGradMatchesModule) {
  const std::vector<Tensor> parameters{make_leaf({3}), make_leaf({4})};
  GradBuckets buckets(parameters);
  parameters[0].sum().backward();
  buckets.zero_grad(false);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::zeros({3})));
  EXPECT_FALSE(parameters[1].grad().defined());
  buckets.zero_grad();
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST(GradBuckets, ConvertsGradientDtype) {
  const auto parameter = make_leaf({4});
  GradBuckets buckets({parameter});
  parameter.mutable_grad() = torch::full({4}, 1. / 3, torch::kDouble);
  buckets.copy_grads_to_buckets();
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({4}, 1. / 3)));
}

TEST(GradBuckets, UsesGradDtypeOfParams) {
  const auto parameter = make_leaf({4}, torch::kBFloat16);
  parameter.set_grad_dtype(torch::kFloat);
  GradBuckets buckets({parameter});
  EXPECT_EQ(buckets.buckets()[0].dtype, torch::kFloat);
  for (int i = 0; i < 1000; ++i) parameter.sum().backward();
  EXPECT_EQ(norm_sq(buckets), 4 * 1e6);
}

TEST(GradBuckets, ThrowsForRoundedOrMismatchedGradients) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto parameter = make_leaf({4}, dtype);
    GradBuckets buckets({parameter});
    parameter.mutable_grad() = torch::full({4}, 1e-8F);  // as unscaled for a master
    EXPECT_THAT(message_of([&] { buckets.copy_grads_to_buckets(); }),
                testing::AllOf(HasSubstr("the gradient of parameter 0"), HasSubstr("zero_grad()")));
    EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({4}, 1e-8F)));
    parameter.set_grad_dtype(torch::kFloat);
    EXPECT_THAT(message_of([&] { buckets.copy_grads_to_buckets(); }),
                HasSubstr("accumulate_in_float"));
  }
  const std::vector<Tensor> parameters{make_leaf({3}), make_leaf({4})};
  GradBuckets buckets(parameters);
  for (const Tensor& bad : {torch::ones({4}, torch::kLong), torch::ones({4}).to_sparse(),
                            torch::ones({2, 2}), torch::ones({4}, torch::kMeta)}) {
    // torch checks the dtype of a gradient that is set by its own functions.
    parameters[1].mutable_grad() = bad;
    EXPECT_THAT(message_of([&] { buckets.copy_grads_to_buckets(); }),
                HasSubstr("the gradient of parameter 1 (float32 [4] on cpu) is"));
  }
  parameters[1].mutable_grad() = torch::ones({4});
  EXPECT_EQ(norm_sq(buckets), 4);
  const auto parameter = make_leaf({4});
  GradBuckets own({parameter});
  parameter.set_data(torch::ones({2, 2}));
  parameter.mutable_grad() = torch::ones({4});
  EXPECT_THAT(message_of([&] { own.copy_grads_to_buckets(); }),
              HasSubstr("and their bucket view is"));
}

TEST(GradBuckets, ThrowsForInvalidParam) {
  const auto twice = make_leaf({3});
  EXPECT_THAT(message_of([&] { GradBuckets({twice, twice}); }), HasSubstr("appears twice"));
  EXPECT_THAT(message_of([&] {
                GradBuckets({twice, Tensor()});
              }),
              HasSubstr("parameter 1 is undefined"));
  EXPECT_THAT(message_of([&] { GradBuckets({twice * 2}); }), HasSubstr("is not a leaf"));
  EXPECT_THAT(message_of([&] { GradBuckets({torch::ones({3}, torch::kLong)}); }),
              HasSubstr("float32, float64, bfloat16 or float16"));
  EXPECT_THAT(message_of([&] { GradBuckets({torch::ones({3}).to_sparse()}); }),
              HasSubstr("should be dense"));
  const Tensor inference = [] {
    const c10::InferenceMode mode;
    return torch::ones({3});
  }();
  EXPECT_THAT(message_of([&] { GradBuckets({inference}); }), HasSubstr("is an inference tensor"));
  EXPECT_THAT(message_of([&] { GradBuckets({twice}, {.bucket_cap_bytes = 0}); }),
              HasSubstr("bucket_cap_bytes is 0"));
}

TEST(GradBuckets, TrainingIsBitwiseIdentical) {
  const auto train = [](bool has_buckets) {
    torch::manual_seed(3);
    torch::nn::Linear model(7, 5);
    GradBuckets buckets(model->parameters());
    mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
    mezzo::GradScaler scaler({.init_scale = 8.});
    for (int step = 0; step < 4; ++step) {
      has_buckets ? buckets.zero_grad(/*set_to_none=*/false) : optimizer.zero_grad();
      scaler.scale(model(torch::randn({3, 7})).square().mean()).backward();
      if (has_buckets) buckets.copy_grads_to_buckets();
      scaler.step(optimizer, {.max_norm = 0.5});
      scaler.update();
    }
    return model->weight.detach().clone();
  };
  EXPECT_TRUE(torch::equal(train(true), train(false)));
}

}  // namespace
}  // namespace grad_buckets_test
