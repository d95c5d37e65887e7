#include <mezzo/autocast/autocast.h>
#include <mezzo/base/script_module.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using mezzo::ComparisonOptions;
using mezzo::PrecisionComparison;
using mezzo::PrecisionRow;
using mezzo::PrecisionSetting;
using testing::HasSubstr;
using testing::ThrowsMessage;

torch::nn::Sequential classifier() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::BatchNorm1d(32),
                               torch::nn::GELU(), torch::nn::Dropout(0.25),
                               torch::nn::Linear(32, 4));
}

std::vector<torch::Tensor> batches_of(int64_t number) {
  std::vector<torch::Tensor> batches;
  for (int64_t i = 0; i < number; ++i) batches.push_back(torch::randn({16, 8}));
  return batches;
}

const auto kCrossEntropy = [](auto& model, const torch::Tensor& x) {
  return torch::nn::functional::cross_entropy(model->forward(x), x.slice(1, 0, 4).argmax(1));
};

const PrecisionSetting kBf16{.name = "bf16", .autocast = torch::kBFloat16};
const PrecisionSetting kFp16{
    .name = "fp16", .autocast = torch::kHalf, .loss_scale = mezzo::LossScale::dynamic()};

TEST(ComparePrecisions, FindsNoDifferenceBetweenFloat32AndItself) {
  auto model = classifier();
  const auto comparison =
      mezzo::compare_precisions(model, kCrossEntropy, batches_of(3), {{.name = "again"}});
  ASSERT_EQ(comparison.rows.size(), 2);
  const PrecisionRow& again = comparison.rows[1];
  EXPECT_EQ(again.gradient_error, 0) << "weights, batches and dropout are the same";
  EXPECT_DOUBLE_EQ(again.cosine, 1);
  EXPECT_EQ(again.loss_difference, 0);
  EXPECT_EQ(again.losses, comparison.rows[0].losses);
  EXPECT_EQ(again.losses.size(), 3);
  EXPECT_NE(again.losses[0], again.losses[2]);
}

TEST(ComparePrecisions, GradientErrorIsThatOfGradientsTakenByHand) {
  torch::manual_seed(4);
  torch::nn::Linear model(8, 4);
  const auto batches = batches_of(1);
  const auto gradient = [&] {
    model->zero_grad();
    kCrossEntropy(model, batches[0]).backward();
    return torch::cat({model->weight.grad().flatten(), model->bias.grad()});
  };
  const torch::Tensor exact = gradient();
  torch::Tensor low;
  {
    const mezzo::Autocast<torch::kCPU> autocast;
    low = gradient();
  }
  const auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches, {kBf16});
  const PrecisionRow& row = comparison.rows[1];
  const double error = ((low - exact).norm() / exact.norm()).item<double>();
  EXPECT_GT(error, 1e-4);
  EXPECT_NEAR(row.gradient_error, error, 1e-3 * error);
  EXPECT_NEAR(row.cosine, torch::cosine_similarity(low, exact, 0).item<double>(), 1e-6);
  ASSERT_EQ(row.parameters.size(), 2);
  EXPECT_NEAR(row.parameters[0].share + row.parameters[1].share, 1, 1e-12);
  EXPECT_GE(row.parameters[0].share, row.parameters[1].share);
}

/// Everything that training goes on from.
struct Training {
  torch::nn::Sequential model = classifier();
  mezzo::optim::AdamW optimizer{model->parameters(), mezzo::optim::AdamWOptions(1e-2)};

  void step(const torch::Tensor& batch) {
    optimizer.zero_grad();
    kCrossEntropy(model, batch).backward();
    optimizer.step();
  }
};

TEST(ComparePrecisions, TrainingGoesOnToTheBitAsIfItHadNotBeenCalled) {
  const auto batches = batches_of(4);
  Training with, without;
  torch::manual_seed(5);
  for (const auto& batch : batches) without.step(batch);
  const torch::Tensor drawn = torch::rand({3});

  torch::manual_seed(5);
  with.step(batches[0]);
  with.step(batches[1]);
  const torch::Tensor weight = with.model->parameters()[0];
  const torch::Tensor gradient = weight.grad();
  const auto version = weight._version();
  const void* const memory = weight.const_data_ptr();
  mezzo::compare_precisions(with.model, kCrossEntropy, batches);
  EXPECT_EQ(weight._version(), version);
  EXPECT_EQ(weight.const_data_ptr(), memory);
  EXPECT_TRUE(weight.grad().is_same(gradient));
  with.step(batches[2]);
  with.step(batches[3]);

  EXPECT_TRUE(torch::equal(torch::rand({3}), drawn));
  for (const auto& entry : with.model->named_parameters()) {
    EXPECT_TRUE(torch::equal(entry.value(), without.model->named_parameters()[entry.key()]))
        << entry.key();
  }
  for (const auto& entry : with.model->named_buffers()) {
    EXPECT_TRUE(torch::equal(entry.value(), without.model->named_buffers()[entry.key()]))
        << entry.key();
  }
}

