// Parameters and buffers of dtypes without training: quantized, integer, bool, complex, float8.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/master_weights.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/save_to_string.h"
#include "../support/temp_dir.h"
#include "../support/tiny_optimizer.h"

namespace {

using test_support::make_silent_scaler;
using test_support::message_of;
using test_support::parameter;
using testing::HasSubstr;
using torch::Tensor;

Tensor make_quantized() {
  return torch::quantize_per_tensor(torch::randn({4, 4}), 0.05, 0, torch::kQInt8);
}

Tensor to_comparable(const Tensor& tensor) {
  return tensor.is_quantized() ? tensor.dequantize() : tensor.to(torch::kComplexDouble);
}

/// Returns a tensor of the dtype that can be registered as a parameter.
Tensor odd_tensor(torch::ScalarType dtype) {
  return dtype == torch::kQInt8 ? make_quantized() : torch::arange(16).view({4, 4}).to(dtype);
}

class NonTrainingDtypes : public testing::TestWithParam<torch::ScalarType> {
 protected:
  const Tensor odd_ = odd_tensor(GetParam());
  const Tensor values_ = to_comparable(odd_).clone();
};

TEST_P(NonTrainingDtypes, IgnoredByOptimizersWithoutGradients) {
  const auto x = parameter({1});
  mezzo::optim::AdamW fused({x, odd_}, mezzo::optim::AdamWOptions(1.0),
                            {.weight_storage = mezzo::optim::WeightStorage::fp32_master});
  torch::optim::SGD inner({x, odd_}, 1.0);
  mezzo::MasterWeights masters(inner);
  torch::optim::SGD plain({x, odd_}, 1.0);
  auto scaler = make_silent_scaler({});
  for (mezzo::OptimizerRef optimizer :
       std::initializer_list<mezzo::OptimizerRef>{fused, masters, plain}) {
    test_support::set_grad(x, {1});
    const Tensor before = x.detach().clone();
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1.0}).applied());
    EXPECT_FALSE(torch::equal(x, before));
    test_support::load_from_string(optimizer, test_support::save_to_string(optimizer));
  }
  EXPECT_TRUE(torch::equal(to_comparable(odd_), values_));
}

TEST_P(NonTrainingDtypes, GradientsThrowBeforeAnyWrite) {
  const auto x = parameter({1});
  test_support::set_grad(x, {1});
  odd_.mutable_grad() = odd_.is_quantized() ? torch::ones({4, 4}) : odd_.clone();
  mezzo::optim::AdamW optimizer({x, odd_});
  auto scaler = make_silent_scaler({});
  const std::string name = c10::toString(GetParam());
  EXPECT_THAT(message_of([&] { optimizer.step(); }), HasSubstr("(" + name + " ["));
  EXPECT_THAT(message_of([&] { scaler.step(optimizer); }), HasSubstr("(" + name + " ["));
  EXPECT_EQ(x.item<float>(), 1);
  EXPECT_EQ(x.grad().item<float>(), 1);
  EXPECT_TRUE(torch::equal(to_comparable(odd_), values_));
}

TEST_P(NonTrainingDtypes, BucketsThrowByName) {
  EXPECT_THAT(message_of([&] {
                mezzo::GradBuckets({parameter({1}), odd_});
              }),
              HasSubstr(std::string("parameter 1 (") + c10::toString(GetParam()) + " ["));
}

/// A trained weight, and a parameter and a buffer that are not trained.
struct MixedImpl : torch::nn::Module {
  MixedImpl(const Tensor& parameter, const Tensor& buffer) {
    weight = register_parameter("weight", torch::full({4, 4}, 0.5));
    odd_parameter = register_parameter("odd_parameter", parameter, /*requires_grad=*/false);
    odd_buffer = register_buffer("odd_buffer", buffer);
  }
  Tensor forward(const Tensor& x) { return torch::mm(x, weight); }

  Tensor weight, odd_parameter, odd_buffer;
};
TORCH_MODULE(Mixed);

TEST_P(NonTrainingDtypes, NotCastByOptLevels) {
  Mixed model(odd_, odd_.clone());
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  const auto initialize = [&] {
    return mezzo::initialize(model, optimizer, mezzo::OptLevel::O2({.loss_scale = 1.0}),
                             {.verbosity = 0});
  };
  if (odd_.is_floating_point()) {  // float8: only float32 weights can be cast
    EXPECT_THAT(message_of(initialize), HasSubstr("expected float32"));
    return;
  }
  auto amp = initialize();
  amp.backward(amp.forward(model, torch::ones({4, 4})).sum(), optimizer);
  EXPECT_TRUE(amp.step(optimizer).applied());
  EXPECT_EQ(model->weight.scalar_type(), torch::kHalf);
  EXPECT_EQ(model->weight[0][0].item<float>(), -3.5F);
  for (const Tensor& odd : {model->odd_parameter, model->odd_buffer}) {
    EXPECT_EQ(odd.scalar_type(), GetParam());
    EXPECT_TRUE(torch::equal(to_comparable(odd), values_));
  }
}

TEST_P(NonTrainingDtypes, RestoredFromCheckpoints) {
  const test_support::TempDir temp_dir;
  Mixed saved(odd_, odd_.clone()), loaded(odd_.clone(), odd_.clone());
  mezzo::CheckpointManager checkpoints(temp_dir.path());
  checkpoints.save(mezzo::TrainingState().add("model", saved), 1);
  for (const Tensor& odd : {loaded->odd_parameter, loaded->odd_buffer}) {
    odd.is_quantized() ? (void)odd.copy_(at::zeros({4, 4})) : (void)odd.zero_();
  }
  checkpoints.load_latest(mezzo::TrainingState().add("model", loaded));
  for (const Tensor& odd : {loaded->odd_parameter, loaded->odd_buffer}) {
    EXPECT_TRUE(torch::equal(to_comparable(odd), values_));
  }
}

INSTANTIATE_TEST_SUITE_P(, NonTrainingDtypes,
                         testing::Values(torch::kQInt8, torch::kLong, torch::kBool,
                                         torch::kComplexFloat, torch::kFloat8_e4m3fn),
                         [](const auto& tested) { return c10::toString(tested.param); });

// Regions treat these dtypes as at::autocast does.
TEST(NonTrainingDtypesAutocast, CastOnlyFloatingPoint) {
  for (const auto dtype : {torch::kLong, torch::kComplexFloat, torch::kFloat8_e4m3fn}) {
    const Tensor x = odd_tensor(dtype);
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    EXPECT_EQ(torch::mm(x, x).scalar_type(),
              dtype == torch::kFloat8_e4m3fn ? torch::kBFloat16 : dtype);
  }
}

}  // namespace
