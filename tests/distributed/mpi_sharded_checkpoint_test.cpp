#include <torch/torch.h>
//
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/sgd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/message_of.h"
#include "../support/save_to_string.h"
#include "rank_subset.h"
#include "single_process_reference.h"
#include "test_backends.h"

namespace sharded_checkpoint_test {
namespace {

using distributed_test::available_world_sizes;
using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using distributed_test::RankSubset;
using mezzo::ShardedOptimizer;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using mezzo::optim::WeightStorageOptions;
using single_process_reference::kSmallBuckets;
using single_process_reference::Model;
using test_support::load_from_string;
using test_support::message_of;
using test_support::save_to_string;
using testing::HasSubstr;

std::string broadcast_from_rank0(const std::string& text) {
  return mezzo::detail::broadcast_string(make_world_backend(), text, 0);
}

/// All ranks compute equal gradients, so that averages over 1, 2 and 4 ranks are exact, and every
/// world size computes the weights of the unsharded optimizer.
void train(Model model, torch::optim::Optimizer& optimizer, int first, int last) {
  const auto data = single_process_reference::batches(last);
  for (int i = first; i < last; ++i) {
    optimizer.zero_grad();
    // One parameter is used in some steps only: its step count is lower.
    single_process_reference::compute_loss(model, data[static_cast<std::size_t>(i)], i % 2)
        .backward();
    optimizer.step();
  }
}

struct Saved {
  std::string model;
  std::string optimizer;
};

/// Trains an unsharded optimizer for 5 steps, and saves after 3.
template <class Optimizer, class Options>
Saved train_single_process(Model model, const Options& options,
                           const WeightStorageOptions& weights) {
  Optimizer optimizer(model->parameters(), options, weights);
  train(model, optimizer, 0, 3);
  Saved files{save_to_string(model), save_to_string(optimizer)};
  train(model, optimizer, 3, 5);
  return files;
}

/// Trains on the first `size` ranks as train_single_process, expects the weights of `expected`, and
/// returns rank 0's archives.
template <class Optimizer, class Options>
Saved train_on_ranks(int size, const Options& options, const WeightStorageOptions& weights,
                     Model expected) {
  const RankSubset group(size);
  Saved files;
  if (group.contains_this_rank()) {
    Model model(expected->out->bias.scalar_type());
    ShardedOptimizer<Optimizer> optimizer(model->parameters(), group.backend(), options,
                                          kSmallBuckets, weights);
    train(model, optimizer, 0, 3);
    files = {save_to_string(model), save_to_string(optimizer)};
    train(model, optimizer, 3, 5);
    single_process_reference::expect_equal(model, expected, "saving changes nothing");
  }
  return {broadcast_from_rank0(files.model), broadcast_from_rank0(files.optimizer)};
}

/// Resumes from the saved step, and expects the weights of `expected`.
template <class Optimizer>
void expect_bitwise_resume(const Saved& file, Model model, Optimizer& optimizer, Model expected,
                           const std::string& who) {
  load_from_string(model, file.model);
  load_from_string(optimizer, file.optimizer);
  EXPECT_EQ(optimizer.applied_steps(), 3) << who;
  train(model, optimizer, 3, 5);
  single_process_reference::expect_equal(model, expected, who + " resumes");
}

template <class Optimizer, class Options>
void expect_bitwise_resume_anywhere(const Options& options, at::ScalarType dtype,
                                    const WeightStorageOptions& weights = {}) {
  Model alone(dtype);
  std::vector<Saved> files{train_single_process<Optimizer>(alone, options, weights)};
  for (const int size : available_world_sizes())
    files.push_back(train_on_ranks<Optimizer>(size, options, weights, alone));
  for (const Saved& file : files) {
    Model unsharded(dtype);
    Optimizer optimizer(unsharded->parameters(), options, weights);
    expect_bitwise_resume(file, unsharded, optimizer, alone, "an optimizer alone");
    for (const int size : available_world_sizes()) {
      const RankSubset group(size);
      if (!group.contains_this_rank()) continue;
      Model model(dtype);
      ShardedOptimizer<Optimizer> sharded(model->parameters(), group.backend(), options,
                                          kSmallBuckets, weights);
      train(model, sharded, 0, 1);  // load must replace this state
      expect_bitwise_resume(file, model, sharded, alone,
                            "one of " + std::to_string(size) + " ranks");
    }
  }
}

TEST(ShardedOptimizerCheckpoint, AnyWorldSizeResumesBitwise) {
  expect_bitwise_resume_anywhere<AdamW>(AdamWOptions(0.01).amsgrad(true), at::kFloat);
}

TEST(ShardedOptimizerCheckpoint, SavesMasterWeights) {
  using mezzo::optim::SGD;
  using mezzo::optim::SGDOptions;
  expect_bitwise_resume_anywhere<AdamW>(AdamWOptions(0.01), at::kBFloat16,
                                        {.weight_storage = WeightStorage::fp32_master});
  expect_bitwise_resume_anywhere<SGD>(SGDOptions(0.01).momentum(0.9), at::kBFloat16,
                                      {.weight_storage = WeightStorage::split_master});
}

/// Returns null if the optimizer has no state of the parameter.
mezzo::optim::AdamWParamState* state_of(AdamW& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end()
             ? nullptr
             : static_cast<mezzo::optim::AdamWParamState*>(found->second.get());
}

void expect_same_state(mezzo::optim::AdamWParamState& got,
                       mezzo::optim::AdamWParamState& expected) {
  EXPECT_EQ(got.step(), expected.step());
  const auto expect_same = [](const at::Tensor& a, const at::Tensor& b) {
    ASSERT_EQ(a.defined(), b.defined());
    if (!a.defined()) return;
    EXPECT_TRUE(at::equal(a, b));
    EXPECT_EQ(a.scalar_type(), b.scalar_type());
    EXPECT_EQ(a.strides(), b.strides());
  };
  expect_same(got.exp_avg(), expected.exp_avg());
  expect_same(got.exp_avg_sq(), expected.exp_avg_sq());
  expect_same(got.max_exp_avg_sq(), expected.max_exp_avg_sq());
  expect_same(got.master(), expected.master());
}

// The archive has the states of the unsharded optimizer, with the shapes, strides and dtypes of the
// parameters.
TEST(ShardedOptimizerCheckpoint, ArchiveMatchesUnshardedOptimizer) {
  const RankSubset group(available_world_sizes().back());  // three ranks would round averages
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const AdamWOptions options(0.01);
    const WeightStorageOptions masters{.weight_storage = WeightStorage::fp32_master};
    Model alone(dtype), other(dtype);
    std::string archive;
    if (group.contains_this_rank()) {
      Model model(dtype);
      ShardedOptimizer<AdamW> sharded(model->parameters(), group.backend(), options, kSmallBuckets,
                                      masters);
      train(model, sharded, 0, 3);
      archive = save_to_string(sharded);
    }
    AdamW whole(alone->parameters(), options, masters);
    train(alone, whole, 0, 3);
    AdamW loaded(other->parameters(), AdamWOptions(1.));
    load_from_string(loaded, broadcast_from_rank0(archive));
    ASSERT_EQ(loaded.state().size(), whole.state().size());
    EXPECT_EQ(static_cast<AdamWOptions&>(loaded.param_groups()[0].options()).lr(), 0.01);
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      const testing::ScopedTrace trace(__FILE__, __LINE__, i);
      auto* const got = state_of(loaded, other->parameters()[i]);
      auto* const expected = state_of(whole, alone->parameters()[i]);
      ASSERT_EQ(got == nullptr, expected == nullptr);
      if (got != nullptr) expect_same_state(*got, *expected);
    }
  }
}