TEST(ComparePrecisions, SplitMastersOfTheUsersOptimizerGoOn) {
  const auto trained = [](bool compares) {
    torch::manual_seed(6);
    torch::nn::Linear model(8, 4);
    model->weight.set_data(model->weight.to(torch::kBFloat16));
    model->bias.set_data(model->bias.to(torch::kBFloat16));
    mezzo::optim::AdamW optimizer(
        model->parameters(),
        mezzo::optim::AdamWOptions(1e-4).weight_storage(mezzo::optim::WeightStorage::split_master));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model->forward(torch::ones({2, 8}, torch::kBFloat16)).sum().backward();
      optimizer.step();
      if (!compares || step != 1) continue;
      mezzo::detail::BorrowedModel borrowed(*model);
      borrowed.reset(torch::kFloat);
      torch::NoGradGuard no_grad;
      model->weight.add_(1);
    }
    return model->weight;
  };
  EXPECT_TRUE(torch::equal(trained(true), trained(false)));
}

TEST(ComparePrecisions, RestoresTheModelWhenFloat32Throws) {
  auto model = classifier();
  const torch::Tensor before = model->parameters()[0].detach().clone();
  const torch::Tensor weight = model->parameters()[0];
  const auto fails = [](auto& net, const torch::Tensor& x) -> torch::Tensor {
    torch::NoGradGuard no_grad;
    net->parameters()[0].fill_(7);
    throw std::runtime_error("the user's own " + std::to_string(x.size(0)));
  };
  EXPECT_THAT([&] { mezzo::compare_precisions(model, fails, batches_of(1)); },
              ThrowsMessage<std::runtime_error>(HasSubstr("the user's own")));
  EXPECT_TRUE(torch::equal(weight, before));
}

TEST(ComparePrecisions, WhatASettingThrowsIsItsFailureAndTheOthersGoOn) {
  torch::nn::Linear model(8, 4);
  const PrecisionSetting bare{.name = "bf16 without autocast", .weights = torch::kBFloat16};
  const auto comparison =
      mezzo::compare_precisions(model, kCrossEntropy, batches_of(2), {bare, kBf16});
  ASSERT_EQ(comparison.rows.size(), 3);
  EXPECT_THAT(comparison.rows[1].failure, HasSubstr("dtype"));
  EXPECT_TRUE(std::isinf(comparison.rows[1].gradient_error));
  EXPECT_EQ(comparison.rows[2].failure, "");
  EXPECT_NE(comparison.proposal().setting.name, "bf16 without autocast");
}

TEST(ComparePrecisions, CandidatesOfTheDeviceAllRun) {
  auto model = classifier();
  const auto comparison = mezzo::compare_precisions(
      model, kCrossEntropy, batches_of(4), {}, {.max_gradient_error = 1, .rank_causes = false});
  ASSERT_EQ(comparison.rows.size(), 6);
  for (const PrecisionRow& row : comparison.rows) {
    EXPECT_EQ(row.failure, "") << row.setting.name;
    EXPECT_LT(row.gradient_error, 0.1) << row.setting.name;
    EXPECT_LT(row.loss_difference, 0.1) << row.setting.name;
    EXPECT_GT(row.step_seconds, 0);
    EXPECT_GT(row.peak_bytes.value(), 8 * 32 * 4);
    EXPECT_LT(row.peak_bytes.value(), 1 << 22);
  }
  EXPECT_EQ(comparison.rows[2].skipped, 0);
  EXPECT_LT(comparison.rows[2].gradient_error, comparison.rows[1].gradient_error)
      << "half has three bits more than bfloat16";
}

