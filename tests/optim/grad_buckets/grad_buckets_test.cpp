// Gradients in buckets, where they lie and flat: whatever becomes of a gradient, its value is kept
// and found.

#include <mezzo/optim/grad_buckets.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../kernels/plain_summary.h"

namespace {

using mezzo::GradBuckets;
using mezzo::GradBucketsOptions;
using mezzo::GradStorage;
using torch::Tensor;

Tensor leaf(torch::IntArrayRef sizes, torch::ScalarType dtype = torch::kFloat) {
  return torch::randn(sizes, dtype).requires_grad_();
}

/// d(loss)/d(parameter) = weight, everywhere.
Tensor loss_of(const std::vector<Tensor>& parameters, double weight = 1.0) {
  auto loss = torch::zeros({}, torch::kDouble);
  for (const auto& parameter : parameters) {
    loss = loss + weight * parameter.sum().to(torch::kDouble);
  }
  return loss;
}

double sum_of_squares(GradBuckets& buckets, float inv_scale = 1.0F) {
  return buckets.summarize(torch::full({}, inv_scale)).sum_of_squares.item<double>();
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

#define EXPECT_ERROR(call, words) \
  EXPECT_NE(error_of([&] { call; }).find(words), std::string::npos) << error_of([&] { call; })

class GradBucketsIn : public testing::TestWithParam<GradStorage> {
 protected:
  static GradBucketsOptions options() { return GradBucketsOptions().storage(GetParam()); }
  static bool is_flat() { return GetParam() == GradStorage::flat; }
  /// Flat storage keeps gradients in the bucket's buffer.
  static void expect_at_home(GradBuckets& buckets) {
    for (const auto& [number, bucket, gradient] : buckets.gradients()) {
      EXPECT_TRUE(gradient.is_same(buckets.parameters()[number].grad()));
      if (!is_flat()) continue;
      EXPECT_TRUE(gradient.storage().is_alias_of(buckets.buckets()[bucket].flat.storage()));
    }
  }
};

TEST_P(GradBucketsIn, GroupsByDtypeInReverseOrderUpToTheCap) {
  const std::vector<Tensor> parameters{leaf({16}), leaf({16}, torch::kBFloat16), leaf({16}),
                                       leaf({16}), leaf({4}, torch::kDouble)};
  const GradBuckets buckets(parameters, options().bucket_bytes(128));
  ASSERT_EQ(buckets.buckets().size(), 4U);
  const auto numbers = [&](std::size_t i) { return buckets.buckets()[i].parameters; };
  EXPECT_EQ(numbers(0), (std::vector<std::size_t>{4}));
  EXPECT_EQ(buckets.buckets()[0].dtype, torch::kDouble);
  EXPECT_EQ(numbers(1), (std::vector<std::size_t>{3, 2}));
  EXPECT_EQ(numbers(2), (std::vector<std::size_t>{1}));
  EXPECT_EQ(numbers(3), (std::vector<std::size_t>{0}));
  EXPECT_EQ(buckets.buckets()[1].flat.defined(), is_flat());
}

TEST_P(GradBucketsIn, KeepsEveryGradientsValueStepAfterStep) {
  const std::vector<Tensor> parameters{leaf({3, 5}), leaf({7}, torch::kDouble),
                                       leaf({2, 2}, torch::kBFloat16), leaf({9}, torch::kHalf)};
  GradBuckets buckets(parameters, options());
  for (int step = 1; step <= 3; ++step) {
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    loss_of(parameters, step).backward();
    loss_of(parameters, step).backward();
    expect_at_home(buckets);
    EXPECT_EQ(buckets.gradients().size(), 4U);
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 2 * step)));
    }
    EXPECT_EQ(sum_of_squares(buckets, 0.5F), (15 + 7 + 4 + 9) * step * step);
  }
}

