// Steps under c10::InferenceMode, and with inference gradients.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../support/aten_optimizer.h"
#include "../support/bitwise_equal.h"
#include "../support/save_to_string.h"

namespace {

using mezzo::optim::WeightStorage;
using test_support::BitwiseEqual;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct AdamWCase {
  using Optimizer = mezzo::optim::AdamW;
  static mezzo::optim::AdamWOptions options() { return {0.1}; }
};
struct SgdCase {
  using Optimizer = mezzo::optim::SGD;
  static mezzo::optim::SGDOptions options() { return mezzo::optim::SGDOptions(0.1).momentum(0.9); }
};
constexpr int64_t kNumel = 70;

torch::Tensor make_gradient(const torch::Tensor& parameter) {
  return torch::linspace(-1, 1, parameter.numel()).to(parameter.scalar_type());
}

template <class Case>
class StepInferenceMode : public testing::Test {
 protected:
  using Optimizer = typename Case::Optimizer;

  /// Returns the weights after each of four steps; `modes` selects InferenceMode for each.
  static std::vector<torch::Tensor> train(const std::vector<bool>& modes, WeightStorage storage) {
    const auto dtype = storage == WeightStorage::plain ? torch::kFloat : torch::kBFloat16;
    const auto parameter = torch::linspace(1, 2, kNumel).to(dtype).requires_grad_();
    Optimizer optimizer({parameter}, Case::options(), {.weight_storage = storage});
    std::vector<torch::Tensor> weights;
    for (const bool mode : modes) {
      parameter.mutable_grad() = make_gradient(parameter);
      {
        const c10::InferenceMode inference(mode);
        optimizer.step();
      }
      weights.push_back(parameter.detach().clone());
    }
    return weights;
  }
};

using Cases = testing::Types<AdamWCase, SgdCase>;
TYPED_TEST_SUITE(StepInferenceMode, Cases);

TYPED_TEST(StepInferenceMode, StepsInsideAndOutside) {
  for (const WeightStorage storage :
       {WeightStorage::plain, WeightStorage::fp32_master, WeightStorage::split_master,
        WeightStorage::stochastic_rounding}) {
    const auto wanted = this->train({false, false, false, false}, storage);
    EXPECT_THAT(this->train({true, false, true, false}, storage), BitwiseEqual(wanted));
    EXPECT_THAT(this->train({false, true, false, true}, storage), BitwiseEqual(wanted));
  }
}

TYPED_TEST(StepInferenceMode, ResumesFromArchiveLoadedInside) {
  const auto parameter = torch::ones({kNumel}).requires_grad_();
  typename TypeParam::Optimizer optimizer({parameter}, TypeParam::options());
  parameter.mutable_grad() = make_gradient(parameter);
  optimizer.step();
  const std::string file = test_support::save_to_string(optimizer);
  {
    const c10::InferenceMode inference;
    test_support::load_from_string(optimizer, file);
  }
  const auto before = parameter.detach().clone();
  optimizer.step();
  EXPECT_FALSE(torch::equal(parameter, before));
}

TYPED_TEST(StepInferenceMode, AcceptsInferenceGradients) {
  for (const bool is_dense : {true, false}) {
    const auto parameter = torch::ones({kNumel, 2}).requires_grad_();
    typename TypeParam::Optimizer optimizer({parameter}, TypeParam::options());
    mezzo::GradScaler scaler({.init_scale = 1.F});
    (void)scaler.scale(torch::ones({}));
    {
      const c10::InferenceMode inference;
      parameter.mutable_grad() = is_dense ? torch::ones({kNumel, 2}) : torch::ones({2, kNumel}).t();
    }
    EXPECT_TRUE(scaler.step(optimizer, {.zero_grad = true}).applied());
    EXPECT_FALSE(torch::equal(parameter, torch::ones({kNumel, 2})));
    EXPECT_FALSE(parameter.grad().any().template item<bool>());
  }
}

TYPED_TEST(StepInferenceMode, ThrowsForInferenceParams) {
  std::optional<c10::InferenceMode> inference(std::in_place);
  const auto parameter = torch::ones({kNumel});
  parameter.mutable_grad() = make_gradient(parameter);
  typename TypeParam::Optimizer optimizer({parameter}, TypeParam::options());
  for (const bool mode : {true, false}) {
    if (!mode) inference.reset();
    EXPECT_THAT([&] { optimizer.step(); },
                ThrowsMessage<c10::Error>(HasSubstr("is an inference tensor")));
    EXPECT_TRUE(torch::equal(parameter, torch::ones({kNumel})));
  }
}

TEST(MasterWeightsInferenceMode, ResumesFromArchiveLoadedInside) {
  const auto train = [](bool mode) {
    const auto parameter = torch::linspace(1, 2, kNumel).to(torch::kBFloat16).requires_grad_();
    torch::optim::SGD inner({parameter},
                            0.1);  // with inference state torch could not write it later
    mezzo::MasterWeights masters(inner);
    const auto step = [&] {
      parameter.mutable_grad() = make_gradient(parameter);
      masters.step();
    };
    step();
    const std::string file = test_support::save_to_string(masters);
    {
      const c10::InferenceMode inference(mode);
      test_support::load_from_string(masters, file);
    }
    step();
    return parameter.detach().clone();
  };
  EXPECT_TRUE(torch::equal(train(true), train(false)));
}

TEST(AtenStepInferenceMode, StepsInsideAndOutside) {
  const auto parameter = torch::ones({kNumel}).requires_grad_();
  test_support::AtenOptimizer<mezzo::optim::AdamW> optimizer({parameter});
  for (const bool mode : {true, false, true}) {
    {
      const c10::InferenceMode inference(mode);
      parameter.mutable_grad() = torch::ones({kNumel});
    }
    const auto before = parameter.detach().clone();
    const c10::InferenceMode inference(mode);
    optimizer.apply(optimizer.plan());
    EXPECT_FALSE(torch::equal(parameter, before));
  }
}

TEST(GradScalerInferenceMode, UnscalesInferenceGradientsOnce) {
  const auto dense = torch::ones({kNumel}).requires_grad_();
  const auto with_gaps = torch::ones({kNumel, 2}).requires_grad_();
  mezzo::optim::AdamW optimizer({dense, with_gaps});
  mezzo::GradScaler scaler({.init_scale = 4.F});
  (void)scaler.scale(torch::ones({}));
  {
    const c10::InferenceMode inference;
    dense.mutable_grad() = torch::full({kNumel}, 8.F);
    with_gaps.mutable_grad() = torch::full({kNumel, 4}, 8.F).slice(1, 0, 2);
  }
  scaler.unscale_(optimizer);
  EXPECT_TRUE(dense.grad().eq(2).all().item<bool>());
  EXPECT_TRUE(with_gaps.grad().eq(2).all().item<bool>());
  EXPECT_TRUE(scaler.step(optimizer, {.zero_grad = true}).applied());
  EXPECT_FALSE(with_gaps.grad().any().item<bool>());
}

TEST(GradScalerInferenceMode, UpdatesOutside) {
  const auto parameter = torch::ones({kNumel}).requires_grad_();
  mezzo::optim::AdamW optimizer({parameter});
  mezzo::GradScaler scaler({.init_scale = 4.F, .growth_interval = 1});
  const auto step = [&] {
    parameter.mutable_grad() = torch::ones({kNumel});
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true}).applied());
  };
  {
    const c10::InferenceMode inference;
    (void)scaler.scale(torch::ones({}));
    step();
  }
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.0);
  step();
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 16.0);
}

