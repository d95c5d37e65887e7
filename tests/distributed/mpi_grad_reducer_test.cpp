#include <torch/torch.h>
//
#include <mezzo/distributed/grad_reducer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "rank_equality.h"
#include "single_process_reference.h"
#include "test_backends.h"

namespace grad_reducer_test {
namespace {

using distributed_test::BackendPtr;
using distributed_test::expect_equal_weights_on_all_ranks;
using distributed_test::make_world_backend;
using mezzo::GradReducer;
using single_process_reference::Batch;
using single_process_reference::batches;
using single_process_reference::compute_loss;
using single_process_reference::kSmallBuckets;
using single_process_reference::Model;
using test_support::message_of;

/// A weight whose gradient is its factor.
struct OneWeight {
  explicit OneWeight(at::ScalarType dtype, std::optional<at::ScalarType> sent = std::nullopt)
      : weight(torch::zeros({3}, dtype).requires_grad_()),
        reducer({weight}, make_world_backend(), {.reduce_dtype = sent}) {}
  void backward(double gradient) {
    (weight * torch::full({3}, gradient, weight.scalar_type())).sum().backward();
  }
  void expect_gradient(double value) const {
    EXPECT_TRUE(at::equal(weight.grad(), torch::full({3}, value, weight.scalar_type())))
        << weight.grad() << value;
  }
  at::Tensor weight;
  GradReducer reducer;
};

// Values that are divisible by 1 to 4 ranks without rounding.
TEST(GradReducer, BackwardAveragesGradients) {
  const BackendPtr world = make_world_backend();
  const auto own = [&](double value) { return value * (world->getRank() + 1); };
  const double mean = (world->getSize() + 1) / 2.;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    OneWeight one(dtype);
    one.backward(own(12));
    one.expect_gradient(12 * mean);
    one.backward(own(24));  // accumulates onto an average
    one.expect_gradient(36 * mean);
    {
      const auto no_sync = one.reducer.no_sync();
      one.backward(own(12));
      one.expect_gradient(36 * mean + own(12));
    }
    one.backward(own(0));
    one.expect_gradient(48 * mean);
    one.weight.mutable_grad().mul_(0.5);  // as a user clips
    one.backward(own(12));
    one.expect_gradient(36 * mean);
    one.reducer.buckets().zero_grad(/*set_to_none=*/false);
    one.backward(own(12));
    one.expect_gradient(12 * mean);
  }
}

// Scaled gradients are averaged.
TEST(GradReducer, Float16OverflowsOnlyIfAverageDoes) {
  OneWeight half(at::kHalf), compressed(at::kFloat, at::kHalf);
  for (OneWeight* const one : {&half, &compressed}) {
    one->backward(60'000);
    one->expect_gradient(60'000);
  }
}

TEST(GradReducer, ReduceDtypeErrorIsWithinRounding) {
  const BackendPtr world = make_world_backend();
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Model model, alone;
    const GradReducer compressed(model->parameters(), world, {.reduce_dtype = dtype});
    const GradReducer plain(alone->parameters(), world);
    const Batch part = batches(2)[0].part(world->getRank(), world->getSize());
    for (const auto& net : {model, alone}) compute_loss(net, part, world->getRank()).backward();
    for (const auto& item : model->named_parameters()) {
      const at::Tensor wanted = alone->named_parameters()[item.key()].grad();
      if (!wanted.defined()) continue;
      // Values of up to 1 are rounded on each rank, and may cancel.
      const double bit = dtype == at::kBFloat16 ? 1. / 128 : 1. / 1024;
      EXPECT_TRUE(at::allclose(item.value().grad(), wanted, 2 * bit, bit)) << item.key();
      distributed_test::expect_equal_on_all_ranks(world, item.value().grad(), item.key());
    }
  }
}

TEST(GradReducer, LowPrecisionGradsEqualAcrossRanks) {
  const BackendPtr world = make_world_backend();
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Model model(dtype);
    const GradReducer reducer(model->parameters(), world, kSmallBuckets);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (const Batch& batch : batches(6)) {
      optimizer.zero_grad();
      compute_loss(model, batch.part(world->getRank(), world->getSize()), world->getRank())
          .backward();
      optimizer.step();
    }
    expect_equal_weights_on_all_ranks(world, model);
  }
}

TEST(GradReducer, BackwardThrowsAfterFailedBackward) {
  const BackendPtr world = make_world_backend();
  Model model;
  GradReducer reducer(model->parameters(), world, kSmallBuckets);
  const Batch batch = batches(2)[0];
  const at::Tensor hidden = torch::tanh(model->left->forward(torch::ones({2, 45})));
  hidden.register_hook([](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "on purpose"); });
  EXPECT_THAT(message_of([&] { model->out->forward(hidden).sum().backward(); }),
              testing::HasSubstr("on purpose"));
  reducer.buckets().zero_grad();
  if (world->getSize() == 1) return;  // a single rank cannot be out of sync
  EXPECT_THAT(message_of([&] { compute_loss(model, batch, 0).backward(); }),
              testing::HasSubstr("an earlier backward pass threw"));
}

// The ranks' buckets have equal numbers of elements, but different dtypes.
TEST(GradReducer, ConstructorThrowsForDifferentBuckets) {
  const BackendPtr world = make_world_backend();
  const at::Tensor one = torch::ones({3}).requires_grad_(),
                   other = torch::ones({3}, at::kBFloat16).requires_grad_();
  const bool is_first = world->getRank() == 0;
  const std::vector<at::Tensor> parameters =
      is_first ? std::vector{one, other} : std::vector{other, one};
  const std::string error = message_of([&] { const GradReducer reducer(parameters, world); });
  EXPECT_EQ(
      error.find("where rank 0 has \"parameter 0: Float [3] in bucket 1") != std::string::npos,
      world->getSize() > 1)
      << error;
}

// 256 + 1 is 256 in bfloat16.
TEST(GradReducer, ReducesFloat32GradsOfBfloat16Params) {
  const BackendPtr world = make_world_backend();
  const at::Tensor weight = torch::zeros({3}, at::kBFloat16).requires_grad_();
  weight.set_grad_dtype(at::kFloat);
  GradReducer reducer({weight}, world);
  EXPECT_EQ(reducer.buckets().buckets()[0].dtype, at::kFloat);
  const int size = world->getSize();
  (weight.to(at::kFloat) * (world->getRank() == 0 ? 256 * size : size)).sum().backward();
  const auto expected = static_cast<float>(256 + size - 1);
  EXPECT_TRUE(at::equal(weight.grad(), torch::full({3}, expected))) << weight.grad();
}

}  // namespace
}  // namespace grad_reducer_test
