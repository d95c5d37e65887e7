// A scaler's state as the tensors of a safetensors file. (Files themselves: tests/bert_ner.)

#include <mezzo/scaling/scaler_tensors.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../support/error_of.h"

namespace {

using test_support::error_of;
using testing::AllOf;
using testing::HasSubstr;

TEST(ScalerTensors, HoldEveryFieldToTheBit) {
  const mezzo::GradScaler scaler({.init_scale = 3,
                                  .growth_factor = 1.1,
                                  .backoff_factor = 0.3,
                                  .growth_interval = 7,
                                  .min_scale = 1e-3,
                                  .hysteresis = 2});
  const auto tensors = mezzo::scaler_tensors(scaler.state_dict());
  EXPECT_EQ(tensors.size(), 10U);
  mezzo::GradScaler loaded;
  loaded.load_state_dict(mezzo::scaler_state(tensors));
  EXPECT_EQ(loaded.state_dict(), scaler.state_dict());
}

TEST(ScalerTensors, HaveCountsAsIntegersAndTheRestInDouble) {
  int counts = 0;
  for (const auto& [key, tensor] : mezzo::scaler_tensors(mezzo::GradScaler().state_dict())) {
    EXPECT_EQ(tensor.dim(), 0) << key;
    const bool is_count = tensor.scalar_type() == torch::kLong;
    EXPECT_TRUE(is_count || tensor.scalar_type() == torch::kDouble) << key;
    counts += is_count ? 1 : 0;
  }
  EXPECT_EQ(counts, 5);
}

TEST(ScalerTensors, OfADisabledScalerAreNone) {
  const mezzo::GradScaler disabled({.enabled = false});
  EXPECT_TRUE(mezzo::scaler_tensors(disabled.state_dict()).empty());
  mezzo::GradScaler scaler;
  EXPECT_THAT(error_of([&] { scaler.load_state_dict(mezzo::scaler_state({})); }),
              HasSubstr("The source state dict is empty"));
}

TEST(ScalerTensors, MayBeOfAnyRealDtypeAndShapeOfOneElement) {
  auto tensors = mezzo::scaler_tensors(mezzo::GradScaler().state_dict());
  tensors["scale"] = torch::tensor({512.0F}, torch::kBFloat16);
  tensors["growth_interval"] = torch::full({1, 1}, 9, torch::kInt);
  mezzo::GradScaler scaler;
  scaler.load_state_dict(mezzo::scaler_state(tensors));
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_EQ(scaler.state_dict().at("growth_interval"), 9);
}

TEST(ScalerTensors, ThatAreNoNumberAreNamed) {
  for (const torch::Tensor& tensor :
       {torch::Tensor(), torch::ones({2}), torch::ones({0}), torch::ones({}, torch::kBool),
        torch::ones({}, torch::kComplexFloat)}) {
    EXPECT_THAT(error_of([&] {
                  (void)mezzo::scaler_state({{"scale", tensor}});
                }),
                AllOf(HasSubstr("scaler_state: \"scale\""), HasSubstr("should be")));
  }
}

}  // namespace