TEST_P(GradBucketsIn, FindsAGradientThatTheUserReplaced) {
  const std::vector<Tensor> parameters{leaf({3, 4}), leaf({4})};
  GradBuckets buckets(parameters, options());
  loss_of(parameters).backward();
  buckets.reattach_gradients();
  const auto values = torch::randn({4, 3});
  parameters[0].mutable_grad() = values.t();  // not laid out like the parameter, either
  parameters[1].mutable_grad() = torch::ones({1}).expand({4});
  expect_at_home(buckets);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), values.t()));
  EXPECT_TRUE(parameters[0].grad().is_contiguous());
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({4})));
  EXPECT_TRUE(parameters[1].grad().is_contiguous());
  EXPECT_NEAR(sum_of_squares(buckets), 4 + values.square().sum().item<double>(), 1e-5);
}

TEST_P(GradBucketsIn, TakesGradientsWithoutMemoryAndSeenNegative) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({3}), leaf({3})};
  GradBuckets buckets(parameters, options());
  const auto ones = torch::ones({7});
  parameters[0].mutable_grad() = torch::_efficientzerotensor({3}, torch::kFloat);
  parameters[1].mutable_grad() = torch::_neg_view(torch::ones({3}));
  parameters[2].mutable_grad() = ones.slice(0, 1, 4);  // misaligned
  expect_at_home(buckets);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::zeros({3})));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::full({3}, -1.0F)));
  EXPECT_EQ(sum_of_squares(buckets), 6);
}

TEST_P(GradBucketsIn, LeavesOutUnusedAndFrozenParameters) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4}), torch::ones({5})};
  GradBuckets buckets(parameters, options());
  loss_of(parameters).backward();
  EXPECT_EQ(buckets.gradients().size(), 2U);
  buckets.zero_grad();
  parameters[1].set_requires_grad(false);
  loss_of(parameters).backward();
  const auto gradients = buckets.gradients();
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_EQ(gradients[0].parameter, 0U);
  EXPECT_FALSE(parameters[1].grad().defined());
  EXPECT_EQ(sum_of_squares(buckets), 3);
  if (is_flat()) {  // what was there before is gone
    EXPECT_EQ(buckets.buckets()[0].flat.sum().item<double>(), 3);
  }
}

TEST_P(GradBucketsIn, TakesFurtherParametersAndLeavesTheOldOnesWhereTheyLie) {
  std::vector<Tensor> parameters{leaf({3}), leaf({4})};
  GradBuckets buckets(parameters, options());
  loss_of(parameters).backward();
  buckets.reattach_gradients();
  const void* before = parameters[0].grad().const_data_ptr();
  parameters.push_back(leaf({5}));
  buckets.add_parameters({parameters.back()});
  EXPECT_EQ(buckets.buckets().size(), 2U);
  EXPECT_EQ(buckets.parameters().size(), 3U);
  loss_of(parameters).backward();
  expect_at_home(buckets);
  EXPECT_EQ(parameters[0].grad().const_data_ptr(), before);
  EXPECT_EQ(sum_of_squares(buckets), 7 * 4 + 5);
}

TEST_P(GradBucketsIn, KeepsSparseGradientsApartAndCountsThem) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 2).sparse(true));
  const std::vector<Tensor> parameters{embedding->weight, leaf({3})};
  GradBuckets buckets(parameters, options());
  const auto tokens = torch::tensor({1, 4, 4});
  (embedding->forward(tokens).sum() + parameters[1].sum()).backward();
  EXPECT_EQ(buckets.sparse_gradients(), (std::vector<std::size_t>{0}));
  EXPECT_EQ(buckets.gradients().size(), 1U);
  EXPECT_EQ(sum_of_squares(buckets), 2 * (1 + 4) + 3);  // the two of token 4 are added up first
  EXPECT_TRUE(embedding->weight.grad().is_sparse());
  embedding->weight.mutable_grad() = torch::ones({10, 2});  // dense now
  EXPECT_TRUE(buckets.sparse_gradients().empty());
  EXPECT_EQ(sum_of_squares(buckets), 20 + 3);
  embedding->weight.mutable_grad() = torch::ones({10, 2}).to_sparse();  // and sparse again
  EXPECT_EQ(sum_of_squares(buckets), 20 + 3);
  if (is_flat()) {
    EXPECT_EQ(buckets.buckets()[0].flat.sum().item<double>(), 3);
  }
}

