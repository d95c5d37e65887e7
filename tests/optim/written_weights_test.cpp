// Weights of 16 bits that somebody writes between two steps: the next step goes on from what was
// written, and an element that nobody wrote keeps its master's bits.

#include <mezzo/optim/master_weights.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/keepers.h"

namespace {

using test_support::Keeper;
using test_support::OwnedOptimizer;
using torch::Tensor;

/// The ways to keep weights of 16 bits.
std::vector<Keeper> keepers_of_16_bits() {
  std::vector<Keeper> all = test_support::keepers();
  std::erase_if(all, [](const Keeper& one) { return one.dtype == torch::kFloat; });
  return all;
}

constexpr int64_t kSize = 70;  // whole vectors and a rest

/// A step whose gradients are all `gradient`.
void step(const OwnedOptimizer& optimizer, const std::vector<Tensor>& parameters, double gradient) {
  for (const Tensor& one : parameters) {
    one.mutable_grad() = torch::full_like(one.detach(), gradient);
  }
  (void)optimizer.any().step();
}

/// Ways to write `values` to a parameter; a bool says whether the parameter's version tells.
using Write = std::function<void(const Tensor& parameter, const Tensor& values)>;

std::vector<std::pair<std::string, Write>> writes() {
  return {{"copy_",
           [](const Tensor& parameter, const Tensor& values) {
             const torch::NoGradGuard no_grad;
             parameter.copy_(values);
           }},
          {"data()",
           [](const Tensor& parameter, const Tensor& values) { parameter.data().copy_(values); }},
          {"set_data to other memory",
           [](const Tensor& parameter, const Tensor& values) {
             parameter.set_data(values.to(parameter.scalar_type()).clone());
           }},
          {"set_data to a flat buffer that is written",
           [](const Tensor& parameter, const Tensor& values) {
             const Tensor flat = torch::zeros({2 * kSize}, parameter.scalar_type());
             parameter.set_data(flat.narrow(0, 0, kSize));
             flat.narrow(0, 0, kSize).copy_(values);
           }},
          {"a raw pointer",
           [](const Tensor& parameter, const Tensor& values) {
             const Tensor low = values.to(parameter.scalar_type());
             std::memcpy(parameter.data_ptr(), low.const_data_ptr(), low.nbytes());
           }},
          {"torch::load", [](const Tensor& parameter, const Tensor& values) {
             std::stringstream file;
             torch::save(values.to(parameter.scalar_type()), file);
             Tensor loaded;
             torch::load(loaded, file);
             const torch::NoGradGuard no_grad;
             parameter.copy_(loaded);
           }}};
}

TEST(WrittenWeights, AreWhatTheNextStepGoesOnFrom) {
  for (const Keeper& keeper : keepers_of_16_bits()) {
    for (const auto& [way, write] : writes()) {
      SCOPED_TRACE(std::string(keeper.name) + ", by " + way);
      const Tensor parameter = torch::linspace(-1, 1, kSize).to(keeper.dtype).requires_grad_();
      const OwnedOptimizer optimizer = keeper.make({parameter});
      for (int round = 0; round < 3; ++round) {
        step(optimizer, {parameter}, 0x1p-12);  // below a digit of 16 bits
        const Tensor values = torch::linspace(2 + round, 3 + round, kSize).to(keeper.dtype);
        write(parameter, values);
        step(optimizer, {parameter}, 0.5);
        const Tensor wanted = values.to(torch::kFloat) - 0.5;
        const Tensor apart = (parameter.detach().to(torch::kFloat) - wanted).abs();
        EXPECT_LE(apart.max().item<float>(), 4 * 0x1p-7) << "a digit of numbers below 4 or 8";
        if (!keeper.is_split) {
          EXPECT_TRUE(parameter.equal(wanted.to(keeper.dtype)));
        }
      }
    }
  }
}

TEST(WrittenWeights, LeaveTheMastersOfTheOthersAsTheyWere) {
  for (const Keeper& keeper : keepers_of_16_bits()) {
    for (const auto& [way, write] : writes()) {
      SCOPED_TRACE(std::string(keeper.name) + ", by " + way);
      const Tensor written = torch::ones({kSize}, keeper.dtype).requires_grad_();
      const Tensor alone = torch::ones({kSize}, keeper.dtype).requires_grad_();
      const OwnedOptimizer optimizer = keeper.make({written}), other = keeper.make({alone});
      for (int round = 0; round < 50; ++round) {
        step(optimizer, {written}, 0x1p-12);
        step(other, {alone}, 0x1p-12);
        Tensor values = written.detach().to(torch::kFloat);
        values[3] = 7;
        write(written, values);
      }
      step(optimizer, {written}, 0);
      EXPECT_NEAR(written[3].item<float>(), 7, 0x1p-5);
      EXPECT_LT(alone[0].item<float>(), 1) << "50 steps below a digit add up";
      EXPECT_TRUE(written.slice(0, 4).equal(alone.slice(0, 4)));
    }
  }
}

TEST(WrittenWeights, OfZeroInfAndNanAreTakenExactly) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Keeper& keeper : keepers_of_16_bits()) {
    for (const float from : {1.01F, -1.01F}) {
      SCOPED_TRACE(testing::Message() << keeper.name << " from " << from);
      const Tensor parameter = torch::full({kSize}, from).to(keeper.dtype).requires_grad_();
      const OwnedOptimizer optimizer = keeper.make({parameter});
      step(optimizer, {parameter}, 0x1p-12);
      const std::vector<float> special{0.0F, -0.0F, inf, -inf, std::nanf("")};
      for (std::size_t i = 0; i < special.size(); ++i) {
        const torch::NoGradGuard no_grad;
        parameter[static_cast<int64_t>(i)].fill_(special[i]);
        parameter[kSize - 1 - static_cast<int64_t>(i)].fill_(special[i]);
      }
      step(optimizer, {parameter}, 0);
      for (std::size_t i = 0; i < special.size(); ++i) {
        for (const auto at : {static_cast<int64_t>(i), kSize - 1 - static_cast<int64_t>(i)}) {
          const auto now = parameter[at].item<float>();
          if (std::isnan(special[i])) {
            EXPECT_TRUE(std::isnan(now));
          } else if (std::isinf(special[i]) && keeper.is_split) {
            EXPECT_GE(std::abs(now), 0x1.FEp127F) << "a digit below inf at the most";
          } else {
            EXPECT_EQ(now, special[i]);
          }
        }
      }
    }
  }
}