TEST(ComparePrecisions, CountsSkippedStepsAndBacksOffBeforeItCompares) {
  torch::manual_seed(3);
  torch::nn::Linear model(8, 4);
  const auto large = [](auto& net, const torch::Tensor& x) {
    return (net->forward(x).to(torch::kFloat) * 8).square().sum();  // half holds it at a scale of 1
  };
  PrecisionSetting fp16 = kFp16;
  fp16.loss_scale = mezzo::LossScale::dynamic({.init_scale = 65536.0 * 16});
  const auto comparison = mezzo::compare_precisions(model, large, batches_of(4), {fp16});
  EXPECT_GT(comparison.rows[1].skipped, 0.5);
  EXPECT_LT(comparison.rows[1].gradient_error, 0.1);
}

TEST(ComparePrecisions, MultipliesAsTheSettingSaysInForwardAndBackward) {
  torch::nn::Linear model(8, 4);
  std::vector<at::Float32MatmulPrecision> seen;
  const auto loss = [&seen](auto& net, const torch::Tensor& x) {
    const auto note = [&seen] { seen.push_back(at::globalContext().float32MatmulPrecision()); };
    note();
    const torch::Tensor result = net->forward(x).sum();
    result.register_hook([note](const torch::Tensor&) { note(); });
    return result;
  };
  at::globalContext().setFloat32MatmulPrecision("high");
  mezzo::compare_precisions(model, loss, batches_of(1), {{.name = "again"}});
  EXPECT_THAT(seen, testing::Each(at::Float32MatmulPrecision::HIGHEST));
  EXPECT_EQ(at::globalContext().float32MatmulPrecision(), at::Float32MatmulPrecision::HIGH);
  at::globalContext().setFloat32MatmulPrecision("highest");
  seen.clear();
  mezzo::compare_precisions(model, loss, batches_of(1),
                            {{.name = "tf32", .float32 = at::Float32MatmulPrecision::HIGH}});
  ASSERT_EQ(seen.size(), 8) << "gradients and a step of two settings, forward and backward";
  EXPECT_EQ(seen[3], at::Float32MatmulPrecision::HIGHEST);
  EXPECT_EQ(seen[7], at::Float32MatmulPrecision::HIGH);
}

/// A product that loses nearly everything in low precision, or two, between layers that do not.
struct Fragile : torch::nn::Module {
  explicit Fragile(bool has_two) : has_two_products(has_two) {
    first = register_module("first", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    // 1,000 swamps what is multiplied: bfloat16 keeps three digits.
    torch::Tensor large = first->forward(x).to(torch::kFloat) + 1000;
    large = torch::bmm(large.unsqueeze(0), torch::eye(8).unsqueeze(0)).squeeze(0);
    if (has_two_products) large = torch::mm(large.to(torch::kFloat), torch::eye(8));
    return last->forward(torch::tanh(large.to(torch::kFloat) - 1000));
  }
  bool has_two_products;
  torch::nn::Linear first{nullptr}, last{nullptr};
};

TEST(ComparePrecisions, NamesTheOpThatCausesTheErrorAndProposesToDenyIt) {
  torch::manual_seed(8);
  const auto model = std::make_shared<Fragile>(false);
  auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches_of(3), {kBf16},
                                              {.max_gradient_error = 0.05});
  ASSERT_EQ(comparison.rows.size(), 3) << comparison;
  const PrecisionRow& plain = comparison.rows[1];
  EXPECT_GT(plain.gradient_error, 0.1);
  ASSERT_FALSE(plain.ops.empty());
  EXPECT_EQ(plain.ops[0].name, "aten::bmm");
  EXPECT_LT(plain.ops[0].error_without, 0.5 * plain.single_batch_error);
  const PrecisionRow& repaired = comparison.rows[2];
  EXPECT_LE(repaired.gradient_error, 0.05);
  EXPECT_EQ(repaired.setting.name, "bf16 + policy");
  EXPECT_EQ(repaired.setting.policy.to_string(), "fp32 aten::bmm\nfp32 aten::bmm.dtype\n");
  EXPECT_EQ(mezzo::OpPolicy::parse(repaired.setting.policy.to_string()).edits(),
            repaired.setting.policy.edits());
  for (PrecisionRow& row : comparison.rows) row.step_seconds = 2;
  comparison.rows[1].step_seconds = 0.5;
  comparison.rows[2].step_seconds = 1;
  EXPECT_EQ(comparison.proposal().setting.name, "bf16 + policy") << "bf16 misses the bound";
  comparison.max_gradient_error = 1e9;
  EXPECT_EQ(comparison.proposal().setting.name, "bf16");
}