TEST_P(GradBucketsIn, TakesParametersOfAnyLayoutAndSize) {
  const auto transposed = torch::randn({4, 3}).t().requires_grad_();
  const auto with_gaps = torch::randn({4, 6}).slice(1, 0, 3).detach().requires_grad_();
  const std::vector<Tensor> parameters{
      transposed, with_gaps, leaf({}), leaf({0, 3}),
      leaf({2, 3, 4, 5}).detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_()};
  GradBuckets buckets(parameters, options());
  for (int step = 0; step < 2; ++step) {
    buckets.zero_grad();
    auto loss = torch::zeros({});
    for (const auto& parameter : parameters) loss = loss + parameter.square().sum();
    loss.backward();
    expect_at_home(buckets);
    double expected = 0;
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter.grad(), 2 * parameter.detach()));
      expected += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    }
    EXPECT_NEAR(sum_of_squares(buckets), expected, 1e-9 * expected);
    EXPECT_EQ(transposed.grad().strides(), transposed.strides());
    EXPECT_EQ(parameters[4].grad().strides(), parameters[4].strides());
  }
}

TEST_P(GradBucketsIn, OfNothingAreNothing) {
  GradBuckets buckets({}, options());
  EXPECT_TRUE(buckets.buckets().empty());
  EXPECT_TRUE(buckets.gradients().empty());
  EXPECT_EQ(sum_of_squares(buckets), 0);
  buckets.zero_grad(false);
  buckets.zero_grad();
}

TEST_P(GradBucketsIn, ZeroesAsModulesDo) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4})};
  GradBuckets buckets(parameters, options());
  parameters[0].sum().backward();
  buckets.zero_grad(false);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::zeros({3})));
  EXPECT_FALSE(parameters[1].grad().defined());
  expect_at_home(buckets);
  buckets.zero_grad();
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST_P(GradBucketsIn, SaysWhatIsWrongWithAGradient) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4})};
  GradBuckets buckets(parameters, options());
  parameters[1].mutable_grad() = torch::ones({5});
  EXPECT_ERROR(buckets.reattach_gradients(),
               "the gradient of parameter 1 (float32 [4] on cpu) is float32 [5] on cpu");
  parameters[1].mutable_grad() = torch::ones({4}, torch::kHalf);
  EXPECT_ERROR(buckets.reattach_gradients(), "(float32 [4] on cpu) is float16 [4] on cpu");
  parameters[1].mutable_grad() = torch::ones({2, 2}).to_sparse_csr();
  EXPECT_ERROR(buckets.reattach_gradients(), "SparseCsr");
  parameters[1].mutable_grad() = torch::ones({4});
  EXPECT_EQ(sum_of_squares(buckets), 4);
}

TEST_P(GradBucketsIn, CountsAndNamesTheParameterOfTheFirstBadElement) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4}), leaf({5})};
  GradBuckets buckets(parameters, options());
  parameters[1].mutable_grad() = torch::tensor({0.0F, 1e-9F, 1.0F, 2.0F});
  parameters[2].mutable_grad() = torch::ones({5});
  const auto fine = buckets.statistics(torch::full({}, 0.5F), torch::kHalf);
  EXPECT_EQ(fine.zeros.item<int64_t>(), 1);
  EXPECT_EQ(fine.underflows.item<int64_t>(), 1);
  EXPECT_EQ(fine.summary.max_abs.item<double>(), 1);
  EXPECT_EQ(fine.first_bad[0].item<int64_t>(), -1);
  parameters[2].grad()[3] = std::numeric_limits<float>::infinity();
  const auto bad = buckets.statistics(torch::full({}, 0.5F), torch::kHalf);
  EXPECT_EQ(bad.summary.found_inf.item<float>(), 1);
  EXPECT_TRUE(torch::equal(bad.first_bad, torch::tensor({int64_t{2}, int64_t{3}})));
}

