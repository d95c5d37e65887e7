// vmap with autocast: libtorch's C++ has it under at::functorch. What plain at::autocast gives
// there is the measure, for libtorch's own vmap of a linear with a bias is not the stack of a loop.

// First of all: it does not compile behind ATen/LegacyBatchedTensorImpl.h, which has functions of
// the same names.
// clang-format off
#include <ATen/functorch/BatchedTensorImpl.h>
// clang-format on

#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <ATen/autocast_mode.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/TensorWrapper.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace {

using at::functorch::TransformType;
using torch::Tensor;
using Function = std::function<Tensor(const Tensor&)>;

/// A layer of at::functorch's stack, until the scope ends.
class Transform {
 public:
  explicit Transform(std::optional<c10::SymInt> batch)
      : number(batch.has_value()
                   ? at::functorch::initAndPushDynamicLayer(TransformType::Vmap, batch,
                                                            at::functorch::RandomnessType::Error)
                   : at::functorch::initAndPushDynamicLayer(TransformType::Grad, std::nullopt,
                                                            std::nullopt, true)) {}
  ~Transform() { at::functorch::popDynamicLayerAndDeleteMetadata(); }
  Transform(const Transform&) = delete;
  Transform& operator=(const Transform&) = delete;

  const int64_t number;
};

Tensor vmap(const Function& function, const Tensor& batch) {
  const Transform vmap(batch.size(0));
  const Tensor result = function(at::functorch::makeBatched(batch, 0, vmap.number));
  const auto* batched = at::functorch::maybeGetBatchedImpl(result);
  return batched->value().movedim(batched->bdim(), 0);
}

Tensor loop(const Function& function, const Tensor& batch) {
  std::vector<Tensor> results;
  for (const Tensor& each : batch.unbind(0)) results.push_back(function(each));
  return torch::stack(results);
}

/// `work` with at::autocast and nothing of mezzo's.
Tensor under_libtorchs_autocast(const std::function<Tensor()>& work) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  Tensor result = work();
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  return result;
}

Tensor gradient_of(const Tensor& result, const Tensor& weight) {
  return torch::autograd::grad({result.to(torch::kFloat).square().sum()}, {weight}, {},
                               /*retain_graph=*/true)[0];
}

class Vmap : public testing::Test {
 protected:
  void expect_as_libtorch(const Tensor& result, const Tensor& libtorchs) const {
    EXPECT_EQ(result.scalar_type(), libtorchs.scalar_type());
    EXPECT_TRUE(torch::equal(result, libtorchs));
    EXPECT_TRUE(torch::equal(gradient_of(result, weight_), gradient_of(libtorchs, weight_)));
  }

  Tensor weight_ = torch::randn({4, 3}).requires_grad_();
  Tensor bias_ = torch::randn({4}).requires_grad_();
  Tensor batch_ = torch::randn({5, 2, 3});
  Tensor weights_ = torch::randn({5, 4, 3});
  Function with_bias_ = [this](const Tensor& x) { return torch::linear(x, weight_, bias_); };
  Function product_ = [this](const Tensor& x) { return torch::mm(x, weight_.t()); };
};

TEST_F(Vmap, OfABatchInGuardsGivesLibtorchsBits) {
  for (const Function& function : {with_bias_, product_}) {
    const Tensor libtorchs = under_libtorchs_autocast([&] { return vmap(function, batch_); });
    for (int use = 0; use < 2; ++use) {
      const mezzo::Autocast<torch::kCPU> autocast;
      expect_as_libtorch(vmap(function, batch_), libtorchs);
    }
  }
}

TEST_F(Vmap, OfAProductIsTheStackOfALoop) {
  const mezzo::Autocast<torch::kCPU> autocast;
  EXPECT_TRUE(torch::equal(vmap(product_, batch_), loop(product_, batch_)));
}

TEST_F(Vmap, OfAGuardInsideIsThatOfAGuardOutside) {
  const auto guarded = [&](const Tensor& x) {
    const mezzo::Autocast<torch::kCPU> autocast;
    return product_(x);
  };
  const Tensor inside = vmap(guarded, batch_);
  const mezzo::Autocast<torch::kCPU> autocast;
  expect_as_libtorch(inside, vmap(product_, batch_));
}

TEST_F(Vmap, OfWeightsHoldsNoCopyThatGoesStale) {
  const Function function = [&](const Tensor& weight) { return torch::linear(batch_[0], weight); };
  for (int change = 0; change < 3; ++change) {
    const Tensor libtorchs = under_libtorchs_autocast([&] { return vmap(function, weights_); });
    const mezzo::Autocast<torch::kCPU> autocast;
    EXPECT_TRUE(torch::equal(vmap(function, weights_), libtorchs));
    weights_.mul_(2);
  }
}

TEST_F(Vmap, FollowsPolicies) {
  const auto denying = mezzo::install_op_overrides(
      mezzo::OpPolicy().deny("linear").deny("addmm").deny("mm").deny("matmul"));
  const auto allowing = mezzo::install_op_overrides(mezzo::OpPolicy().allow("exp"));
  const Function exp = [](const Tensor& x) { return torch::exp(x); };
  {
    const mezzo::Autocast<torch::kCPU> autocast({.policy = denying});
    // A batched product of floats may add up in another order than a loop of products.
    EXPECT_TRUE(torch::allclose(vmap(product_, batch_), loop(product_, batch_), 1e-5, 1e-6));
    EXPECT_EQ(vmap(product_, batch_).scalar_type(), torch::kFloat);
  }
  const mezzo::Autocast<torch::kCPU> autocast({.policy = allowing});
  EXPECT_TRUE(torch::equal(vmap(exp, batch_), loop(exp, batch_)));
  EXPECT_EQ(vmap(exp, batch_).scalar_type(), torch::kBFloat16);
}

TEST_F(Vmap, OfACheckpointGivesTheGradientsOfNone) {
  const Function checkpointed = [&](const Tensor& x) {
    return mezzo::activation_checkpoint(product_, x);
  };
  const mezzo::Autocast<torch::kCPU> autocast;
  expect_as_libtorch(vmap(checkpointed, batch_), vmap(product_, batch_));
}

// What torch.func.grad is in Python: weights are wrappers there.
TEST_F(Vmap, GradsOfWrappedWeightsAreLibtorchs) {
  const Tensor weight = weight_.detach();
  const auto grad = [&] {
    const Transform level(std::nullopt);
    const Tensor wrapped = at::functorch::makeTensorWrapper(weight, static_cast<int>(level.number));
    wrapped.requires_grad_();
    const Tensor of_wrapped = gradient_of(torch::linear(batch_[0], wrapped), wrapped);
    return at::functorch::maybeGetTensorWrapper(of_wrapped)->value();
  };
  const Tensor libtorchs = under_libtorchs_autocast(grad);
  for (int change = 0; change < 2; ++change) {
    const mezzo::Autocast<torch::kCPU> autocast;
    EXPECT_TRUE(torch::equal(grad(), libtorchs));
  }
}

}  // namespace
