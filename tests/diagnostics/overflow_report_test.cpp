#include <mezzo/diagnostics/named_parameters.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::find_overflow;
using mezzo::Overflow;
using mezzo::OverflowReport;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Three layers, each with gradients of 1.
torch::nn::Sequential make_model_with_grads() {
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 3),
                              torch::nn::Linear(3, 2));
  for (const at::Tensor& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::ones_like(parameter);
  }
  return model;
}

at::Tensor grad_of(torch::nn::Sequential& model, const std::string& name) {
  return model->named_parameters()[name].grad();
}

/// Runs a step of `scaler` with the gradients that `model` has.
void skip_step(mezzo::GradScaler& scaler, torch::nn::Sequential& model,
               const mezzo::StepOptions& options = {}) {
  static_cast<void>(scaler.scale(torch::ones({})));
  mezzo::optim::SGD optimizer(model->parameters(), 0.1);
  ASSERT_FALSE(scaler.step(optimizer, options).applied());
  scaler.update();
}

TEST(OverflowReport, PrintsSkipMessageAndCause) {
  torch::nn::Sequential model = make_model_with_grads();
  grad_of(model, "1.weight")[2][1] = kNan;
  grad_of(model, "1.weight")[1][2] = -kInf;
  grad_of(model, "0.bias")[0] = kInf;
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(OverflowReport(*model, {.stream = &out}));
  skip_step(scaler, model);
  EXPECT_EQ(out.str(),
            "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to "
            "32768.0\n"
            "  1.weight and 1 more, in 2 of 3 layers: the gradient of 1.weight has 1 inf and 1 "
            "NaN in 9 elements, the first (-inf) at index [1, 2], from the backward pass\n");
}

TEST(OverflowReport, ReportsOnlySkippedSteps) {
  torch::nn::Sequential model = make_model_with_grads();
  int calls = 0;
  mezzo::GradScaler scaler;
  scaler.on_skip(
      OverflowReport(*model, {.stream = nullptr, .callback = [&](const Overflow&) { ++calls; }}));
  mezzo::optim::SGD optimizer(model->parameters(), 0.1);
  static_cast<void>(scaler.scale(torch::ones({})));
  EXPECT_TRUE(scaler.step(optimizer).applied());
  scaler.update();
  EXPECT_EQ(calls, 0);
  grad_of(model, "2.bias")[0] = kInf;
  skip_step(scaler, model);
  EXPECT_EQ(calls, 1);
}

TEST(OverflowReport, PassesNamesAndCountsToCallback) {
  torch::nn::Sequential model = make_model_with_grads();
  grad_of(model, "1.bias").fill_(kInf);
  grad_of(model, "0.weight")[0][3] = kNan;
  const at::Tensor before = grad_of(model, "0.weight").clone();
  Overflow reported;
  mezzo::GradScaler scaler;
  scaler.on_skip(
      OverflowReport(*model, {.callback = [&](const Overflow& overflow) { reported = overflow; }}));
  skip_step(scaler, model);
  EXPECT_EQ(reported.step.scale, 65536);
  ASSERT_EQ(reported.parameters.size(), 2) << "last registered first";
  EXPECT_EQ(reported.parameters[0].name, "1.bias");
  EXPECT_EQ(reported.parameters[0].infs, 3);
  EXPECT_EQ(reported.parameters[0].nans, 0);
  EXPECT_EQ(reported.parameters[1].name, "0.weight");
  EXPECT_EQ(reported.parameters[1].numel, 12);
  EXPECT_EQ(reported.parameters[1].nans, 1);
  EXPECT_THAT(reported.parameters[1].first_index, ElementsAre(0, 3));
  EXPECT_EQ(reported.num_overflowed_layers, 2);
  EXPECT_EQ(reported.num_layers, 3);
  EXPECT_TRUE(torch::equal(grad_of(model, "0.weight").view(torch::kInt), before.view(torch::kInt)));
}

TEST(OverflowReport, DistinguishesUnscalingFromBackward) {
  torch::nn::Sequential model = make_model_with_grads();
  grad_of(model, "1.weight")[0][1] = 1e38F;
  const Overflow overflow = find_overflow(mezzo::named_float_parameters(*model), 0.125);
  ASSERT_EQ(overflow.parameters.size(), 1);
  EXPECT_TRUE(overflow.parameters[0].from_unscaling);
  EXPECT_THAT(overflow.parameters[0].first_index, ElementsAre(0, 1));
  EXPECT_THAT(overflow.message(), HasSubstr("from dividing by a loss scale below 1"));
  EXPECT_TRUE(find_overflow(mezzo::named_float_parameters(*model), 8).parameters.empty());
  grad_of(model, "1.bias")[0] = kInf;
  const Overflow both = find_overflow(mezzo::named_float_parameters(*model), 0.125);
  ASSERT_EQ(both.parameters.size(), 1);
  EXPECT_FALSE(both.parameters[0].from_unscaling);
}

