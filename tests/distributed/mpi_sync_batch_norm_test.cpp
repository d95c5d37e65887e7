#include <torch/torch.h>
//
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/distributed/sync_batch_norm.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "rank_equality.h"
#include "test_backends.h"

namespace {

using distributed_test::all_reduce;
using distributed_test::BackendPtr;
using distributed_test::expect_equal_on_all_ranks;
using distributed_test::make_world_backend;
using distributed_test::ReduceOp;
using mezzo::SyncBatchNorm;
using test_support::message_of;
using testing::HasSubstr;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNormOptions;

constexpr int64_t kChannels = 3;

/// The batch of all ranks; rank 0 has the first rows.
struct SplitBatch {
  SplitBatch(std::vector<int64_t> rows_of_ranks, at::ScalarType dtype = at::kDouble)
      : rows(std::move(rows_of_ranks)) {
    torch::manual_seed(7);
    int64_t count = 0;
    for (const int64_t of_rank : rows) count += of_rank;
    x = (torch::randn({count, kChannels, 4, 5}, torch::kDouble) * 3 + 100).to(dtype);
    target = torch::randn({count, kChannels, 4, 5}, torch::kDouble);
  }
  at::Tensor part(const at::Tensor& of_all, int rank) const {
    return of_all.split_with_sizes(rows)[static_cast<std::size_t>(rank)];
  }
  std::vector<int64_t> rows;
  at::Tensor x, target;
};

std::vector<int64_t> even(int ranks) {
  return std::vector<int64_t>(static_cast<std::size_t>(ranks), 2);
}
std::vector<int64_t> uneven(int ranks) {
  std::vector<int64_t> rows;
  for (int rank = 0; rank < ranks; ++rank) rows.push_back(rank == 0 ? 4 : rank - 1);
  return rows;
}

struct MpiSyncBatchNorm : testing::Test {
  const BackendPtr world = make_world_backend();

  at::Tensor summed(const at::Tensor& tensor) {
    const at::Tensor sum = tensor.detach().clone();
    all_reduce(world, sum, ReduceOp::SUM);
    return sum;
  }

  /// Compares three training steps with BatchNorm on the whole batch, forward and backward.
  void expect_matches_batch_norm(const SplitBatch& batch, const BatchNormOptions& options,
                                 double tolerance) {
    const int rank = world->getRank();
    SyncBatchNorm own(options, world);
    BatchNorm2d whole(options);
    own->to(at::kDouble);
    whole->to(at::kDouble);
    if (options.affine()) {
      const at::NoGradGuard no_grad;
      for (auto* weight : {&own->weight, &whole->weight}) weight->copy_(at::arange(1, 4));
    }
    for (int step = 0; step < 3; ++step) {
      own->zero_grad();
      whole->zero_grad();
      const at::Tensor x = batch.part(batch.x, rank).clone().requires_grad_();
      const at::Tensor all_x = batch.x.to(at::kDouble).clone().requires_grad_();
      const at::Tensor y = own->forward(x);
      const at::Tensor all_y = whole->forward(all_x);
      EXPECT_EQ(y.scalar_type(), x.scalar_type());
      EXPECT_TRUE(at::allclose(y.to(at::kDouble), batch.part(all_y, rank), tolerance, tolerance));
      (y * batch.part(batch.target, rank)).sum().backward();
      (all_y * batch.target).sum().backward();
      EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), batch.part(all_x.grad(), rank), tolerance,
                               tolerance));
      if (!options.affine()) continue;
      EXPECT_TRUE(at::allclose(summed(own->weight.grad()), whole->weight.grad(), tolerance,
                               10 * tolerance));
      EXPECT_TRUE(
          at::allclose(summed(own->bias.grad()), whole->bias.grad(), tolerance, 10 * tolerance));
    }
    if (!options.track_running_stats()) return;
    EXPECT_TRUE(at::allclose(own->running_mean, whole->running_mean, tolerance));
    EXPECT_TRUE(at::allclose(own->running_var, whole->running_var, tolerance));
    EXPECT_EQ(own->num_batches_tracked.item<int64_t>(), 3);
    expect_equal_on_all_ranks(world, own->running_mean, "the mean");
    expect_equal_on_all_ranks(world, own->running_var, "the variance");
  }
};

TEST_F(MpiSyncBatchNorm, MatchesBatchNormWithUnevenBatches) {
  for (const auto& rows : {even(world->getSize()), uneven(world->getSize())}) {
    expect_matches_batch_norm(SplitBatch(rows), BatchNormOptions(kChannels), 1e-10);
  }
}

TEST_F(MpiSyncBatchNorm, SupportsBatchNormOptions) {
  for (const auto& options : {BatchNormOptions(kChannels).affine(false).eps(0.5),
                              BatchNormOptions(kChannels).momentum(std::nullopt),
                              BatchNormOptions(kChannels).track_running_stats(false)}) {
    expect_matches_batch_norm(SplitBatch(even(world->getSize())), options, 1e-10);
  }
}

// The sum of squares of this input overflows float16, and exceeds the precision of bfloat16.
TEST_F(MpiSyncBatchNorm, LowPrecisionInputsUseFloat32Statistics) {
  expect_matches_batch_norm(SplitBatch(even(world->getSize()), at::kHalf),
                            BatchNormOptions(kChannels), 4e-3);
  expect_matches_batch_norm(SplitBatch(even(world->getSize()), at::kBFloat16),
                            BatchNormOptions(kChannels), 3e-2);
  const SplitBatch batch(even(world->getSize()), at::kHalf);
  SyncBatchNorm norm(BatchNormOptions(kChannels).momentum(1.0), world);
  (void)norm->forward(batch.part(batch.x, world->getRank()));
  EXPECT_TRUE(at::allclose(norm->running_mean.to(at::kDouble),
                           batch.x.to(at::kDouble).mean({0, 2, 3}), 1e-6));
}

