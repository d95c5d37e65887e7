#include <torch/torch.h>
//
#include <mezzo/distributed/grad_all_reduce.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "ranks.h"
#include "same_bits.h"

namespace {

using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::expect_same_weights_on_all_ranks;
using distributed_test::Ranks;
using distributed_test::ReduceOp;
using mezzo::GradAllReduce;
using mezzo::GradAllReduceOptions;
using test_support::error_of;

/// Two branches, a parameter that only some ranks use, one that nobody does, and a frozen one.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    torch::manual_seed(3);
    left = register_module("left", torch::nn::Linear(8, 16));
    right = register_module("right", torch::nn::Linear(8, 16));
    out = register_module("out", torch::nn::Linear(16, 4));
    sometimes = register_parameter("sometimes", torch::randn({4}));
    never = register_parameter("never", torch::randn({4}));
    frozen = register_parameter("frozen", torch::randn({4}), /*requires_grad=*/false);
  }

  /// `turned` computes the branches in the other order, so that their gradients come in the other.
  at::Tensor forward(const at::Tensor& x, bool turned, bool uses_it) {
    const at::Tensor first = torch::tanh((turned ? right : left)->forward(x));
    const at::Tensor second = torch::tanh((turned ? left : right)->forward(x));
    const at::Tensor y = out->forward(first + second) + frozen;
    return uses_it ? y * sometimes : y;
  }

  torch::nn::Linear left{nullptr}, right{nullptr}, out{nullptr};
  at::Tensor sometimes, never, frozen;
};
TORCH_MODULE(Branches);

constexpr GradAllReduceOptions kSmallBuckets{.bucket_bytes = 256};

struct Batch {
  at::Tensor x, y;
  Batch part(int64_t rank, int64_t size) const {
    return {x.chunk(size)[static_cast<std::size_t>(rank)],
            y.chunk(size)[static_cast<std::size_t>(rank)]};
  }
};

std::vector<Batch> batches(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(11);
  std::vector<Batch> all;
  for (int i = 0; i < 6; ++i) {
    all.push_back({torch::randn({16, 8}).to(dtype), torch::randn({16, 4}).to(dtype)});
  }
  return all;
}

void expect_close(Branches model, Branches other, double tolerance) {
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = other->named_parameters()[item.key()];
    EXPECT_TRUE(at::allclose(item.value(), wanted, tolerance, tolerance))
        << item.key() << item.value() << wanted;
  }
}

/// Which ranks use the parameter `sometimes`: a part of the batch each, so the mean over the whole
/// batch without ranks must use it in the same rows.
bool uses_it(int rank) { return rank == 0; }

/// The loss of the whole batch as the mean of its parts', as ranks make it.
at::Tensor loss_of(Branches model, const Batch& batch, int rank, bool turned) {
  return torch::mse_loss(model->forward(batch.x, turned, uses_it(rank)), batch.y);
}

/// Trains alone, on all parts of each batch one after another.
void train_alone(Branches model, const std::vector<Batch>& data, int ranks) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const Batch& batch : data) {
    optimizer.zero_grad();
    at::Tensor loss = torch::zeros({});
    for (int rank = 0; rank < ranks; ++rank) {
      loss = loss + loss_of(model, batch.part(rank, ranks), rank, false);
    }
    (loss / ranks).backward();
    optimizer.step();
  }
}

TEST(GradAllReduce, RanksWithPartsOfABatchFollowOneWithAllOfIt) {
  const Ranks world = everyone();
  Branches model, alone;
  GradAllReduce all_reduce(model->parameters(), world, kSmallBuckets);
  ASSERT_GT(all_reduce.buckets().buckets().size(), 3U);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const Batch& batch : batches()) {
    optimizer.zero_grad();
    // Odd ranks make their gradients in another order.
    loss_of(model, batch.part(world->getRank(), world->getSize()), world->getRank(),
            world->getRank() % 2 == 1)
        .backward();
    optimizer.step();
  }
  train_alone(alone, batches(), world->getSize());
  expect_close(model, alone, 2e-6);
  expect_same_weights_on_all_ranks(world, model);
  EXPECT_FALSE(model->never.grad().defined());
  EXPECT_FALSE(model->frozen.grad().defined());
  EXPECT_TRUE(model->sometimes.grad().defined())
      << "rank 0 has one, so has rank " << world->getRank();
}

