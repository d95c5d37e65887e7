#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/autocast/autocast_autograd_function.h>
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/op_overrides.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "loss_and_gradients.h"

namespace {

using activation_checkpoint_test::BitwiseEqual;
using activation_checkpoint_test::loss_and_gradients;
using torch::Tensor;

class ActivationCheckpointAutocast : public testing::TestWithParam<at::ScalarType> {
 protected:
  // Records the dtype of the product of each call.
  auto block() {
    return [this](const Tensor& x) {
      const auto product = x.mm(w_);
      dtypes_.push_back(product.scalar_type());
      return product.to(at::kFloat).tanh();
    };
  }

  Tensor x_ = torch::randn({8, 8}).requires_grad_();
  Tensor w_ = torch::randn({8, 8}).requires_grad_();
  std::vector<at::ScalarType> dtypes_;
};

TEST_P(ActivationCheckpointAutocast, RecomputesInDtypeOfForward) {
  Tensor y;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    y = mezzo::activation_checkpoint(block(), x_);
  }
  const auto other = GetParam() == at::kHalf ? at::kBFloat16 : at::kHalf;
  const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = other});
  y.sum().backward();
  EXPECT_EQ(dtypes_, (std::vector{GetParam(), GetParam()}));
  EXPECT_EQ(x_.mm(w_).scalar_type(), other) << "the caller's state is restored";
}

TEST_P(ActivationCheckpointAutocast, RecomputesDisabledIfForwardWas) {
  const auto y = mezzo::activation_checkpoint(block(), x_);
  const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
  y.sum().backward();
  EXPECT_EQ(dtypes_, (std::vector{at::kFloat, at::kFloat}));
}

TEST_P(ActivationCheckpointAutocast, GradientsBitwiseEqualPlainCall) {
  const auto u = torch::randn({8, 8}).requires_grad_();
  const auto model = [&](const Tensor& x) {
    return torch::softmax(torch::gelu(x.mm(w_)).mm(u), -1);
  };
  const auto loss = [&](auto&& forward) {
    return loss_and_gradients({x_, w_, u}, [&] {
      const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
      return forward(x_).to(at::kFloat).pow(2).sum();
    });
  };
  EXPECT_THAT(loss([&](const Tensor& x) { return mezzo::activation_checkpoint(model, x); }),
              BitwiseEqual(loss(model)));
}

// Whether a cast of a weight is cached may differ between forward and recomputation.
TEST_P(ActivationCheckpointAutocast, IgnoresCastsCachedOutside) {
  const auto loss = [&](bool cached_before, bool cached_at_backward) {
    return loss_and_gradients({x_, w_}, [&] {
      const auto other_use = [&] { return x_.mm(w_).to(at::kFloat).sum(); };
      Tensor y;
      {
        const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
        if (cached_before) other_use();
        y = mezzo::activation_checkpoint(block(), x_).sum();
      }
      if (cached_at_backward) {
        const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
        other_use();
        y.backward({}, /*retain_graph=*/true);
        x_.mutable_grad().reset();
        w_.mutable_grad().reset();
      }
      return y;
    });
  };
  const auto expected = loss(false, false);
  EXPECT_THAT(loss(true, false), BitwiseEqual(expected));
  EXPECT_THAT(loss(false, true), BitwiseEqual(expected));
  EXPECT_THAT(loss(true, true), BitwiseEqual(expected));
}

TEST_P(ActivationCheckpointAutocast, AutocastModuleMatchesCallWithoutCache) {
  const auto linear = std::make_shared<torch::nn::LinearImpl>(8, 8);
  mezzo::AutocastModule module(linear, {.device_type = at::kCPU, .dtype = GetParam()});
  const auto loss = [&](const mezzo::AutocastOptions& options, auto&& block) {
    return loss_and_gradients({x_, linear->weight, linear->bias}, [&] {
      const mezzo::AutocastGuard autocast(options);
      return block(block(x_)).to(at::kFloat).pow(2).sum();
    });
  };
  EXPECT_THAT(loss({.device_type = at::kCPU, .dtype = GetParam()},
                   [&](const Tensor& x) { return mezzo::activation_checkpoint(module, x); }),
              BitwiseEqual(loss(
                  {.device_type = at::kCPU, .dtype = GetParam(), .cache_enabled = false}, module)));
}

TEST_P(ActivationCheckpointAutocast, RestoresStateWhenRecomputationThrows) {
  Tensor y;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    y = mezzo::activation_checkpoint(
        [this](const Tensor& x) {
          dtypes_.push_back(x.mm(w_).scalar_type());
          if (dtypes_.size() == 2) throw std::runtime_error("second run");
          return x.mm(w_);
        },
        x_);
  }
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_EQ(x_.mm(w_).scalar_type(), at::kFloat);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST_P(ActivationCheckpointAutocast, RecomputesWithForwardStateAcrossThreads) {
  Tensor y, z;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    y = mezzo::activation_checkpoint(block(), x_);
    const mezzo::AutocastGuard denying(
        {.device_type = at::kCPU,
         .op_overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::mm"))});
    z = mezzo::activation_checkpoint(block(), x_);
  }
  std::thread([&] {
    y.sum().backward();
    z.sum().backward();
  }).join();
  EXPECT_EQ(dtypes_, (std::vector{GetParam(), at::kFloat, GetParam(), at::kFloat}));
}

INSTANTIATE_TEST_SUITE_P(BothDtypes, ActivationCheckpointAutocast,
                         testing::Values(at::kHalf, at::kBFloat16),
                         [](const auto& dtype) { return c10::toString(dtype.param); });

}  // namespace