TEST_F(MpiSyncBatchNorm, ResultIsUnchangedUnderAutocast) {
  const SplitBatch batch(even(world->getSize()), at::kFloat);
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  const at::Tensor x = batch.part(batch.x, world->getRank());
  const at::Tensor expected = norm->forward(x);
  const mezzo::AutocastGuard<torch::kCPU> autocast(
      {.op_overrides =
           mezzo::install_op_overrides(mezzo::OpOverrides().allow("aten::mul.Tensor"))});
  EXPECT_TRUE(at::equal(norm->forward(x), expected));
}

TEST_F(MpiSyncBatchNorm, AcceptsTwoDimensionalInput) {
  torch::manual_seed(world->getRank());
  const at::Tensor x = torch::randn({5, kChannels});
  SyncBatchNorm a(BatchNormOptions(kChannels), world), b(BatchNormOptions(kChannels), world);
  const at::Tensor y = a->forward(x);
  EXPECT_TRUE(at::equal(y, b->forward(x.view({5, kChannels, 1})).squeeze(2)));
}

TEST_F(MpiSyncBatchNorm, EvalMatchesBatchNormStateDict) {
  BatchNorm2d plain{BatchNormOptions(kChannels)};
  (void)plain->forward(SplitBatch({4}).x.to(at::kFloat));
  std::stringstream file;
  torch::save(plain, file);
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  torch::load(norm, file);
  norm->eval();
  plain->eval();
  if (world->getRank() != 0) return;  // forward must not call a collective
  const at::Tensor x = torch::randn({2, kChannels, 4, 4});
  EXPECT_TRUE(at::equal(norm->forward(x), plain->forward(x)));
}

TEST_F(MpiSyncBatchNorm, CloneUsesSameBackend) {
  const SplitBatch batch(even(world->getSize()), at::kFloat);
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  const auto copy = std::dynamic_pointer_cast<mezzo::SyncBatchNormImpl>(norm->clone());
  const at::Tensor x = batch.part(batch.x, world->getRank());
  EXPECT_TRUE(at::equal(norm->forward(x), copy->forward(x)));
  EXPECT_FALSE(copy->running_mean.is_alias_of(norm->running_mean));
}

TEST_F(MpiSyncBatchNorm, ConstructorThrowsForDifferentOptions) {
  if (world->getSize() == 1) return;
  const bool is_last = world->getRank() == world->getSize() - 1;
  const std::string who = "rank " + std::to_string(world->getSize() - 1) + " has ";
  const auto error_with = [&](const BatchNormOptions& options) {
    return message_of(
        [&] { SyncBatchNorm(is_last ? options : BatchNormOptions(kChannels), world); });
  };
  const BatchNormOptions same(kChannels);
  EXPECT_THAT(error_with(BatchNormOptions(same).eps(1.1e-5)),
              testing::AllOf(HasSubstr(who), HasSubstr("eps=1.1e-05"), HasSubstr("eps=1e-05")));
  EXPECT_THAT(error_with(BatchNormOptions(same).momentum(std::nullopt)),
              testing::AllOf(HasSubstr(who), HasSubstr("momentum=None")));
  EXPECT_THAT(error_with(BatchNormOptions(4)), HasSubstr("SyncBatchNorm(4, "));
}

TEST_F(MpiSyncBatchNorm, ThrowsForUnsupportedInput) {
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  EXPECT_THAT(message_of([&] { norm->forward(torch::randn({3})); }), HasSubstr("1 dimensions"));
  EXPECT_THAT(message_of([&] { norm->forward(torch::randn({3, 4})); }), HasSubstr("4 channels"));
  EXPECT_THAT(message_of([&] {
                norm->forward(torch::ones({3, kChannels}, at::kLong));
              }),
              HasSubstr("floating-point dtype"));
}

TEST_F(MpiSyncBatchNorm, AllRanksThrowForSingleValue) {
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  const int64_t on_first = world->getRank() == 0 ? 1 : 0;
  for (const int64_t samples : {int64_t{0}, on_first}) {
    EXPECT_THAT(message_of([&] {
                  norm->forward(torch::randn({samples, kChannels}));
                }),
                HasSubstr("Expected more than 1 value per channel"));
  }
  EXPECT_TRUE(norm->running_mean.equal(torch::zeros({kChannels})));
}

TEST_F(MpiSyncBatchNorm, ThrowsForDoubleBackward) {
  SyncBatchNorm norm(BatchNormOptions(kChannels), world);
  const at::Tensor x = torch::randn({4, kChannels}).requires_grad_();
  const at::Tensor y = norm->forward(x).square().sum();
  EXPECT_THAT(message_of([&] {
                torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
              }),
              HasSubstr("without create_graph"));
}

TEST_F(MpiSyncBatchNorm, PrettyPrintsOptions) {
  std::ostringstream text;
  text << SyncBatchNorm(BatchNormOptions(kChannels), world);
  EXPECT_EQ(text.str(),
            "mezzo::SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true)");
}

}  // namespace