TEST(GradAllReduce, AccumulatesLocallyUntilTheLastMicroBatch) {
  const Ranks world = everyone();
  Branches model, alone;
  GradAllReduce all_reduce(model->parameters(), world, kSmallBuckets);
  const auto data = batches();
  const auto backward = [&](const Batch& batch) {
    (loss_of(model, batch.part(world->getRank(), world->getSize()), world->getRank(), false) / 2)
        .backward();
  };
  {
    const auto no_sync = all_reduce.no_sync();
    backward(data[0]);
  }
  const at::Tensor local = model->out->bias.grad().clone();
  backward(data[1]);

  for (int rank = 0; rank < world->getSize(); ++rank) {
    for (const std::size_t i : {0, 1}) {
      (loss_of(alone, data[i].part(rank, world->getSize()), rank, false) / (2 * world->getSize()))
          .backward();
    }
  }
  for (const auto& item : model->named_parameters()) {
    const at::Tensor wanted = alone->named_parameters()[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), wanted.defined()) << item.key();
    if (wanted.defined()) {
      EXPECT_TRUE(at::allclose(item.value().grad(), wanted, 1e-5, 1e-6)) << item.key();
    }
  }

  // The first micro-batch stayed here: with several ranks no two of them are alike.
  const at::Tensor sum = local.clone();
  distributed_test::all_reduce(world, sum, ReduceOp::SUM);
  EXPECT_EQ(at::allclose(sum, local), world->getSize() == 1);
}

/// A weight whose gradient is what it is multiplied by.
struct OneWeight {
  explicit OneWeight(at::ScalarType dtype)
      : weight(torch::zeros({3}, dtype).requires_grad_()),
        all_reduce({weight}, everyone(), kSmallBuckets) {}
  void backward(double gradient) {
    (weight * torch::full({3}, gradient, weight.scalar_type())).sum().backward();
  }
  void expect_gradient(double value) const {
    EXPECT_TRUE(at::equal(weight.grad(), torch::full({3}, value, weight.scalar_type())))
        << weight.grad() << value;
  }
  at::Tensor weight;
  GradAllReduce all_reduce;
};

// Numbers that 1 to 4 ranks divide without rounding.
TEST(GradAllReduce, GradientsAreAveragesAfterBackward) {
  const Ranks world = everyone();
  const auto own = [&](double value) { return value * (world->getRank() + 1); };
  const double mean = (world->getSize() + 1) / 2.;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    OneWeight one(dtype);
    one.backward(own(12));
    one.expect_gradient(12 * mean);
    one.backward(own(24));  // onto what is an average already
    one.expect_gradient(36 * mean);
    {
      const auto no_sync = one.all_reduce.no_sync();
      one.backward(own(12));
      one.expect_gradient(36 * mean + own(12));
    }
    one.backward(own(0));
    one.expect_gradient(48 * mean);
    one.weight.mutable_grad().mul_(0.5);  // as a user clips
    one.backward(own(12));
    one.expect_gradient(36 * mean);
    one.all_reduce.buckets().zero_grad(/*set_to_none=*/false);
    one.backward(own(12));
    one.expect_gradient(12 * mean);
  }
}

