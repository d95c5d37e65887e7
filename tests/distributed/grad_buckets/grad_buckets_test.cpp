// Gradients in flat buckets: whatever becomes of a gradient, its value is kept and found.

#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../support/error_of.h"

namespace {

using mezzo::GradBuckets;
using test_support::error_of;
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

/// Of all that lies in the buffers, the gaps included.
double sum_of_squares(GradBuckets& buckets) {
  buckets.reattach_gradients();
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    sum += bucket.flat.to(torch::kDouble).square().sum().item<double>();
  }
  return sum;
}

/// The numbers of the parameters that have a dense gradient, which lies in its bucket.
std::vector<std::size_t> at_home(GradBuckets& buckets) {
  buckets.reattach_gradients();
  std::vector<std::size_t> numbers;
  for (const auto& bucket : buckets.buckets()) {
    for (const std::size_t number : bucket.parameters) {
      const Tensor& gradient = buckets.parameters()[number].grad();
      if (!gradient.defined() || gradient.is_sparse()) continue;
      EXPECT_TRUE(gradient.storage().is_alias_of(bucket.flat.storage())) << number;
      EXPECT_EQ(gradient.scalar_type(), bucket.dtype) << number;
      numbers.push_back(number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

using Numbers = std::vector<std::size_t>;

#define EXPECT_ERROR(call, words) \
  EXPECT_NE(error_of([&] { call; }).find(words), std::string::npos) << error_of([&] { call; })

TEST(GradBuckets, GroupsByDtypeInReverseOrderUpToTheCap) {
  const std::vector<Tensor> parameters{leaf({16}), leaf({16}, torch::kBFloat16), leaf({16}),
                                       leaf({16}), leaf({4}, torch::kDouble)};
  const GradBuckets buckets(parameters, {.bucket_bytes = 128});
  ASSERT_EQ(buckets.buckets().size(), 4U);
  const auto numbers = [&](std::size_t i) { return buckets.buckets()[i].parameters; };
  EXPECT_EQ(numbers(0), (std::vector<std::size_t>{4}));
  EXPECT_EQ(buckets.buckets()[0].dtype, torch::kDouble);
  EXPECT_EQ(numbers(1), (std::vector<std::size_t>{3, 2}));
  EXPECT_EQ(numbers(2), (std::vector<std::size_t>{1}));
  EXPECT_EQ(numbers(3), (std::vector<std::size_t>{0}));
  EXPECT_EQ(buckets.buckets()[1].flat.numel(), 32);
}

TEST(GradBuckets, KeepsEveryGradientsValueStepAfterStep) {
  const std::vector<Tensor> parameters{leaf({3, 5}), leaf({7}, torch::kDouble),
                                       leaf({2, 2}, torch::kBFloat16), leaf({9}, torch::kHalf)};
  GradBuckets buckets(parameters);
  for (int step = 1; step <= 3; ++step) {
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    loss_of(parameters, step).backward();
    loss_of(parameters, step).backward();
    EXPECT_EQ(at_home(buckets), (Numbers{0, 1, 2, 3}));
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 2 * step)));
    }
    EXPECT_EQ(sum_of_squares(buckets), (15 + 7 + 4 + 9) * 4 * step * step);
  }
}

TEST(GradBuckets, FindsAGradientThatTheUserReplaced) {
  const std::vector<Tensor> parameters{leaf({3, 4}), leaf({4})};
  GradBuckets buckets(parameters);
  loss_of(parameters).backward();
  buckets.reattach_gradients();
  const auto values = torch::randn({4, 3});
  parameters[0].mutable_grad() = values.t();  // not laid out like the parameter, either
  parameters[1].mutable_grad() = torch::ones({1}).expand({4});
  at_home(buckets);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), values.t()));
  EXPECT_TRUE(parameters[0].grad().is_contiguous());
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({4})));
  EXPECT_TRUE(parameters[1].grad().is_contiguous());
  EXPECT_NEAR(sum_of_squares(buckets), 4 + values.square().sum().item<double>(), 1e-5);
}