// torch::optim::Adagrad creates the states of all parameters at construction.
TEST(ShardedOptimizerCheckpoint, SavesStateOfOwningRank) {
  using torch::optim::Adagrad;
  const RankSubset group(available_world_sizes().back());
  const torch::optim::AdagradOptions options(0.01);
  Model alone, other;
  std::string archive;
  if (group.contains_this_rank()) {
    Model model;
    ShardedOptimizer<Adagrad> sharded(model->parameters(), group.backend(), options, kSmallBuckets);
    train(model, sharded, 0, 3);
    archive = save_to_string(sharded);
  }
  Adagrad whole(alone->parameters(), options), loaded(other->parameters(), options);
  train(alone, whole, 0, 3);
  load_from_string(loaded, broadcast_from_rank0(archive));
  const auto sum_of = [](Adagrad& optimizer, const at::Tensor& parameter) {
    auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<torch::optim::AdagradParamState&>(state).sum();
  };
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    EXPECT_THAT(sum_of(loaded, other->parameters()[i]),
                test_support::BitwiseEqual(sum_of(whole, alone->parameters()[i])));
  }
}

TEST(ShardedOptimizerCheckpoint, ScheduleResumesFromBaseLrs) {
  BackendPtr backend = make_world_backend();
  Model model;
  ShardedOptimizer<AdamW> optimizer(model->parameters(), backend, AdamWOptions(0.5), kSmallBuckets);
  optimizer.set_lr_factors({1., 0.5, 0.25});
  train(model, optimizer, 0, 2);
  optimizer.set_optimizer_lrs(2);
  {
    const std::string file = broadcast_from_rank0(save_to_string(optimizer));
    ShardedOptimizer<AdamW> loaded(model->parameters(), backend, AdamWOptions(0.1), kSmallBuckets);
    loaded.set_lr_factors({1., 0.5, 0.25});
    load_from_string(loaded, file);
    EXPECT_EQ(loaded.base_lrs(), std::vector<double>{0.5});
    EXPECT_EQ(loaded.param_groups()[0].options().get_lr(), 0.125);
    EXPECT_EQ(loaded.applied_steps(), 2);
  }
}

