// torch::nn::MultiheadAttention with a key_padding_mask in 16-bit dtypes: the failure, and the
// workarounds of docs/errors.md.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>

#include "../support/message_of.h"

namespace {

using test_support::message_of;
using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kHeads = 2, kBatch = 3, kLength = 4, kWidth = 8;

/// The key_padding_mask: true for keys that are padding.
Tensor padding() { return torch::arange(kLength).expand({kBatch, kLength}).ge(3); }

/// The additive attn_mask of the same padding: one matrix for all sequences.
Tensor additive_mask() {
  return torch::zeros({kLength, kLength})
      .masked_fill(padding()[0].expand({kLength, kLength}), -1e4);
}

torch::nn::MultiheadAttention attention() {
  torch::manual_seed(0);
  return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(kWidth, kHeads));
}

Tensor input() {
  return torch::linspace(-1, 1, kLength * kBatch * kWidth).view({kLength, kBatch, kWidth});
}

Tensor with_padding(torch::nn::MultiheadAttention& model, const Tensor& x) {
  return std::get<0>(model->forward(x, x, x, padding()));
}
Tensor with_additive_mask(torch::nn::MultiheadAttention& model, const Tensor& x) {
  return std::get<0>(model->forward(x, x, x, {}, true, additive_mask()));
}

TEST(MultiheadAttention, KeyPaddingMaskThrowsIn16Bits) {
  auto model = attention();
  const mezzo::AutocastGuard<torch::kCPU, torch::kBFloat16> autocast;
  EXPECT_THAT(message_of([&] { with_padding(model, input()); }),
              HasSubstr("\"attn_output_weights.masked_fill\" not implemented for 'BFloat16'"))
      << "libtorch supports it now: remove it from docs/errors.md and docs/pitfalls.md";
}

TEST(MultiheadAttention, AdditiveMaskTrainsUnderAutocast) {
  auto model = attention();
  const Tensor expected = with_padding(model, input());
  const mezzo::AutocastGuard<torch::kCPU, torch::kBFloat16> autocast;
  const Tensor output = with_additive_mask(model, input());
  EXPECT_TRUE(torch::allclose(output.to(torch::kFloat), expected, 0.02, 0.02));
  output.sum().backward();
}

TEST(MultiheadAttention, DeniedBmmAcceptsKeyPaddingMask) {
  auto model = attention();
  const Tensor expected = with_padding(model, input());
  const auto overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::bmm"));
  const mezzo::AutocastGuard autocast(
      {.device_type = torch::kCPU, .dtype = torch::kBFloat16, .op_overrides = overrides});
  const Tensor output = with_padding(model, input());
  EXPECT_TRUE(torch::allclose(output.to(torch::kFloat), expected, 0.02, 0.02));
  output.sum().backward();
}

// All weights are bfloat16, as in a model that is cast at O2.
TEST(MultiheadAttention, AdditiveMaskTrainsWith16BitWeights) {
  auto model = attention();
  const Tensor expected = with_padding(model, input());
  model->to(torch::kBFloat16);
  const Tensor x = input().to(torch::kBFloat16);
  EXPECT_THAT(message_of([&] { with_padding(model, x); }), HasSubstr("not implemented for"));
  const Tensor output = with_additive_mask(model, x);
  EXPECT_TRUE(torch::allclose(output.to(torch::kFloat), expected, 0.05, 0.05));
  output.sum().backward();
}

TEST(MultiheadAttention, Float32ModuleAcceptsKeyPaddingMask) {
  auto model = attention();
  const Tensor expected = with_padding(model, input());
  const Tensor x = input().to(torch::kBFloat16);  // as from a 16-bit layer
  const Tensor output = with_padding(model, x.to(torch::kFloat)).to(x.scalar_type());
  EXPECT_TRUE(torch::allclose(output.to(torch::kFloat), expected, 0.05, 0.05));
  output.sum().backward();
}

}  // namespace
