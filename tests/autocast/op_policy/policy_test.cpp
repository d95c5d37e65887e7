#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <torch/library.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../support/message_of.h"

namespace {

using mezzo::Autocast;
using mezzo::install_op_overrides;
using mezzo::OpCategory;
using mezzo::OpPolicy;
using test_support::message_of;
using testing::HasSubstr;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::kHalf;

torch::Tensor ones_of(at::ScalarType dtype = kFloat) { return torch::ones({2, 2}, dtype); }

at::ScalarType mm_dtype(at::ScalarType inputs = kFloat) {
  return torch::mm(ones_of(inputs), ones_of(inputs)).scalar_type();
}

at::ScalarType softmax_dtype(at::ScalarType input) {
  return torch::softmax(ones_of(input), 1).scalar_type();
}

TEST(OpPolicy, AllowsDeniesPromotesAndIgnores) {
  const auto policy = install_op_overrides(
      OpPolicy().allow("aten::relu").deny("aten::mm").promote("aten::mul.Tensor"));
  const Autocast<kCPU> autocast({.policy = policy});
  EXPECT_EQ(torch::relu(ones_of()).scalar_type(), kBFloat16);
  EXPECT_EQ(mm_dtype(kBFloat16), kFloat);
  EXPECT_EQ(torch::mul(ones_of(kHalf), ones_of(kBFloat16)).scalar_type(), kFloat);
  EXPECT_EQ(torch::mul(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kHalf);
  {
    const Autocast<kCPU> inner({.policy = install_op_overrides(OpPolicy().ignore("mm"))});
    EXPECT_EQ(mm_dtype(kFloat), kFloat);
    EXPECT_EQ(mm_dtype(kBFloat16), kBFloat16);
  }
}

// No other test names these ops.
TEST(OpPolicy, ChangesNothingUntilItIsInstalled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::hardswish", "");
  const auto policy = OpPolicy().deny("aten::hardswish");
  EXPECT_FALSE(op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU));
  const auto names_op_and_call = testing::AllOf(HasSubstr("aten::hardswish"),
                                                HasSubstr("mezzo::install_op_overrides(policy)"));
  EXPECT_THAT(message_of([&] { const Autocast<kCPU> autocast({.policy = policy}); }),
              names_op_and_call);
  EXPECT_THAT(message_of([&] { std::ignore = mezzo::autocast<kCPU>([] {}, {.policy = policy}); }),
              names_op_and_call);
  // What libtorch does with the op anyway has to be installed too: else it would work on one device
  // and not on another.
  EXPECT_THAT(
      message_of([] { const Autocast<kCPU> a({.policy = OpPolicy().ignore("hardsigmoid")}); }),
      HasSubstr("aten::hardsigmoid"));
  install_op_overrides(policy);
  EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU));
  const Autocast<kCPU> autocast({.policy = policy});
  EXPECT_EQ(torch::hardswish(ones_of(kBFloat16)).scalar_type(), kFloat);
}

// oneDNN has an LSTM in half on some processors only, in Python too.
TEST(OpPolicy, RunsAnLstmUnderHalfOnEveryCpuWhereItsLayerIsDenied) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8));
  const auto policy = install_op_overrides(OpPolicy().deny("aten::mkldnn_rnn_layer"));
  const auto x = torch::ones({3, 2, 8}, torch::requires_grad());
  torch::Tensor output;
  {
    const Autocast<kCPU, kHalf> autocast({.policy = policy});
    output = std::get<0>(lstm(x));
  }
  EXPECT_EQ(output.scalar_type(), kFloat);
  output.sum().backward();
  EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

TEST(OpPolicy, LeavesDoubleIntegerAndDisabledRegionsAlone) {
  const auto policy = install_op_overrides(OpPolicy().allow("relu").deny("mm"));
  const Autocast<kCPU> autocast({.policy = policy});
  EXPECT_EQ(torch::relu(ones_of(torch::kDouble)).scalar_type(), torch::kDouble);
  EXPECT_EQ(torch::relu(ones_of(torch::kInt)).scalar_type(), torch::kInt);
  EXPECT_EQ(mm_dtype(torch::kDouble), torch::kDouble);
  const Autocast<kCPU> exact({.enabled = false, .policy = policy});
  EXPECT_EQ(torch::relu(ones_of()).scalar_type(), kFloat);
}

TEST(OpPolicy, NamesOneOverloadOrAll) {
  EXPECT_EQ(OpPolicy().deny("softmax.int").edits(),
            (std::vector<mezzo::OpEntry>{{"aten::softmax.int", OpCategory::fp32}}));
  EXPECT_EQ(OpPolicy().deny("aten::pow").edits(),
            (std::vector<mezzo::OpEntry>{{"aten::pow.Scalar", OpCategory::fp32},
                                         {"aten::pow.Tensor_Scalar", OpCategory::fp32},
                                         {"aten::pow.Tensor_Tensor", OpCategory::fp32}}));
}

