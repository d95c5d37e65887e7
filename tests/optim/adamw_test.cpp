// AdamW: memory layouts, archives and gradients. The code is shared by all fused optimizers.

#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../support/get_param_state.h"
#include "../support/save_to_string.h"

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::AdamWParamState;
using mezzo::optim::WeightStorage;
using test_support::get_param_state;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(AdamW, BitwiseIdenticalAcrossThreadCounts) {
  std::vector<torch::Tensor> results;
  const int before = torch::get_num_threads();
  for (const int threads : {1, 2, 5}) {
    torch::set_num_threads(threads);
    torch::manual_seed(1);
    const auto parameter = torch::randn({30000});
    AdamW optimizer({parameter}, AdamWOptions(1e-2));
    for (int i = 0; i < 3; ++i) {
      parameter.mutable_grad() = torch::randn({30000});
      optimizer.step();
    }
    results.push_back(parameter);
  }
  torch::set_num_threads(before);
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_TRUE(torch::equal(results[0], results[2]));
}

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// Two groups of the given sizes, after `steps` steps with `lr`.
struct TwoGroups {
  TwoGroups(std::vector<std::size_t> sizes, double lr, int steps)
      : optimizer(groups(sizes), AdamWOptions(lr)) {
    for (int i = 0; i < steps; ++i) {
      for (const auto& group : optimizer.param_groups()) {
        for (const auto& parameter : group.params()) parameter.mutable_grad() = torch::ones({3});
      }
      optimizer.step();
    }
  }

  std::string file() const {
    std::stringstream file;
    torch::save(optimizer, file);
    return file.str();
  }
  void load(const std::string& file) {
    std::stringstream stream(file);
    torch::load(optimizer, stream);
  }
  double lr(std::size_t group) const { return optimizer.param_groups()[group].options().get_lr(); }

  static Groups groups(const std::vector<std::size_t>& sizes) {
    Groups all;
    for (const std::size_t size : sizes) {
      std::vector<torch::Tensor> parameters;
      for (std::size_t i = 0; i < size; ++i) parameters.push_back(torch::ones({3}));
      all.emplace_back(parameters);
    }
    return all;
  }

  AdamW optimizer;
};

TEST(AdamW, FailedLoadChangesNothing) {
  const TwoGroups other({2, 2}, 0.5, 4);
  TwoGroups loaded({2, 1}, 0.1, 2);
  const auto parameter = loaded.optimizer.param_groups()[0].params()[0];
  const auto& state = get_param_state<mezzo::optim::AdamWParamState>(loaded.optimizer, parameter);
  EXPECT_THROW(loaded.load(other.file()), c10::Error);
  EXPECT_EQ(loaded.lr(0), 0.1);
  EXPECT_EQ(loaded.optimizer.applied_steps(), 2);
  ASSERT_EQ(loaded.optimizer.state().at(parameter.unsafeGetTensorImpl()).get(), &state);
  EXPECT_EQ(state.step(), 2);
}

// Otherwise a run that is reset to its start would keep its moments.
TEST(AdamW, LoadDropsStateMissingInArchive) {
  TwoGroups loaded({1, 1}, 0.1, 0);
  const std::string initial_archive = loaded.file();
  TwoGroups trained({1, 1}, 0.1, 2);
  trained.load(initial_archive);
  EXPECT_TRUE(trained.optimizer.state().empty());
  EXPECT_EQ(trained.optimizer.applied_steps(), 0);
}

TEST(AdamWMemory, NonDenseParamThrowsBeforeWriting) {
  const auto base = torch::ones({6, 8});
  const auto non_dense = base.slice(1, 0, 8, 2), ordinary = torch::ones({3});
  non_dense.mutable_grad() = torch::randn({6, 4});
  ordinary.mutable_grad() = torch::ones({3});
  AdamW optimizer({ordinary, non_dense});
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("has non-contiguous or overlapping storage")));
  EXPECT_TRUE(torch::equal(base, torch::ones({6, 8})));
  EXPECT_TRUE(torch::equal(ordinary, torch::ones({3})));
}