TEST(WrittenWeights, ThatZeroWritesAreZero) {
  for (const Keeper& keeper : keepers_of_16_bits()) {
    SCOPED_TRACE(keeper.name);
    const Tensor parameter = torch::linspace(-1, 1, kSize).to(keeper.dtype).requires_grad_();
    const OwnedOptimizer optimizer = keeper.make({parameter});
    for (const double gradient : {0x1p-12, -0x1p-12}) {
      step(optimizer, {parameter}, gradient);
      {
        const torch::NoGradGuard no_grad;
        parameter.zero_();
      }
      step(optimizer, {parameter}, 0.5);
      EXPECT_TRUE(parameter.equal(torch::full({kSize}, -0.5, keeper.dtype)));
    }
  }
}

// flat.split(n) gives views that share a version counter: a write to one shows in all of them.
TEST(WrittenWeights, ThatShareAVersionCounterTrainAllTheSame) {
  for (const Keeper& keeper : keepers_of_16_bits()) {
    SCOPED_TRACE(keeper.name);
    const Tensor flat = torch::ones({4 * kSize}, keeper.dtype);
    std::vector<Tensor> views;
    for (const Tensor& view : flat.split(kSize)) views.push_back(view.requires_grad_());
    const Tensor alone = torch::ones({kSize}, keeper.dtype).requires_grad_();
    const OwnedOptimizer optimizer = keeper.make(views), other = keeper.make({alone});
    for (int i = 0; i < 1000; ++i) {
      step(optimizer, views, 0x1p-13);
      step(other, {alone}, 0x1p-13);
    }
    EXPECT_NEAR(alone[0].item<float>(), 1 - 1000 * 0x1p-13, 0x1p-8);
    for (const Tensor& view : views) EXPECT_TRUE(view.equal(alone));
  }
}

TEST(WrittenWeights, AtTheirMastersWin) {
  for (const Keeper& keeper : keepers_of_16_bits()) {
    if (keeper.is_split) continue;
    SCOPED_TRACE(keeper.name);
    const Tensor parameter = torch::ones({kSize}, keeper.dtype).requires_grad_();
    const OwnedOptimizer optimizer = keeper.make({parameter});
    Tensor master = mezzo::master_params(optimizer.any())[0];
    step(optimizer, {parameter}, 0.25);
    const torch::NoGradGuard no_grad;
    master.mul_(4);
    step(optimizer, {parameter}, 0.5);
    EXPECT_TRUE(parameter.equal(torch::full({kSize}, 2.5, keeper.dtype)));
    step(optimizer, {parameter}, 0);
    master.copy_(torch::full({kSize}, 8 + 0x1p-12));
    step(optimizer, {parameter}, 0);
    EXPECT_TRUE(parameter.equal(torch::full({kSize}, 8, keeper.dtype)));
    EXPECT_TRUE(master.equal(torch::full({kSize}, 8 + 0x1p-12))) << "with its bits";
    EXPECT_TRUE(mezzo::master_params(optimizer.any())[0].is_same(master));
    parameter.fill_(3);
    step(optimizer, {parameter}, 0);
    EXPECT_TRUE(master.equal(torch::full({kSize}, 3.0))) << "what was written later wins";
  }
}

}  // namespace
