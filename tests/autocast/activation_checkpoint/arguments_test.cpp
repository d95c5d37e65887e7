// Callables, arguments and results that activation_checkpoint accepts.

#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "loss_and_gradients.h"

namespace {

using activation_checkpoint_test::BitwiseEqual;
using activation_checkpoint_test::loss_and_gradients;
using torch::Tensor;

class ActivationCheckpointArguments : public testing::Test {
 protected:
  // Checks that backward of the sum of `y` gives x a gradient of `factor`.
  void expect_gradient(const Tensor& y, double factor) {
    ASSERT_TRUE(y.requires_grad());
    EXPECT_EQ(y.grad_fn()->name(), "mezzo::activation_checkpoint");
    const auto gradient = torch::autograd::grad({y.sum()}, {x_})[0];
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(x_, factor)));
  }

  Tensor x_ = torch::ones({3}).requires_grad_();
};

TEST_F(ActivationCheckpointArguments, PassesAnyArgumentTypeToRecomputation) {
  const auto y = mezzo::activation_checkpoint(
      [](const Tensor& x, int i, const std::string& text, const std::unique_ptr<int>& owned,
         const std::map<std::string, std::vector<Tensor>>& tensors, std::optional<double> none) {
        EXPECT_FALSE(none.has_value());
        return x * i * static_cast<double>(text.size()) * *owned * tensors.at("three")[0];
      },
      x_, 2, "four", std::make_unique<int>(5),
      std::map<std::string, std::vector<Tensor>>{{"three", {torch::full({3}, 3)}}}, std::nullopt);
  expect_gradient(y, 2 * 4 * 5 * 3);
}

TEST_F(ActivationCheckpointArguments, PassesLvaluesThatLiveUntilBackward) {
  const auto y = mezzo::activation_checkpoint(
      [](Tensor x, std::vector<int> factors) { return x * factors.at(0); }, x_, std::vector{6});
  expect_gradient(y, 6);
}

TEST_F(ActivationCheckpointArguments, DoesNotCopyReferences) {
  auto factor = std::make_unique<int>(2);
  const auto y = mezzo::activation_checkpoint(
      [](const Tensor& x, std::unique_ptr<int>& by) { return x * *by; }, x_, std::ref(factor));
  expect_gradient(y, 2);
}

TEST_F(ActivationCheckpointArguments, AcceptsTensorListOfTemporaries) {
  const auto sum = [](const std::vector<Tensor>& list) { return torch::stack(list).sum(0); };
  const auto y = [&] {
    const std::vector<Tensor> list{x_ * 1, x_ * 2};
    return mezzo::activation_checkpoint(sum, at::TensorList(list));
  }();
  expect_gradient(y, 3);
}

TEST_F(ActivationCheckpointArguments, FindsTensorsInNestedArguments) {
  const auto y = mezzo::activation_checkpoint(
      [](const std::function<Tensor()>& hidden) { return hidden() * 4; }, [this] { return x_; });
  expect_gradient(y, 4);
}

TEST_F(ActivationCheckpointArguments, AcceptsUndefinedTensors) {
  const auto y = mezzo::activation_checkpoint(
      [](const Tensor& x, const Tensor& bias) { return bias.defined() ? x + bias : x * 2; }, x_,
      Tensor());
  expect_gradient(y, 2);
}

TEST_F(ActivationCheckpointArguments, AcceptsInferenceTensors) {
  const auto constant = [] {
    const c10::InferenceMode inference;
    return torch::full({3}, 2.0);
  }();
  expect_gradient(mezzo::activation_checkpoint(
                      [](const Tensor& x, const Tensor& c) { return x * c.clone(); }, x_, constant),
                  2);
}

struct Scale {
  double factor;
  Tensor operator()(const Tensor& x) { return x * factor; }
  Tensor by(const Tensor& x, double more) const { return x * factor * more; }
};

Tensor doubled(const Tensor& x) { return x * 2; }

TEST_F(ActivationCheckpointArguments, AcceptsEveryKindOfCallable) {
  expect_gradient(mezzo::activation_checkpoint(doubled, x_), 2);
  expect_gradient(mezzo::activation_checkpoint(Scale{3}, x_), 3);
  expect_gradient(mezzo::activation_checkpoint(&Scale::by, Scale{3}, x_, 2.0), 6);
  expect_gradient(
      mezzo::activation_checkpoint(&Scale::by, std::make_shared<Scale>(Scale{3}), x_, 2.0), 6);
  expect_gradient(
      mezzo::activation_checkpoint(
          [owned = std::make_unique<int>(7)](const Tensor& x) { return x * *owned; }, x_),
      7);
}

TEST_F(ActivationCheckpointArguments, AcceptsModuleHolderAndPointer) {
  const torch::nn::PReLU prelu(torch::nn::PReLUOptions().init(2));
  expect_gradient(mezzo::activation_checkpoint(prelu, -x_), -2);
  expect_gradient(mezzo::activation_checkpoint(prelu.ptr(), -x_), -2);
}

TEST_F(ActivationCheckpointArguments, AcceptsSequential) {
  torch::nn::Sequential sequential(torch::nn::Linear(3, 5), torch::nn::GELU(),
                                   torch::nn::Linear(5, 3));
  const auto input = torch::randn({2, 3});
  const auto loss = [&](const auto& run) {
    return loss_and_gradients(sequential->parameters(), [&] { return run().pow(2).sum(); });
  };
  EXPECT_THAT(loss([&] { return mezzo::activation_checkpoint(sequential, input); }),
              BitwiseEqual(loss([&] { return sequential->forward(input); })));
}

struct Output {
  Tensor first, second;
  int label = 0;
  auto tensors() { return std::tie(first, second); }
};

TEST_F(ActivationCheckpointArguments, ReturnsAnyContainerOfTensors) {
  const auto checkpointed = [&](auto wrap) {
    return mezzo::activation_checkpoint([wrap](const Tensor& x) { return wrap(x * 2); }, x_);
  };
  expect_gradient(*checkpointed([](const Tensor& t) { return std::optional(t); }), 2);
  expect_gradient(checkpointed([](const Tensor& t) { return std::vector{t, t}; })[1], 2);
  expect_gradient(checkpointed([](const Tensor& t) { return std::array{t, t}; })[1], 2);
  expect_gradient(std::get<1>(checkpointed([](const Tensor& t) { return std::tuple{1, t}; })), 2);
  expect_gradient(checkpointed([](const Tensor& t) {
                    return std::map<int, Tensor>{{3, t}};
                  }).at(3),
                  2);
  const auto output = checkpointed([](const Tensor& t) { return Output{Tensor(), t, 8}; });
  expect_gradient(output.second, 2);
  EXPECT_EQ(output.label, 8);
}

TEST_F(ActivationCheckpointArguments, ReturnsValueOfFunctionResultType) {
  const auto identity = [](Tensor& x) -> Tensor& { return x; };
  EXPECT_TRUE((std::is_same_v<decltype(mezzo::activation_checkpoint(identity, x_)), Tensor>));
  const auto two = [](const Tensor& x) { return std::pair{x, 1}; };
  EXPECT_TRUE(
      (std::is_same_v<decltype(mezzo::activation_checkpoint(two, x_)), std::pair<Tensor, int>>));
}

TEST_F(ActivationCheckpointArguments, AcceptsOptionsVariable) {
  const mezzo::ActivationCheckpointOptions options{.preserve_rng_state = false};
  expect_gradient(mezzo::activation_checkpoint(options, doubled, x_), 2);
}

}  // namespace