TEST(AdamWMemory, PreservesCopyOnWriteAliases) {
  const auto x = torch::ones({8});
  const auto lazy = at::_lazy_clone(x);
  x.mutable_grad() = torch::ones({8});
  AdamW optimizer({x}, AdamWOptions(0.1));
  optimizer.step();
  EXPECT_TRUE(torch::equal(lazy, torch::ones({8})));
  EXPECT_FALSE(torch::equal(x, lazy));
}

TEST(AdamWMemory, BumpsVersionCounters) {
  const auto x = torch::ones({3}).requires_grad_();
  const auto square = (x * x).sum();
  x.mutable_grad() = torch::ones({3});
  AdamW optimizer({x});
  optimizer.step();
  EXPECT_THROW(square.backward(), c10::Error) << "x was written after it was saved for backward";
}

TEST(AdamWDtypes, UpdatesBfloat16AndFloat16Params) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto x = torch::full({100}, 2.0, dtype).requires_grad_();
    AdamW optimizer({x}, AdamWOptions(0.05).weight_decay(0));
    for (int i = 0; i < 60; ++i) {
      optimizer.zero_grad();
      (x.to(torch::kFloat) - 1).square().sum().backward();
      optimizer.step();
    }
    EXPECT_TRUE(torch::allclose(x.to(torch::kFloat), torch::ones({100}), 0, 0.1)) << dtype;
    EXPECT_EQ(get_param_state<AdamWParamState>(optimizer, x).exp_avg().scalar_type(), dtype);
  }
}

TEST(AdamWErrors, ThrowsForOverlappingParams) {
  const auto x = torch::ones({8});
  EXPECT_THAT(
      [&] {
        AdamW({x.narrow(0, 0, 5), x.narrow(0, 4, 4)});
      },
      ThrowsMessage<c10::Error>(HasSubstr("share memory")));
  EXPECT_NO_THROW(AdamW({x.narrow(0, 0, 4), x.narrow(0, 4, 4)}));
  EXPECT_NO_THROW(AdamW({at::_lazy_clone(x), at::_lazy_clone(x), torch::ones({0})}));
  const auto expanded = torch::ones({1}).expand({4});
  const auto y = torch::ones({4});
  AdamW optimizer({y, expanded}, AdamWOptions(0.1));
  y.mutable_grad() = torch::ones({4});
  expanded.mutable_grad() = torch::ones({4});
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("has non-contiguous or overlapping storage")));
  EXPECT_TRUE(torch::equal(y, torch::ones({4})));
}

TEST(AdamWErrors, ThrowsForUnsupportedGradientBeforeWriting) {
  const auto good = torch::ones({4});
  const auto bad = torch::ones({4});
  good.mutable_grad() = torch::ones({4});
  AdamW optimizer({good, bad}, AdamWOptions(0.1));
  bad.mutable_grad() = torch::ones({4}).to_sparse();
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("does not support sparse gradients")));
  const auto half = torch::ones({4}, torch::kHalf);
  half.mutable_grad() = torch::ones({4}, torch::kDouble);
  AdamW narrow({half});
  EXPECT_THAT([&] { narrow.step(); },
              ThrowsMessage<c10::Error>(HasSubstr("has a gradient of float64")));
  EXPECT_TRUE(torch::equal(good, torch::ones({4})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(AdamWErrors, ThrowsForStateOfOtherShape) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::fp32_master}) {
    const auto small = torch::ones({4}, torch::kBFloat16);
    small.mutable_grad() = torch::ones({4}, torch::kBFloat16);
    AdamW saved({small}, {}, {.weight_storage = storage});
    saved.step();
    const auto large = torch::ones({5}, torch::kBFloat16);
    AdamW loaded({large});
    EXPECT_THAT(
        [&] { test_support::load_from_string(loaded, test_support::save_to_string(saved)); },
        ThrowsMessage<c10::Error>(HasSubstr("of the shape [4]; it is another model's")));
    EXPECT_TRUE(loaded.state().empty());
  }
}

}  // namespace