TEST(ComparePrecisions, KeepsAsManyOpsInFloat32AsTheBoundTakes) {
  torch::manual_seed(8);
  const auto model = std::make_shared<Fragile>(true);
  const auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches_of(3), {kBf16},
                                                    {.max_gradient_error = 0.05});
  ASSERT_EQ(comparison.rows.size(), 3) << comparison;
  EXPECT_LE(comparison.rows[2].gradient_error, 0.05);
  const mezzo::OpPolicy& policy = comparison.rows[2].setting.policy;
  EXPECT_EQ(policy.category("aten::bmm", torch::kCPU), mezzo::OpCategory::fp32);
  EXPECT_EQ(policy.category("aten::mm", torch::kCPU), mezzo::OpCategory::fp32);
}

/// The loss looks at the small difference that the weight of `bad` makes, and bfloat16 rounds away.
TEST(ComparePrecisions, NamesTheModuleThatCausesTheError) {
  torch::manual_seed(9);
  torch::nn::Sequential model;
  model->push_back("good", torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
  model->push_back("bad", torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
  {
    torch::NoGradGuard no_grad;
    model->parameters()[0].copy_(torch::eye(8));
    model->parameters()[1].copy_(torch::eye(8) * (1 + 1.0 / 400));
  }
  const auto loss = [](auto& net, const torch::Tensor& x) {
    return (net->forward(x.round()).to(torch::kFloat) - x.round()).square().sum();
  };
  const auto comparison =
      mezzo::compare_precisions(model, loss, batches_of(1), {kBf16}, {.max_gradient_error = 1});
  const PrecisionRow& row = comparison.rows[1];
  ASSERT_EQ(row.modules.size(), 2);
  EXPECT_EQ(row.modules[0].name, "bad");
  EXPECT_LT(row.modules[0].error_without, 0.1 * row.single_batch_error);
  EXPECT_GT(row.modules[1].error_without, 0.5 * row.single_batch_error);
}

// A call of a torch::jit::Module under autocast runs libtorch's executor, which keeps the casts of
// its first call: settings would be compared that were not in force.
template <class Model>
concept Comparable = requires(Model& model, const std::vector<torch::Tensor>& batches) {
  mezzo::compare_precisions(model, kCrossEntropy, batches);
};
static_assert(Comparable<torch::nn::Linear> && Comparable<std::shared_ptr<torch::nn::LinearImpl>>);
static_assert(Comparable<torch::nn::LinearImpl> && Comparable<mezzo::ScriptModule>);
static_assert(!Comparable<torch::jit::Module>);

TEST(ComparePrecisions, SaysWhatItCannotCompare) {
  torch::nn::Linear model(8, 4);
  const auto batches = batches_of(1);
  const auto compare = [&] { mezzo::compare_precisions(model, kCrossEntropy, batches, {kBf16}); };
  EXPECT_THAT([&] { mezzo::compare_precisions(model, kCrossEntropy, batches_of(0)); },
              ThrowsMessage<c10::Error>(HasSubstr("batches is empty; give ten")));
  torch::nn::Linear empty(nullptr);
  EXPECT_THAT([&] { mezzo::compare_precisions(empty, kCrossEntropy, batches, {kBf16}); },
              ThrowsMessage<c10::Error>(HasSubstr("the model is an empty holder")));
  {
    const mezzo::Autocast<torch::kCPU> autocast;
    EXPECT_THAT(compare, ThrowsMessage<c10::Error>(HasSubstr("outside of Autocast regions")));
  }
  {
    struct Hook : torch::autograd::PostAccumulateGradHook {
      void operator()(const torch::Tensor& /*parameter*/) override {}
    };
    torch::autograd::impl::set_post_acc_grad_hooks(model->weight, std::make_unique<Hook>());
    EXPECT_THAT(compare, ThrowsMessage<c10::Error>(HasSubstr("before GradBuckets")));
    torch::autograd::impl::set_post_acc_grad_hooks(model->weight, nullptr);
  }
  {
    const torch::NoGradGuard no_grad;
    EXPECT_NO_THROW(compare()) << "it trains in any grad mode";
    EXPECT_FALSE(torch::GradMode::is_enabled());
  }
  EXPECT_THAT(
      [&] {
        mezzo::compare_precisions(model, kCrossEntropy, batches, {kBf16},
                                  {.max_gradient_error = -1});
      },
      ThrowsMessage<c10::Error>(HasSubstr("max_gradient_error is -1")));
  model->to(torch::kBFloat16);
  EXPECT_THAT(compare, ThrowsMessage<c10::Error>(HasSubstr("is bfloat16 [")));
}

/// In float32 by policy, a model is as fast as in float32, and timing noise does not make it the
/// fastest.
TEST(ComparePrecisions, ProposesNoSettingThatLowersNoProduct) {
  auto model = classifier();
  PrecisionSetting exact = kBf16;
  exact.name = "bf16 without products";
  exact.policy = mezzo::install_op_overrides(
      mezzo::OpPolicy().deny("aten::linear").deny("aten::addmm").deny("aten::mm"));
  auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches_of(2), {kBf16, exact});
  ASSERT_EQ(comparison.rows.size(), 3);
  EXPECT_FALSE(comparison.rows[0].lowers_products);
  EXPECT_TRUE(comparison.rows[1].lowers_products);
  EXPECT_FALSE(comparison.rows[2].lowers_products);
  comparison.rows[2].step_seconds = 0;
  EXPECT_NE(comparison.proposal().setting.name, exact.name);
  std::ostringstream text;
  text << comparison;
  EXPECT_THAT(text.str(), HasSubstr("; bf16 without products runs no product in low precision\n"));
}

/// A policy that takes the last product out of low precision is no repair.
TEST(ComparePrecisions, RepairsNoSettingByFloat32) {
  torch::nn::Linear model(8, 4);
  const auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches_of(2), {kBf16},
                                                    {.max_gradient_error = 1e-6});
  ASSERT_EQ(comparison.rows.size(), 2) << comparison;
  EXPECT_EQ(comparison.proposal().setting.name, "float32");
}