TEST(OverflowReport, ReadsAllDtypesAndLayouts) {
  const auto parameter = [](const at::Tensor& gradient) {
    const at::Tensor values =
        torch::zeros(gradient.sizes(), gradient.options().layout(at::kStrided));
    values.mutable_grad() = gradient;
    return values;
  };
  const at::Tensor strided = torch::zeros({2, 3}).t();
  strided[2][0] = kInf;
  const at::Tensor sparse = torch::sparse_coo_tensor(
      torch::tensor({{5L, 2L}}), torch::tensor({{1.0F, kNan}, {1.0F, 1.0F}}), {9, 2});
  const Overflow overflow =
      find_overflow({{"half", parameter(torch::full({300}, 6e4, at::kHalf))},
                     {"double", parameter(torch::full({2}, 1e300, at::kDouble))},
                     {"large", parameter(torch::full({2}, 3e38F))},
                     {"none", torch::zeros({2})},
                     {"strided", parameter(strided)},
                     {"sparse", parameter(sparse)}});
  ASSERT_EQ(overflow.parameters.size(), 2);
  EXPECT_EQ(overflow.parameters[0].name, "sparse");
  EXPECT_EQ(overflow.parameters[0].numel, 4);
  EXPECT_THAT(overflow.parameters[0].first_index, ElementsAre(5, 1));
  EXPECT_THAT(overflow.parameters[1].first_index, ElementsAre(2, 0));
}

TEST(OverflowReport, ReportsClearedGrads) {
  torch::nn::Sequential model = make_model_with_grads();
  grad_of(model, "1.weight")[0][1] = kInf;
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(OverflowReport(*model, {.stream = &out}));
  skip_step(scaler, model, {.zero_grad = true});
  EXPECT_THAT(out.str(),
              HasSubstr("no gradient contains inf or NaN any more: zero_grad() cleared them"));
}

// With the same limit and advice as the scaler's own message.
TEST(OverflowReport, LimitsOutputOfConsecutiveSkips) {
  torch::nn::Sequential model = make_model_with_grads();
  grad_of(model, "1.weight").fill_(kNan);
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(OverflowReport(*model, {.stream = &out}));
  for (int skip = 0; skip < 60; ++skip) skip_step(scaler, model);
  const std::string text = out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 22);
  EXPECT_THAT(text, HasSubstr("(consecutive skips: 11; from now on every 1000th"));
  int calls = 0;
  OverflowReport report(*model, {.stream = nullptr, .callback = [&](const Overflow&) { ++calls; }});
  for (int skip = 1; skip <= 2000; ++skip) report({.consecutive_skips_at_min_scale = skip});
  EXPECT_EQ(calls, 3) << "the first, the 1000th and the 2000th";
}

// A forward pass that overflows updates the running statistics, although its step is skipped.
TEST(OverflowReport, ReportsNonfiniteBuffer) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3));
  (void)model->forward(torch::full({2, 3}, kInf));
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::full({3}, kNan);
  std::ostringstream out, named_out;
  mezzo::GradScaler scaler;
  scaler.on_skip(OverflowReport(*model, {.stream = &out}));
  skip_step(scaler, model);
  EXPECT_THAT(out.str(), HasSubstr("\n  buffer 0.running_mean contains inf or NaN. "));
  OverflowReport({{"net", *model}}, {.stream = &named_out})({});
  EXPECT_THAT(named_out.str(), HasSubstr("buffer net.0.running_mean contains"));
}

TEST(OverflowReport, PrefixesParamsOfSeveralModels) {
  torch::nn::Linear generator(2, 2), discriminator(2, 1);
  for (const auto& model : {generator, discriminator}) {
    for (const at::Tensor& parameter : model->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
  }
  generator->bias.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  std::ostringstream lines;
  mezzo::OverflowReport report({{"generator", *generator}, {"discriminator", *discriminator}},
                               {.stream = &lines});
  report({.scale = 8, .next_scale = 4});
  EXPECT_THAT(lines.str(), HasSubstr("loss scale to 4.0\n  generator.bias, in 1 of 2 layers: "));
  EXPECT_THAT(lines.str(), Not(HasSubstr("no gradient contains inf")));
  const std::string text = lines.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  const mezzo::OverflowReport single_model_report({{"generator", *generator}});
  EXPECT_EQ(mezzo::named_float_parameters({{"a", *generator}, {"b", *generator}}).size(), 2)
      << "once each";
}

}  // namespace