TEST(OpPolicy, IsAValueWhoseLaterEditsWin) {
  const auto first = OpPolicy().deny("mm");
  const auto second = first.allow("mm");
  EXPECT_EQ(first.category("mm", kCPU), OpCategory::fp32);
  EXPECT_EQ(second.category("mm", kCPU), OpCategory::lower_precision);
  EXPECT_EQ(first.with(OpPolicy().promote("mm")).category("mm", kCPU), OpCategory::promote);
  EXPECT_EQ(OpPolicy().category("mm", kCPU), OpCategory::lower_precision);
}

TEST(OpPolicy, NestsAndEndsWithItsScope) {
  const auto outer_policy = install_op_overrides(OpPolicy().deny("mm").deny("softmax.int"));
  {
    const Autocast<kCPU> outer({.policy = outer_policy});
    {
      const Autocast<kCPU> inner({.policy = install_op_overrides(OpPolicy().allow("mm"))});
      EXPECT_EQ(mm_dtype(), kBFloat16);             // the inner policy's word
      EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);  // where it is silent, the outer's
      const Autocast<kCPU> plain;
      EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);  // a plain region changes no policy
    }
    EXPECT_EQ(mm_dtype(), kFloat);
  }
  const Autocast<kCPU> autocast;
  EXPECT_EQ(mm_dtype(), kBFloat16);
  EXPECT_EQ(softmax_dtype(kBFloat16), kBFloat16);
}

TEST(OpPolicy, HoldsInItsOwnThreadAndGoesWhereTheStateIsHandedOver) {
  const Autocast<kCPU> autocast({.policy = install_op_overrides(OpPolicy().deny("mm"))});
  auto alone = kHalf;
  auto handed = kHalf;
  std::thread([&] {
    const Autocast<kCPU> own;
    alone = mm_dtype();
  }).join();
  std::thread(mezzo::with_current_autocast([&] { handed = mm_dtype(); })).join();
  EXPECT_EQ(alone, kBFloat16);
  EXPECT_EQ(handed, kFloat);
}

TEST(OpPolicy, ReachesTheRunTimeGuardCallablesAndKeepsToItsDevice) {
  const auto policy = install_op_overrides(OpPolicy().deny("mm"));
  {
    const mezzo::AutocastGuard guard({.device = kCPU, .policy = policy});
    EXPECT_EQ(mm_dtype(), kFloat);
  }
  const auto product = [] { return mm_dtype(); };
  EXPECT_EQ(mezzo::autocast<kCPU>(product, {.policy = policy})(), kFloat);
  EXPECT_EQ(mezzo::autocast(product, {.device = kCPU, .policy = policy})(), kFloat);
  const Autocast<torch::kCUDA> cuda({.policy = policy});
  const Autocast<kCPU> cpu;
  EXPECT_EQ(mm_dtype(), kBFloat16);
}

TEST(OpPolicy, RunsABannedOpInFloatWhereItIsDenied) {
  const auto policy = install_op_overrides(OpPolicy().deny("binary_cross_entropy"));
  const auto probability = torch::full({3}, 0.5);
  const Autocast<kCPU> autocast({.policy = policy});
  EXPECT_EQ(torch::binary_cross_entropy(probability.to(kBFloat16), probability).scalar_type(),
            kFloat);
  EXPECT_EQ(policy.category("binary_cross_entropy", torch::kCUDA), OpCategory::fp32);
}

/// As docs/porting.md says: libtorch's layers call addmm and matmul, and not linear.
TEST(OpPolicy, ReachesLinearLayersByTheOpsThatTheyCall) {
  torch::nn::Linear model(4, 4);
  const torch::Tensor input = torch::rand({2, 4});
  {
    const Autocast<kCPU> autocast(
        {.policy = install_op_overrides(OpPolicy().deny("aten::linear"))});
    EXPECT_EQ(torch::linear(input, model->weight, model->bias).scalar_type(), kFloat);
    EXPECT_EQ(model(input).scalar_type(), kBFloat16);
  }
  const Autocast<kCPU> exact_layers(
      {.policy = install_op_overrides(OpPolicy().deny("aten::addmm").deny("aten::matmul"))});
  torch::nn::Linear without_bias(torch::nn::LinearOptions(4, 4).bias(false));
  for (const torch::Tensor& x : {input, input[0], torch::rand({2, 3, 4})}) {
    EXPECT_EQ(model(x).scalar_type(), kFloat);
    EXPECT_EQ(without_bias(x).scalar_type(), kFloat);
  }
}