/// The first layer's result in float32 makes the additions of a residual stream run in float32 too,
/// and the second layer's does not.
TEST(ComparePrecisions, SaysWhatElseRunsInFloat32BesideACause) {
  struct Stream : torch::nn::Module {
    Stream() {
      register_module("first", first);
      register_module("second", second);
    }
    torch::Tensor forward(const torch::Tensor& x) {
      torch::Tensor h = first->forward(x);
      for (int i = 0; i < 3; ++i) h = h + h;
      return second->forward(h);
    }
    torch::nn::Linear first{8, 8}, second{8, 4};
  };
  auto model = std::make_shared<Stream>();
  const auto comparison = mezzo::compare_precisions(model, kCrossEntropy, batches_of(2), {kBf16});
  const auto others = [&](const std::string& module) {
    for (const auto& cause : comparison.rows[1].modules) {
      if (cause.name == module) return cause.others;
    }
    return std::int64_t{-1};
  };
  EXPECT_EQ(others("first"), 3);
  EXPECT_EQ(others("second"), 0);
}

TEST(ComparePrecisions, PrintsATableAndTheProposal) {
  PrecisionComparison comparison;
  comparison.max_gradient_error = 0.05;
  comparison.rows.push_back(
      {.setting = {.name = "float32"}, .step_seconds = 2, .peak_bytes = 1 << 20});
  comparison.rows.push_back({.setting = kBf16,
                             .gradient_error = 0.0123,
                             .cosine = 0.9999,
                             .step_seconds = 1,
                             .single_batch_error = 0.02,
                             .ops = {{"aten::mm", 0.001, 3}, {"aten::add.Tensor", 0.02}},
                             .modules = {{"head", 0.005}}});
  comparison.rows.push_back({.setting = kFp16, .failure = "no kernel"});
  std::ostringstream text;
  text << comparison;
  EXPECT_THAT(text.str(), HasSubstr("bf16                              0.0123          0.9999"));
  EXPECT_THAT(text.str(), HasSubstr("fp16: no kernel\n"));
  EXPECT_THAT(text.str(),
              HasSubstr("proposed: bf16, the fastest with a gradient error of at most 0.05\n"));
  EXPECT_THAT(
      text.str(),
      HasSubstr("  0.001      with the op aten::mm in float32, and with it 3 calls of other ops "
                "that read its result\n"));
  EXPECT_THAT(text.str(), HasSubstr("  0.005      with the module head in float32\n"));
  EXPECT_THAT(text.str(), Not(HasSubstr("add.Tensor"))) << "it is as bad without";
}

}  // namespace