INSTANTIATE_TEST_SUITE_P(AllStorages, GradBucketsIn,
                         testing::Values(GradStorage::in_place, GradStorage::flat),
                         [](const auto& test) {
                           return test.param == GradStorage::flat ? "Flat" : "InPlace";
                         });

TEST(FlatGradBuckets, KeepAddressesWhateverZeroesTheGradients) {
  torch::nn::Linear linear(5, 3);
  GradBuckets buckets(linear->parameters(), GradBucketsOptions().storage(GradStorage::flat));
  std::vector<const void*> addresses;
  const auto input = torch::randn({2, 5});
  for (int step = 0; step < 6; ++step) {
    linear->forward(input).sum().backward();
    // The hooks brought them there: nobody called anything.
    EXPECT_TRUE(linear->weight.grad().storage().is_alias_of(buckets.buckets()[0].flat.storage()));
    EXPECT_TRUE(torch::allclose(linear->weight.grad(), input.sum(0).expand({3, 5})));
    const void* address = linear->weight.grad().const_data_ptr();
    if (!addresses.empty()) {
      EXPECT_EQ(address, addresses.front());
    }
    addresses.push_back(address);
    if (step % 3 == 0) linear->zero_grad();
    if (step % 3 == 1) linear->zero_grad(/*set_to_none=*/false);
    if (step % 3 == 2) buckets.zero_grad(/*set_to_none=*/false);
  }
}

TEST(FlatGradBuckets, HoldTheWholeBucketAndZerosBetween) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({20})};
  GradBuckets buckets(parameters, GradBucketsOptions().storage(GradStorage::flat));
  loss_of(parameters, 2).backward();
  const auto& flat = buckets.buckets()[0].flat;
  EXPECT_EQ(flat.numel(), 32 + 3);
  EXPECT_EQ(flat.sum().item<double>(), 2 * 23);
  flat.mul_(0.5);  // as an all-reduce would
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::ones({3})));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({20})));
}

TEST(FlatGradBuckets, CopyAGradientThatIsAnotherViewOfItsOwnPlace) {
  const std::vector<Tensor> parameters{leaf({3, 3}), leaf({3, 3})};
  GradBuckets buckets(parameters, GradBucketsOptions().storage(GradStorage::flat));
  const auto values = torch::arange(9, torch::kFloat).view({3, 3});
  parameters[0].mutable_grad() = values.clone();
  parameters[1].mutable_grad() = values + 10;
  buckets.reattach_gradients();
  parameters[0].mutable_grad() = parameters[0].grad().t();
  buckets.reattach_gradients();
  EXPECT_TRUE(torch::equal(parameters[0].grad(), values.t()));
  parameters[0].mutable_grad() = parameters[1].grad();  // another's place
  buckets.reattach_gradients();
  EXPECT_TRUE(torch::equal(parameters[0].grad(), values + 10));
  EXPECT_NE(parameters[0].grad().const_data_ptr(), parameters[1].grad().const_data_ptr());
}

TEST(FlatGradBuckets, LeaveGradientsWithHistoryWhereTheyAreUntilTheyAreRead) {
  const auto parameter = torch::full({3}, 2.0F).requires_grad_();
  GradBuckets buckets({parameter}, GradBucketsOptions().storage(GradStorage::flat));
  parameter.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_TRUE(parameter.grad().requires_grad());
  const auto second = torch::autograd::grad({parameter.grad().sum()}, {parameter})[0];
  EXPECT_TRUE(torch::equal(second, 6 * parameter));
  EXPECT_EQ(sum_of_squares(buckets), 3 * 144);
  EXPECT_FALSE(parameter.grad().requires_grad());
}