TEST(GradScalerInferenceMode, ZeroesMasterGradientsOutside) {
  const auto parameter = torch::ones({kNumel}, torch::kBFloat16).requires_grad_();
  mezzo::optim::SGD optimizer({parameter}, mezzo::optim::SGDOptions(0.5),
                              {.weight_storage = WeightStorage::fp32_master});
  mezzo::GradScaler scaler({.init_scale = 4.F});
  scaler.scale(parameter.sum()).backward();
  {
    const c10::InferenceMode inference;
    scaler.unscale_(optimizer);
  }
  EXPECT_TRUE(scaler.step(optimizer).applied());
  EXPECT_EQ(parameter[0].item<float>(), 0.5F);
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_FALSE(parameter.grad().any().item<bool>());
}

TEST(MasterWeightsInferenceMode, StepsInsideAndOutside) {
  const auto parameter = torch::ones({kNumel}, torch::kBFloat16).requires_grad_();
  torch::optim::SGD optimizer({parameter}, 0.25);
  mezzo::MasterWeights masters(optimizer);
  for (const bool mode : {true, false, true, false}) {
    parameter.mutable_grad() = torch::ones_like(parameter.detach());
    const c10::InferenceMode inference(mode);
    (void)mezzo::master_params(masters);
    masters.step();
  }
  EXPECT_EQ(parameter[0].item<float>(), 0.0F);
}

}  // namespace