TEST(GradBuckets, TakesGradientsWithoutMemoryAndSeenNegative) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({3}), leaf({3})};
  GradBuckets buckets(parameters);
  const auto ones = torch::ones({7});
  parameters[0].mutable_grad() = torch::_efficientzerotensor({3}, torch::kFloat);
  parameters[1].mutable_grad() = torch::_neg_view(torch::ones({3}));
  parameters[2].mutable_grad() = ones.slice(0, 1, 4);  // misaligned
  at_home(buckets);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::zeros({3})));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::full({3}, -1.0F)));
  EXPECT_EQ(sum_of_squares(buckets), 6);
}

TEST(GradBuckets, LeavesOutUnusedAndFrozenParameters) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4}), torch::ones({5})};
  GradBuckets buckets(parameters);
  loss_of(parameters).backward();
  EXPECT_EQ(at_home(buckets), (Numbers{0, 1}));
  buckets.zero_grad();
  parameters[1].set_requires_grad(false);
  loss_of(parameters).backward();
  EXPECT_EQ(at_home(buckets), (Numbers{0}));
  EXPECT_FALSE(parameters[1].grad().defined());
  EXPECT_EQ(sum_of_squares(buckets), 3);  // what was there before is gone
}

TEST(GradBuckets, LeavesSparseGradientsOutside) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 2).sparse(true));
  const std::vector<Tensor> parameters{embedding->weight, leaf({3})};
  GradBuckets buckets(parameters);
  const auto tokens = torch::tensor({1, 4, 4});
  (embedding->forward(tokens).sum() + parameters[1].sum()).backward();
  EXPECT_EQ(at_home(buckets), (Numbers{1}));
  EXPECT_EQ(sum_of_squares(buckets), 3);
  EXPECT_TRUE(embedding->weight.grad().is_sparse());
  embedding->weight.mutable_grad() = torch::ones({10, 2});  // dense now
  EXPECT_EQ(at_home(buckets), (Numbers{0, 1}));
  EXPECT_EQ(sum_of_squares(buckets), 20 + 3);
  embedding->weight.mutable_grad() = torch::ones({10, 2}).to_sparse();  // and sparse again
  EXPECT_EQ(at_home(buckets), (Numbers{1}));
  EXPECT_EQ(sum_of_squares(buckets), 3);
}

TEST(GradBuckets, TakesParametersOfAnyLayoutAndSize) {
  const auto transposed = torch::randn({4, 3}).t().requires_grad_();
  const auto with_gaps = torch::randn({4, 6}).slice(1, 0, 3).detach().requires_grad_();
  const std::vector<Tensor> parameters{
      transposed, with_gaps, leaf({}), leaf({0, 3}),
      leaf({2, 3, 4, 5}).detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_()};
  GradBuckets buckets(parameters);
  for (int step = 0; step < 2; ++step) {
    buckets.zero_grad();
    auto loss = torch::zeros({});
    for (const auto& parameter : parameters) loss = loss + parameter.square().sum();
    loss.backward();
    at_home(buckets);
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

TEST(GradBuckets, HoldsNothing) {
  GradBuckets buckets(std::vector<Tensor>{});
  EXPECT_TRUE(buckets.buckets().empty());
  EXPECT_EQ(sum_of_squares(buckets), 0);
  buckets.zero_grad(false);
  buckets.zero_grad();
}

TEST(GradBuckets, ZeroesAsModulesDo) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4})};
  GradBuckets buckets(parameters);
  parameters[0].sum().backward();
  buckets.zero_grad(false);
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::zeros({3})));
  EXPECT_FALSE(parameters[1].grad().defined());
  at_home(buckets);
  buckets.zero_grad();
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST(GradBuckets, SaysWhatIsWrongWithAGradient) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({4})};
  GradBuckets buckets(parameters);
  parameters[1].mutable_grad() = torch::ones({5});
  EXPECT_ERROR(buckets.reattach_gradients(),
               "the gradient of parameter 1 (float32 [4] on cpu) is float32 [5] on cpu");
  parameters[1].mutable_grad() = torch::ones({4}, torch::kLong);
  EXPECT_ERROR(buckets.reattach_gradients(), "(float32 [4] on cpu) is Long [4] on cpu");
  parameters[1].mutable_grad() = torch::ones({2, 2}).to_sparse_csr();
  EXPECT_ERROR(buckets.reattach_gradients(), "SparseCsr");
  parameters[1].mutable_grad() = torch::ones({4});
  EXPECT_EQ(sum_of_squares(buckets), 4);
}