TEST(FlatGradBuckets, AreRebuiltInTheOrderInWhichGradientsCame) {
  const std::vector<Tensor> parameters{leaf({16}), leaf({16}), leaf({16}), leaf({16})};
  GradBuckets buckets(parameters,
                      GradBucketsOptions().storage(GradStorage::flat).bucket_bytes(128));
  // Used last comes first: 1, 3, 0; and 2 is not used.
  ((parameters[0].sin() * parameters[3]).cos() * parameters[1]).sum().backward();
  std::vector<Tensor> before;
  for (const auto& parameter : parameters) {
    before.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  }
  buckets.rebuild_buckets();
  ASSERT_EQ(buckets.buckets().size(), 2U);
  std::vector<std::size_t> order = buckets.buckets()[0].parameters;
  order.insert(order.end(), buckets.buckets()[1].parameters.begin(),
               buckets.buckets()[1].parameters.end());
  EXPECT_EQ(order.front(), 1U);
  EXPECT_EQ(order.back(), 2U);
  for (const std::size_t i : {0U, 1U, 3U})
    EXPECT_TRUE(torch::equal(parameters[i].grad(), before[i]));
  EXPECT_FALSE(parameters[2].grad().defined());
  for (const auto& [number, bucket, gradient] : buckets.gradients()) {
    EXPECT_TRUE(gradient.storage().is_alias_of(buckets.buckets()[bucket].flat.storage()));
  }
  parameters[2].sum().backward();
  EXPECT_TRUE(torch::equal(parameters[2].grad(), torch::ones({16})));
}

TEST(GradBuckets, CanBeCutIntoEqualPartsThatBeginAtMultiplesOf64Bytes) {
  const std::vector<Tensor> parameters{leaf({101}), leaf({5})};
  const GradBuckets buckets(parameters, GradBucketsOptions().storage(GradStorage::flat).parts(4));
  ASSERT_EQ(buckets.buckets().size(), 1U);
  EXPECT_EQ(buckets.buckets()[0].flat.numel(), 128);
  (parameters[0].sum() + parameters[1].sum()).backward();
  EXPECT_EQ(buckets.buckets()[0].flat.sum().item<double>(), 106.);
}

TEST(GradBuckets, RefusesWhatItCannotHold) {
  const auto good = leaf({3});
  EXPECT_ERROR(GradBuckets({good, Tensor()}),
               "GradBuckets: parameter 1 is undefined; leave it out");
  EXPECT_ERROR(GradBuckets({good, good}),
               "GradBuckets: parameter 1 (float32 [3] on cpu) is given twice");
  EXPECT_ERROR(GradBuckets({good * 2}), "parameter 0 (float32 [3] on cpu) is no leaf");
  EXPECT_ERROR(GradBuckets({torch::ones({2}, torch::kLong)}), "parameter 0 (Long [2] on cpu)");
  EXPECT_ERROR(GradBuckets({torch::ones({2}).to_sparse()}),
               "parameter 0 (Sparse float32 [2] on cpu)");
  EXPECT_ERROR(GradBuckets({good}, GradBucketsOptions().bucket_bytes(0)), "bucket_bytes is 0");
  EXPECT_ERROR(GradBuckets({good}, GradBucketsOptions().parts(0)), "parts is 0");
  EXPECT_ERROR(GradBuckets({good}, GradBucketsOptions().storage(static_cast<GradStorage>(7))),
               "storage is 7");
  GradBuckets buckets({good});
  EXPECT_ERROR(buckets.add_parameters({good}), "parameter 0 (float32 [3] on cpu) is given twice");
  EXPECT_ERROR(buckets.rebuild_buckets(), "rebuild_buckets: nothing watches");
  EXPECT_ERROR(buckets.summarize(torch::ones({2})), "inv_scale");
  EXPECT_ERROR(buckets.accumulate_if_finite([] {}), "flat storage");
}

TEST(GradBuckets, MovesWithItsGradients) {
  const std::vector<Tensor> parameters{leaf({3})};
  GradBuckets first(parameters, GradBucketsOptions().storage(GradStorage::flat));
  GradBuckets second = std::move(first);
  loss_of(parameters).backward();
  EXPECT_EQ(sum_of_squares(second), 3);
  second = GradBuckets(parameters);
  loss_of(parameters).backward();
  EXPECT_EQ(sum_of_squares(second), 12);
}

}  // namespace
