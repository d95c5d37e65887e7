#include <mezzo/autocast/autocast.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace {

namespace F = torch::nn::functional;
using mezzo::Autocast;
using torch::Tensor;

struct Op {
  std::string name;
  std::function<Tensor()> run;
};

Tensor single() { return torch::rand({4, 4}); }
Tensor in_bfloat16() { return single().to(torch::kBFloat16); }
Tensor classes() { return torch::zeros({4}, torch::kLong); }

void expect_dtype(const std::vector<Op>& ops, torch::ScalarType dtype) {
  const Autocast<torch::kCPU> autocast;
  for (const Op& op : ops) {
    EXPECT_EQ(op.run().scalar_type(), dtype) << op.name;
  }
}

TEST(AutocastOps, LowersProductsConvolutionsAndAttention) {
  const Tensor image = torch::rand({1, 2, 5, 5});
  const Tensor kernel = torch::rand({3, 2, 3, 3});
  const Tensor heads = torch::rand({1, 2, 4, 8});
  expect_dtype(
      {{"mm", [] { return torch::mm(single(), single()); }},
       {"matmul", [] { return torch::matmul(single(), single()); }},
       {"addmm", [] { return torch::addmm(single(), single(), single()); }},
       {"bmm",
        [] {
          return torch::bmm(torch::rand({2, 3, 3}), torch::rand({2, 3, 3}));
        }},
       {"linear", [] { return torch::linear(single(), single()); }},
       {"conv2d", [&] { return torch::conv2d(image, kernel); }},
       {"attention", [&] { return torch::scaled_dot_product_attention(heads, heads, heads); }}},
      torch::kBFloat16);
}

TEST(AutocastOps, RunsLossesInFloatAlsoOnLoweredInput) {
  const auto probabilities = [] { return torch::sigmoid(in_bfloat16()); };
  expect_dtype({{"mse_loss", [] { return torch::mse_loss(in_bfloat16(), in_bfloat16()); }},
                {"cross_entropy", [] { return F::cross_entropy(in_bfloat16(), classes()); }},
                {"nll_loss",
                 [] { return torch::nll_loss(torch::log_softmax(in_bfloat16(), 1), classes()); }},
                {"binary_cross_entropy",
                 [&] { return torch::binary_cross_entropy(probabilities(), single()); }}},
               torch::kFloat);
}

TEST(AutocastOps, KeepsTheInputDtypeWhereTheCpuHasNoPolicy) {
  const auto ops = [](const std::function<Tensor()>& input) -> std::vector<Op> {
    return {{"softmax", [input] { return torch::softmax(input(), 1); }},
            {"layer_norm", [input] { return torch::layer_norm(input(), {4}); }},
            {"exp", [input] { return torch::exp(input()); }},
            {"sum", [input] { return torch::sum(input()); }},
            {"relu", [input] { return torch::relu(input()); }}};
  };
  expect_dtype(ops(in_bfloat16), torch::kBFloat16);
  expect_dtype(ops(single), torch::kFloat);
  expect_dtype({{"mv", [] { return torch::mv(single(), torch::rand({4})); }}}, torch::kFloat);
}

TEST(AutocastOps, PromotesMixedInputsToTheWidestAndRefusesTwoLowerOnes) {
  expect_dtype({{"cat",
                 [] {
                   return torch::cat({single(), in_bfloat16()});
                 }},
                {"stack",
                 [] {
                   return torch::stack({single(), in_bfloat16()});
                 }}},
               torch::kFloat);
  const Autocast<torch::kCPU> autocast;
  EXPECT_THROW(torch::cat({in_bfloat16(), single().to(torch::kHalf)}), c10::Error);
}

TEST(AutocastOps, LeavesDoubleAndIntegersAlone) {
  expect_dtype(
      {{"mm", [] { return torch::mm(single().to(torch::kDouble), single().to(torch::kDouble)); }}},
      torch::kDouble);
  expect_dtype(
      {{"mm", [] { return torch::mm(single().to(torch::kLong), single().to(torch::kLong)); }}},
      torch::kLong);
}

TEST(AutocastOps, LeavesOutAndInPlaceVariantsAlone) {
  const Autocast<torch::kCPU> autocast;
  Tensor out = torch::empty({4, 4});
  torch::mm_out(out, single(), single());
  EXPECT_EQ(out.scalar_type(), torch::kFloat);
  Tensor sum = single();
  sum.addmm_(single(), single());
  EXPECT_EQ(sum.scalar_type(), torch::kFloat);
}

TEST(AutocastOps, GivesParametersFloatGradients) {
  torch::nn::Linear linear(4, 2);
  Tensor loss;
  {
    const Autocast<torch::kCPU> autocast;
    loss = linear(single()).to(torch::kFloat).sum();
  }
  loss.backward();
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
}

}  // namespace