// As an optimizer leaves it that keeps a copy in double.
TEST(GradBuckets, ConvertsAGradientOfAnotherFloatingDtype) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    for (const auto other : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
      const bool is_16_bits = dtype == torch::kBFloat16 || dtype == torch::kHalf;
      if (is_16_bits && other == torch::kFloat) continue;  // which is refused, see below
      const std::vector<Tensor> parameters{leaf({4}, dtype), leaf({3}, dtype)};
      GradBuckets buckets(parameters);
      loss_of(parameters).backward();
      parameters[0].mutable_grad() = parameters[0].grad().to(other) / 3;
      const Tensor expected = parameters[0].grad().to(dtype);
      EXPECT_EQ(at_home(buckets), (Numbers{0, 1})) << dtype << " from " << other;
      EXPECT_TRUE(torch::equal(parameters[0].grad(), expected));
      EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({3}, dtype)));
    }
  }
}

TEST(GradBuckets, BackwardConvertsAGradientOfAnotherFloatingDtype) {
  const auto parameter = leaf({4}, torch::kBFloat16);
  const GradBuckets buckets({parameter});
  parameter.sum().backward();
  parameter.mutable_grad() = parameter.grad().to(torch::kFloat) * 0.5;  // as unscaled
  parameter.sum().backward();
  EXPECT_TRUE(parameter.grad().storage().is_alias_of(buckets.buckets()[0].flat.storage()));
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({4}, 1.5, torch::kBFloat16)));
}

TEST(GradBuckets, AreOfTheDtypeInWhichAutogradAccumulates) {
  const std::vector<Tensor> parameters{leaf({4}, torch::kBFloat16), leaf({3}, torch::kBFloat16),
                                       leaf({2})};
  parameters[0].set_grad_dtype(torch::kFloat);
  GradBuckets buckets(parameters);
  std::vector<torch::ScalarType> dtypes;
  for (const auto& bucket : buckets.buckets()) dtypes.push_back(bucket.dtype);
  // Apart from the float parameter too: ranks may keep the weights in buffers of this layout.
  EXPECT_EQ(dtypes, (std::vector{torch::kFloat, torch::kBFloat16, torch::kFloat}));
  for (int i = 0; i < 1000; ++i) loss_of(parameters).backward();
  EXPECT_EQ(at_home(buckets), (Numbers{0, 1, 2}));
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::full({4}, 1000.0F)));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::full({3}, 256, torch::kBFloat16)));
  parameters[0].set_grad_dtype(torch::kBFloat16);
  buckets.zero_grad();
  loss_of(parameters).backward();
  EXPECT_EQ(at_home(buckets), (Numbers{0, 1, 2})) << "in the bucket that was made for float";
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::ones({4})));
}

TEST(GradBuckets, RefusesToAddUpIn16BitsWhatAutogradAddsUpInFloat) {
  const auto parameter = leaf({4}, torch::kBFloat16);
  GradBuckets buckets({parameter});
  parameter.set_grad_dtype(torch::kFloat);
  EXPECT_ERROR(parameter.sum().backward(),
               "gradients of parameter 0 (bfloat16 [4] on cpu) are added up in float32 by now");
  EXPECT_ERROR(buckets.reattach_gradients(), "are added up in float32 by now");
  {
    const auto no_sync = buckets.no_sync();
    EXPECT_ERROR(parameter.sum().backward(), "are added up in float32 by now");
  }
  buckets.zero_grad();
  buckets = GradBuckets({parameter});
  for (int i = 0; i < 1000; ++i) parameter.sum().backward();
  EXPECT_EQ(parameter.grad()[0].item<double>(), 1000);
}