TEST(OpPolicy, CastsEinsumSumsAndNorms) {
  const auto policy =
      install_op_overrides(OpPolicy().allow("einsum").deny("sum").deny("norm").deny("softmax"));
  const Autocast<kCPU> autocast({.policy = policy});
  EXPECT_EQ(torch::einsum("ij->i", {ones_of()}).scalar_type(), kBFloat16);
  EXPECT_EQ(ones_of(kBFloat16).sum().scalar_type(), kFloat);
  EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);
  EXPECT_EQ(torch::softmax(ones_of(kBFloat16), 1, kBFloat16).scalar_type(), kBFloat16);
  EXPECT_EQ(ones_of(kBFloat16).norm().scalar_type(), kFloat);
}

TEST(OpPolicy, RefusesNamesThatDoNotExist) {
  EXPECT_THAT(message_of([] { return OpPolicy().deny("lineer"); }),
              HasSubstr("no operator \"aten::lineer\" is registered"));
  EXPECT_THAT(message_of([] { return OpPolicy().deny("aten::softmax.itn"); }),
              HasSubstr("no operator \"aten::softmax.itn\" is registered"));
  EXPECT_THAT(message_of([] { return OpPolicy().deny("aten::cat."); }),
              HasSubstr("no operator \"aten::cat.\" is registered"));
}

TEST(OpPolicy, RefusesOpsThatWrite) {
  EXPECT_THAT(message_of([] { return OpPolicy().deny("relu_"); }), HasSubstr("writes into its"));
  EXPECT_THAT(message_of([] { return OpPolicy().deny("mm.out"); }), HasSubstr("writes into its"));
}

bool returns_alias(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(),
                     [](const auto& result) { return result.alias_info() != nullptr; });
}

TEST(OpPolicy, RefusesToCastEveryOpWhoseSchemaReturnsAView) {
  int views = 0;
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(op_name);
    if (!op.has_value() || op->schema().is_mutable() || !returns_alias(op->schema())) continue;
    const std::string name = c10::toString(op_name);
    ++views;
    const auto says_why = HasSubstr("op: " + name + " may return a view of its argument");
    EXPECT_THAT(message_of([&] { return OpPolicy().deny(name); }), says_why);
    EXPECT_THAT(message_of([&] { return OpPolicy().allow(name); }), says_why);
    EXPECT_THAT(message_of([&] { return OpPolicy().promote(name); }), says_why);
    EXPECT_NO_THROW(static_cast<void>(OpPolicy().ignore(name))) << "no cast: " << name;
  }
  EXPECT_GT(views, 90);
}

TEST(OpPolicyText, RefusesToCastAView) {
  EXPECT_THAT(message_of([] { return OpPolicy::parse("allow relu\ndeny view\n"); }),
              HasSubstr("op policy, line 2: op: aten::view may return a view"));
  EXPECT_THAT(message_of([] { return OpPolicy().deny("squeeze_"); }), HasSubstr("writes into its"));
  EXPECT_NO_THROW(static_cast<void>(OpPolicy().deny("clone").deny("view_copy")));
}

// dropout hands its argument back in evaluation, and its schema does not say so.
TEST(OpPolicy, CopiesAnArgumentThatACastOpHandsBack) {
  const auto denying = install_op_overrides(OpPolicy().deny("dropout").deny("unsafe_chunk"));
  const auto allowing = install_op_overrides(OpPolicy().allow("dropout").allow("unsafe_chunk"));
  for (const auto& policy : {denying, allowing}) {
    const Autocast<kCPU> autocast({.policy = policy});
    for (const auto dtype : {kFloat, kBFloat16}) {
      const auto x = torch::ones({4}, dtype).requires_grad_();
      const auto kept = torch::dropout(x, 0.5, /*train=*/false);
      EXPECT_FALSE(kept.is_alias_of(x));
      EXPECT_TRUE(torch::equal(kept.to(kFloat), torch::ones({4})));
      EXPECT_FALSE(torch::unsafe_chunk(x, 2)[1].is_alias_of(x));
      kept.to(kFloat).sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), torch::ones({4}, dtype)));
      const torch::NoGradGuard no_grad;
      torch::dropout(x, 0.5, /*train=*/false).add_(1);
      EXPECT_TRUE(torch::equal(x, torch::ones({4}, dtype)));
    }
  }
}