// The loss scale is on the gradients while they are averaged.
TEST(GradAllReduce, AverageGradientsOfHalfOverflowOnlyWhereTheAverageDoes) {
  OneWeight one(at::kHalf);
  one.backward(60'000);
  one.expect_gradient(60'000);
}

TEST(GradAllReduce, SendsFloatsInTwoBytesWithinTheirRounding) {
  const Ranks world = everyone();
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Branches model, alone;
    const GradAllReduce compressed(model->parameters(), world, {.compress_dtype = dtype});
    const GradAllReduce plain(alone->parameters(), world);
    const Batch part = batches()[0].part(world->getRank(), world->getSize());
    for (const auto& net : {model, alone}) loss_of(net, part, world->getRank(), false).backward();
    for (const auto& item : model->named_parameters()) {
      const at::Tensor wanted = alone->named_parameters()[item.key()].grad();
      if (!wanted.defined()) continue;
      // Ranks' parts of up to 1 are rounded, and may cancel each other.
      const double bit = dtype == at::kBFloat16 ? 1. / 128 : 1. / 1024;
      EXPECT_TRUE(at::allclose(item.value().grad(), wanted, 2 * bit, bit)) << item.key();
      distributed_test::expect_same_bits_on_all_ranks(world, item.value().grad(), item.key());
    }
  }
}

TEST(GradAllReduce, LowPrecisionGradientsAreTheSameBitsOnAllRanks) {
  const Ranks world = everyone();
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Branches model;
    model->to(dtype);
    const GradAllReduce all_reduce(model->parameters(), world, kSmallBuckets);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (const Batch& batch : batches(dtype)) {
      optimizer.zero_grad();
      loss_of(model, batch.part(world->getRank(), world->getSize()), world->getRank(), false)
          .backward();
      optimizer.step();
    }
    expect_same_weights_on_all_ranks(world, model);
  }
}

TEST(GradAllReduce, LeavesGradientsAloneWhenItIsGone) {
  const Ranks world = everyone();
  const at::Tensor weight = torch::zeros({3}).requires_grad_();
  { const GradAllReduce all_reduce({weight}, world); }
  (weight * (world->getRank() + 1)).sum().backward();
  EXPECT_EQ(weight.grad()[0].item<int>(), world->getRank() + 1);
}

TEST(GradAllReduce, AfterABackwardPassThatThrewTheNextOneSaysSo) {
  const Ranks world = everyone();
  if (world->getSize() == 1) return;  // it is in step with itself
  Branches model;
  GradAllReduce all_reduce(model->parameters(), world, kSmallBuckets);
  const Batch batch = batches()[0];
  const at::Tensor hidden = torch::tanh(model->left->forward(batch.x));
  hidden.register_hook([](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "on purpose"); });
  EXPECT_THAT(error_of([&] { model->out->forward(hidden).sum().backward(); }),
              testing::HasSubstr("on purpose"));
  all_reduce.buckets().zero_grad();
  EXPECT_THAT(error_of([&] { loss_of(model, batch, 0, false).backward(); }),
              testing::HasSubstr("an earlier backward pass did not end"));
}

// Their buckets are of the same lengths all the same.
TEST(GradAllReduce, RanksWithOtherBucketsAreToldBeforeAnyPass) {
  const Ranks world = everyone();
  const at::Tensor one = torch::ones({3}).requires_grad_(),
                   other = torch::ones({3}, at::kBFloat16).requires_grad_();
  const bool is_first = world->getRank() == 0;
  const std::vector<at::Tensor> parameters =
      is_first ? std::vector{one, other} : std::vector{other, one};
  const std::string error = error_of([&] { const GradAllReduce all_reduce(parameters, world); });
  EXPECT_EQ(
      error.find("where rank 0 has \"parameter 0: Float [3] in bucket 1") != std::string::npos,
      world->getSize() > 1)
      << error;
}

// In bfloat16 256 + 1 is 256.
TEST(GradAllReduce, ReducesFloatGradientsOfABfloat16ParameterInFloat) {
  const Ranks world = everyone();
  const at::Tensor weight = torch::zeros({3}, at::kBFloat16).requires_grad_();
  weight.set_grad_dtype(at::kFloat);
  GradAllReduce all_reduce({weight}, world);
  EXPECT_EQ(all_reduce.buckets().buckets()[0].dtype, at::kFloat);
  const int size = world->getSize();
  (weight.to(at::kFloat) * (world->getRank() == 0 ? 256 * size : size)).sum().backward();
  const auto expected = static_cast<float>(256 + size - 1);
  EXPECT_TRUE(at::equal(weight.grad(), torch::full({3}, expected))) << weight.grad();
}

}  // namespace