TEST(GradBuckets, NoSyncMovesAndEndsOnce) {
  const auto parameter = leaf({4});
  GradBuckets buckets({parameter});
  const auto stays_local = [&] { return mezzo::detail::shared(buckets)->is_no_sync(); };
  std::optional<GradBuckets::NoSync> guard;
  guard = buckets.no_sync();
  EXPECT_TRUE(stays_local());
  GradBuckets::NoSync other = *std::move(guard);
  guard.reset();
  EXPECT_TRUE(stays_local());
  other = buckets.no_sync();
  EXPECT_TRUE(stays_local());
  { const GradBuckets::NoSync last = std::move(other); }
  EXPECT_FALSE(stays_local());
}

TEST(GradBuckets, LeavesAGradientThatWasUnscaledInFloatToItsStep) {
  const auto first = leaf({4}, torch::kHalf), second = leaf({4}, torch::kHalf);
  GradBuckets buckets({first, second});
  buckets.on_ready([](std::size_t) {});
  first.sum().backward();
  first.mutable_grad() = torch::full({4}, 1e-8F);  // as unscaled for a master
  second.sum().backward();
  EXPECT_TRUE(torch::equal(first.grad(), torch::full({4}, 1e-8F)));
}

TEST(GradBuckets, RefusesToRoundAnUnscaledGradientWhenReattached) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto first = leaf({4}, dtype), second = leaf({4}, dtype);
    GradBuckets buckets({first, second});
    loss_of({first, second}).backward();
    first.mutable_grad() = torch::full({4}, 1e-8F);      // as unscaled for a master
    second.mutable_grad() = torch::full({4}, 2, dtype);  // would be moved
    EXPECT_ERROR(buckets.reattach_gradients(), "the gradient of parameter 0");
    EXPECT_TRUE(torch::equal(first.grad(), torch::full({4}, 1e-8F)));
    EXPECT_FALSE(second.grad().is_alias_of(buckets.buckets()[0].flat)) << "nothing was moved";
    first.set_grad_dtype(torch::kFloat);
    buckets = GradBuckets({first, second});  // with room for float
    buckets.reattach_gradients();
    EXPECT_EQ(at_home(buckets), (Numbers{0, 1}));
    EXPECT_TRUE(torch::equal(first.grad(), torch::full({4}, 1e-8F)));
  }
}

TEST(GradBuckets, NamesAParameterThatWasCastSinceTheyWereMade) {
  const auto parameter = leaf({4});
  GradBuckets buckets({parameter});
  parameter.set_data(parameter.detach().to(torch::kBFloat16));
  EXPECT_ERROR(parameter.sum().backward(),
               "parameter 0 (bfloat16 [4] on cpu) was float32 [4] on cpu when these GradBuckets");
}

TEST(GradBuckets, KeepsAddressesWhateverZeroesTheGradients) {
  torch::nn::Linear linear(5, 3);
  GradBuckets buckets(linear->parameters());
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

TEST(GradBuckets, HoldsTheWholeBucketAndZerosBetween) {
  const std::vector<Tensor> parameters{leaf({3}), leaf({20})};
  GradBuckets buckets(parameters);
  loss_of(parameters, 2).backward();
  const auto& flat = buckets.buckets()[0].flat;
  EXPECT_EQ(flat.numel(), 32 + 3);
  EXPECT_EQ(flat.sum().item<double>(), 2 * 23);
  flat.mul_(0.5);  // as an all-reduce would
  EXPECT_TRUE(torch::equal(parameters[0].grad(), torch::ones({3})));
  EXPECT_TRUE(torch::equal(parameters[1].grad(), torch::ones({20})));
}

TEST(GradBuckets, CopiesAGradientThatIsAnotherViewOfItsOwnPlace) {
  const std::vector<Tensor> parameters{leaf({3, 3}), leaf({3, 3})};
  GradBuckets buckets(parameters);
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

TEST(GradBuckets, ConvertsAGradientThatIsItsPlaceSeenInAnotherDtype) {
  const auto parameter = leaf({3}, torch::kBFloat16);
  GradBuckets buckets({parameter});
  parameter.sum().backward();
  parameter.mutable_grad() = parameter.grad().view(torch::kHalf);
  EXPECT_EQ(at_home(buckets), (Numbers{0}));
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({3}, 1.875, torch::kBFloat16)));
}