// The cast copy of a weight lies in libtorch's cache, which a write through the result would reach.
TEST(OpPolicy, KeepsTheCacheOfCastsOutOfWhatACastOpHandsBack) {
  const auto policy = install_op_overrides(OpPolicy().allow("dropout"));
  const auto weight = torch::ones({2, 2}, torch::requires_grad());
  const Autocast<kCPU> autocast({.policy = policy});
  {
    const torch::NoGradGuard no_grad;
    torch::dropout(weight, 0.5, /*train=*/false).mul_(8);
  }
  EXPECT_EQ(torch::mm(torch::ones({1, 2}, kBFloat16), weight).sum().item<float>(), 4);
}

TEST(OpPolicy, LetsWritesThroughAViewReachItsBase) {
  const Autocast<kCPU> autocast({.policy = install_op_overrides(OpPolicy().ignore("view"))});
  const auto h = torch::zeros({2, 4}, kBFloat16);
  h.view({8}).add_(1);
  EXPECT_TRUE(torch::equal(h, torch::ones({2, 4}, kBFloat16)));
}

TEST(OpPolicy, KeepsTheDispatchersWarningOffTheTerminal) {
  testing::internal::CaptureStderr();
  const auto policy = install_op_overrides(OpPolicy().deny("addmm"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(OpPolicyText, RoundTrips) {
  const auto policy = OpPolicy().allow("relu").deny("linear").ignore("mm").promote("mul.Tensor");
  EXPECT_EQ(OpPolicy::parse(policy.to_string()).edits(), policy.edits());
  EXPECT_EQ(OpPolicy::parse("").edits(), OpPolicy().edits());
  EXPECT_EQ(OpPolicy().deny("softmax.int").allow("relu").to_string(),
            "allow aten::relu\ndeny aten::softmax.int\n");
}

TEST(OpPolicyText, ReadsVerbsSeveralOpsALineAndComments) {
  const auto policy = OpPolicy::parse("# mine\nallow relu tanh  # both\n\n  deny aten::linear\n");
  EXPECT_EQ(policy.edits(), OpPolicy().allow("relu").allow("tanh").deny("linear").edits());
}

TEST(OpPolicyText, NamesTheLineOfAnError) {
  EXPECT_THAT(
      message_of([] { return OpPolicy::parse("allow relu\nforbid mm\n"); }),
      HasSubstr("op policy, line 2: \"forbid\" is no edit; use allow, deny, promote or ignore"));
  EXPECT_THAT(message_of([] { return OpPolicy::parse("allow\n"); }), HasSubstr("names no op"));
  EXPECT_THAT(message_of([] { return OpPolicy::parse("deny lineer\n"); }),
              HasSubstr("line 1: op: no operator \"aten::lineer\""));
}

TEST(OpPolicyText, ReadsAFileAndNamesOneThatIsNotThere) {
  const auto path = testing::TempDir() + "mezzo_policy.txt";
  std::ofstream(path) << "deny mm\nallow nosuchop\n";
  EXPECT_THAT(message_of([&] { return OpPolicy::from_file(path); }), HasSubstr(path + ", line 2"));
  std::ofstream(path) << "deny mm\n";
  EXPECT_EQ(OpPolicy::from_file(path).edits(), OpPolicy().deny("mm").edits());
  std::remove(path.c_str());
  EXPECT_THAT(message_of([&] { return OpPolicy::from_file(path); }), HasSubstr("cannot be opened"));
  EXPECT_THAT(message_of([&] { return OpPolicy::from_file(testing::TempDir()); }),
              HasSubstr("is it a folder, or the disk damaged?"));
}

torch::Tensor scaled_product(const torch::Tensor& a, const torch::Tensor& b) { return a * b * 2; }

TORCH_LIBRARY(mezzo_policy_test, library) {
  library.def("scaled_product(Tensor a, Tensor b) -> Tensor");
  library.impl("scaled_product", c10::DispatchKey::CPU, TORCH_FN(scaled_product));
}

TEST(OpPolicy, MakesARegisteredCustomOpTakePartByName) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mezzo_policy_test::scaled_product", "")
                             .typed<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>();
  const auto policy = install_op_overrides(OpPolicy().allow("mezzo_policy_test::scaled_product"));
  const auto denied = install_op_overrides(OpPolicy().deny("mezzo_policy_test::scaled_product"));
  EXPECT_EQ(policy.category("mezzo_policy_test::scaled_product", torch::kCUDA),
            OpCategory::lower_precision);
  const Autocast<kCPU> autocast;
  EXPECT_EQ(op.call(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kHalf);
  const Autocast<kCPU> allowing({.policy = policy});
  EXPECT_EQ(op.call(ones_of(), ones_of()).scalar_type(), kBFloat16);
  const Autocast<kCPU> denying({.policy = denied});
  EXPECT_EQ(op.call(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kFloat);
}

}  // namespace