TEST(ShardedOptimizerCheckpoint, PreservesStateOfFrozenParam) {
  BackendPtr backend = make_world_backend();
  Model model;
  std::string file;
  {
    ShardedOptimizer<AdamW> all(model->parameters(), backend, AdamWOptions(0.1), kSmallBuckets);
    train(model, all, 0, 2);
    file = broadcast_from_rank0(save_to_string(all));
  }
  model->out->bias.set_requires_grad(false);
  model->out->bias.mutable_grad() = at::Tensor();
  ShardedOptimizer<AdamW> fewer(model->parameters(), backend, AdamWOptions(0.1), kSmallBuckets);
  load_from_string(fewer, file);
  train(model, fewer, 2, 3);
  const std::string later = broadcast_from_rank0(save_to_string(fewer));
  for (const bool is_frozen : {true, false}) {
    const at::Tensor& parameter = is_frozen ? model->out->bias : model->out->weight;
    AdamW before(model->parameters(), AdamWOptions(0.1)), after(before.param_groups());
    load_from_string(before, file);
    load_from_string(after, later);
    ASSERT_NE(state_of(after, parameter), nullptr);
    EXPECT_EQ(state_of(after, parameter)->step(), is_frozen ? 2 : 3);
    EXPECT_EQ(
        at::equal(state_of(after, parameter)->exp_avg(), state_of(before, parameter)->exp_avg()),
        is_frozen);
  }
}

TEST(ShardedOptimizerCheckpoint, FailedSaveThrowsOnAllRanks) {
  BackendPtr backend = make_world_backend();
  Model model;
  ShardedOptimizer<AdamW> optimizer(model->parameters(), backend, AdamWOptions(0.1), kSmallBuckets);
  train(model, optimizer, 0, 2);
  const std::size_t states = optimizer.state().size();
  const std::string file = save_to_string(optimizer);
  {
    const mezzo::Ema ema(model->parameters());
    std::optional<mezzo::EmaGuard> averages;
    if (backend->getRank() == backend->getSize() - 1) averages.emplace(ema);
    EXPECT_THAT(message_of([&] { save_to_string(optimizer); }),
                testing::AllOf(HasSubstr("ShardedOptimizer::save: rank " +
                                         std::to_string(backend->getSize() - 1) + " of"),
                               HasSubstr("holds an average")));
  }
  EXPECT_EQ(optimizer.state().size(), states);
  EXPECT_EQ(save_to_string(optimizer), file);
}

TEST(ShardedOptimizerCheckpoint, LoadsTorchArchive) {
  BackendPtr backend = make_world_backend();
  Model alone;
  torch::optim::AdamW theirs(alone->parameters(), torch::optim::AdamWOptions(0.01));
  train(alone, theirs, 0, 3);
  Model model;
  load_from_string(model, save_to_string(alone));
  ShardedOptimizer<AdamW> sharded(model->parameters(), backend, AdamWOptions(1.), kSmallBuckets);
  load_from_string(sharded, save_to_string(theirs));
  train(alone, theirs, 3, 5);
  train(model, sharded, 3, 5);
  single_process_reference::expect_close(model, alone, 1e-6);
}

TEST(ShardedOptimizerCheckpoint, InvalidArchiveThrowsWithoutChanges) {
  BackendPtr backend = make_world_backend();
  Model model, alone;
  ShardedOptimizer<AdamW> optimizer(model->parameters(), backend, AdamWOptions(0.01),
                                    kSmallBuckets);
  ShardedOptimizer<AdamW> uninterrupted(alone->parameters(), backend, AdamWOptions(0.01),
                                        kSmallBuckets);
  train(model, optimizer, 0, 2);
  train(alone, uninterrupted, 0, 2);
  const at::Tensor other = torch::zeros({3}).requires_grad_();
  AdamW of_another_model({other}, AdamWOptions(0.5));
  EXPECT_THAT(message_of([&] { load_from_string(optimizer, save_to_string(of_another_model)); }),
              HasSubstr("different size"));
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model->parameters()) {
    parameters.push_back(torch::zeros({parameter.numel() + 1}).requires_grad_());
  }
  AdamW of_other_shapes(parameters, AdamWOptions(0.5));
  for (const at::Tensor& parameter : parameters) parameter.sum().backward();
  of_other_shapes.step();
  EXPECT_THAT(message_of([&] { load_from_string(optimizer, save_to_string(of_other_shapes)); }),
              HasSubstr("another model's"));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
  train(model, optimizer, 2, 4);
  train(alone, uninterrupted, 2, 4);
  single_process_reference::expect_equal(model, alone, "the failed loads changed nothing");
}

}  // namespace
}  // namespace sharded_checkpoint_test