TEST(GradBuckets, LeavesGradientsWithHistoryWhereTheyAreUntilTheyAreReattached) {
  const auto parameter = torch::full({3}, 2.0F).requires_grad_();
  GradBuckets buckets({parameter});
  parameter.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_TRUE(parameter.grad().requires_grad());
  const auto second = torch::autograd::grad({parameter.grad().sum()}, {parameter})[0];
  EXPECT_TRUE(torch::equal(second, 6 * parameter));
  EXPECT_EQ(sum_of_squares(buckets), 3 * 144);
  EXPECT_FALSE(parameter.grad().requires_grad());
}

TEST(GradBuckets, CanBeCutIntoEqualPartsThatBeginAtMultiplesOf64Bytes) {
  const std::vector<Tensor> parameters{leaf({101}), leaf({5})};
  const GradBuckets buckets(parameters, {.parts = 4});
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
  EXPECT_ERROR(GradBuckets({good}, {.bucket_bytes = 0}), "bucket_bytes is 0");
  EXPECT_ERROR(GradBuckets({good}, {.parts = 0}), "parts is 0");
  EXPECT_ERROR(GradBuckets({good}, {.alignment = 48}), "alignment is 48");
}

TEST(GradBuckets, MovesWithItsGradients) {
  const std::vector<Tensor> parameters{leaf({3})};
  GradBuckets first(parameters);
  GradBuckets second = std::move(first);
  loss_of(parameters).backward();
  EXPECT_EQ(sum_of_squares(second), 3);
  second = GradBuckets(parameters);
  loss_of(parameters).backward();
  EXPECT_EQ(sum_of_squares(second), 12);
}

/// Ten steps with clipping, every fourth of which overflows.
std::vector<Tensor> trained(bool in_buckets, bool zero_grad) {
  torch::manual_seed(4);
  torch::nn::Sequential net(torch::nn::Linear(12, 30), torch::nn::Tanh(), torch::nn::Linear(30, 5));
  GradBuckets buckets(in_buckets ? net->parameters() : std::vector<Tensor>{});
  mezzo::optim::AdamW optimizer(net->parameters(), mezzo::optim::AdamWOptions(1e-2));
  mezzo::GradScaler scaler({.init_scale = 1024});
  scaler.on_skip(nullptr);
  for (int i = 0; i < 10; ++i) {
    if (!zero_grad) optimizer.zero_grad(/*set_to_none=*/i % 2 == 0);
    const double factor = i % 4 == 3 ? std::numeric_limits<double>::infinity() : 1.0;
    torch::manual_seed(i);
    const auto loss = net->forward(torch::randn({7, 12})).square().mean() * factor;
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 0.5, .zero_grad = zero_grad});
    scaler.update();
  }
  EXPECT_EQ(optimizer.applied_steps(), 8);
  return net->parameters();
}

TEST(GradBuckets, AnOptimizerTrainsAsWithoutThemToTheBit) {
  for (const bool zero_grad : {false, true}) {
    const auto with = trained(true, zero_grad);
    const auto without = trained(false, zero_grad);
    for (std::size_t i = 0; i < with.size(); ++i)
      EXPECT_TRUE(torch::equal(with[i], without[i])) << i;
  }
}

}  // namespace
