#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_state.h>
#include <mezzo/autocast/op_overrides.h>

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

using mezzo::AutocastGuard;
using mezzo::CastPolicy;
using mezzo::install_op_overrides;
using mezzo::OpOverrides;
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

TEST(OpOverrides, AllowsDeniesPromotesAndIgnores) {
  const auto overrides = install_op_overrides(
      OpOverrides().allow("aten::relu").deny("aten::mm").promote("aten::mul.Tensor"));
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  EXPECT_EQ(torch::relu(ones_of()).scalar_type(), kBFloat16);
  EXPECT_EQ(mm_dtype(kBFloat16), kFloat);
  EXPECT_EQ(torch::mul(ones_of(kHalf), ones_of(kBFloat16)).scalar_type(), kFloat);
  EXPECT_EQ(torch::mul(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kHalf);
  {
    const AutocastGuard<kCPU> inner(
        {.op_overrides = install_op_overrides(OpOverrides().ignore("mm"))});
    EXPECT_EQ(mm_dtype(kFloat), kFloat);
    EXPECT_EQ(mm_dtype(kBFloat16), kBFloat16);
  }
}

// No other test names these ops.
TEST(OpOverrides, ThrowsUnlessInstalled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::hardswish", "");
  const auto overrides = OpOverrides().deny("aten::hardswish");
  EXPECT_FALSE(op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU));
  const auto names_op_and_call = testing::AllOf(
      HasSubstr("aten::hardswish"), HasSubstr("mezzo::install_op_overrides(overrides)"));
  EXPECT_THAT(message_of([&] { const AutocastGuard<kCPU> autocast({.op_overrides = overrides}); }),
              names_op_and_call);
  EXPECT_THAT(message_of([&] {
                std::ignore = mezzo::autocast_wrap<kCPU>({.op_overrides = overrides}, [] {});
              }),
              names_op_and_call);
  // Overrides equal to libtorch's own policy must be installed too, or they would work on one
  // device and not on another.
  EXPECT_THAT(message_of([] {
                const AutocastGuard<kCPU> a({.op_overrides = OpOverrides().ignore("hardsigmoid")});
              }),
              HasSubstr("aten::hardsigmoid"));
  install_op_overrides(overrides);
  EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU));
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  EXPECT_EQ(torch::hardswish(ones_of(kBFloat16)).scalar_type(), kFloat);
}

// oneDNN supports a float16 LSTM on some processors only, in Python too.
TEST(OpOverrides, DeniedLayerRunsLstmUnderFloat16) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8));
  const auto overrides = install_op_overrides(OpOverrides().deny("aten::mkldnn_rnn_layer"));
  const auto x = torch::ones({3, 2, 8}, torch::requires_grad());
  torch::Tensor output;
  {
    const AutocastGuard<kCPU, kHalf> autocast({.op_overrides = overrides});
    output = std::get<0>(lstm(x));
  }
  EXPECT_EQ(output.scalar_type(), kFloat);
  output.sum().backward();
  EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

TEST(OpOverrides, IgnoresDoubleIntegerAndDisabledRegions) {
  const auto overrides = install_op_overrides(OpOverrides().allow("relu").deny("mm"));
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  EXPECT_EQ(torch::relu(ones_of(torch::kDouble)).scalar_type(), torch::kDouble);
  EXPECT_EQ(torch::relu(ones_of(torch::kInt)).scalar_type(), torch::kInt);
  EXPECT_EQ(mm_dtype(torch::kDouble), torch::kDouble);
  const AutocastGuard<kCPU> exact({.enabled = false, .op_overrides = overrides});
  EXPECT_EQ(torch::relu(ones_of()).scalar_type(), kFloat);
}

TEST(OpOverrides, NamesOneOverloadOrAll) {
  EXPECT_EQ(OpOverrides().deny("softmax.int").entries(),
            (std::vector<mezzo::OpEntry>{{"aten::softmax.int", CastPolicy::fp32}}));
  EXPECT_EQ(OpOverrides().deny("aten::pow").entries(),
            (std::vector<mezzo::OpEntry>{{"aten::pow.Scalar", CastPolicy::fp32},
                                         {"aten::pow.Tensor_Scalar", CastPolicy::fp32},
                                         {"aten::pow.Tensor_Tensor", CastPolicy::fp32}}));
}

TEST(OpOverrides, LaterEntriesTakePrecedence) {
  const auto first = OpOverrides().deny("mm");
  const auto second = first.allow("mm");
  EXPECT_EQ(first.cast_policy("mm", kCPU), CastPolicy::fp32);
  EXPECT_EQ(second.cast_policy("mm", kCPU), CastPolicy::lower_precision_fp);
  EXPECT_EQ(first.with(OpOverrides().promote("mm")).cast_policy("mm", kCPU), CastPolicy::promote);
  EXPECT_EQ(OpOverrides().cast_policy("mm", kCPU), CastPolicy::lower_precision_fp);
}

TEST(OpOverrides, NestsAndEndsWithScope) {
  const auto outer_overrides = install_op_overrides(OpOverrides().deny("mm").deny("softmax.int"));
  {
    const AutocastGuard<kCPU> outer({.op_overrides = outer_overrides});
    {
      const AutocastGuard<kCPU> inner(
          {.op_overrides = install_op_overrides(OpOverrides().allow("mm"))});
      EXPECT_EQ(mm_dtype(), kBFloat16);             // the inner overrides
      EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);  // only in the outer
      const AutocastGuard<kCPU> plain;
      EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);  // inherited from the outer
    }
    EXPECT_EQ(mm_dtype(), kFloat);
  }
  const AutocastGuard<kCPU> autocast;
  EXPECT_EQ(mm_dtype(), kBFloat16);
  EXPECT_EQ(softmax_dtype(kBFloat16), kBFloat16);
}

TEST(OpOverrides, PropagatesWithAutocastState) {
  const AutocastGuard<kCPU> autocast(
      {.op_overrides = install_op_overrides(OpOverrides().deny("mm"))});
  auto alone = kHalf;
  auto propagated = kHalf;
  std::thread([&] {
    const AutocastGuard<kCPU> plain_region;
    alone = mm_dtype();
  }).join();
  std::thread(mezzo::propagate_autocast_state([&] { propagated = mm_dtype(); })).join();
  EXPECT_EQ(alone, kBFloat16);
  EXPECT_EQ(propagated, kFloat);
}

TEST(OpOverrides, AppliesToRegionsOnDevice) {
  const auto overrides = install_op_overrides(OpOverrides().deny("mm"));
  {
    const mezzo::AutocastGuard guard({.device_type = kCPU, .op_overrides = overrides});
    EXPECT_EQ(mm_dtype(), kFloat);
  }
  const auto product = [] { return mm_dtype(); };
  EXPECT_EQ(mezzo::autocast_wrap<kCPU>({.op_overrides = overrides}, product)(), kFloat);
  EXPECT_EQ(mezzo::autocast_wrap({.device_type = kCPU, .op_overrides = overrides}, product)(),
            kFloat);
  const AutocastGuard<torch::kCUDA> cuda({.op_overrides = overrides});
  const AutocastGuard<kCPU> cpu;
  EXPECT_EQ(mm_dtype(), kBFloat16);
}

TEST(OpOverrides, DenyRunsBannedOpInFloat32) {
  const auto overrides = install_op_overrides(OpOverrides().deny("binary_cross_entropy"));
  const auto probability = torch::full({3}, 0.5);
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  EXPECT_EQ(torch::binary_cross_entropy(probability.to(kBFloat16), probability).scalar_type(),
            kFloat);
  EXPECT_EQ(overrides.cast_policy("binary_cross_entropy", torch::kCUDA), CastPolicy::fp32);
}

/// libtorch's layers call addmm and matmul, and not linear (docs/autocast-ops.md).
TEST(OpOverrides, DenyingCalledOpsAffectsLinearLayers) {
  torch::nn::Linear model(4, 4);
  const torch::Tensor input = torch::rand({2, 4});
  {
    const AutocastGuard<kCPU> autocast(
        {.op_overrides = install_op_overrides(OpOverrides().deny("aten::linear"))});
    EXPECT_EQ(torch::linear(input, model->weight, model->bias).scalar_type(), kFloat);
    EXPECT_EQ(model(input).scalar_type(), kBFloat16);
  }
  const AutocastGuard<kCPU> exact_layers(
      {.op_overrides =
           install_op_overrides(OpOverrides().deny("aten::addmm").deny("aten::matmul"))});
  torch::nn::Linear without_bias(torch::nn::LinearOptions(4, 4).bias(false));
  for (const torch::Tensor& x : {input, input[0], torch::rand({2, 3, 4})}) {
    EXPECT_EQ(model(x).scalar_type(), kFloat);
    EXPECT_EQ(without_bias(x).scalar_type(), kFloat);
  }
}

TEST(OpOverrides, CastsEinsumSumsAndNorms) {
  const auto overrides =
      install_op_overrides(OpOverrides().allow("einsum").deny("sum").deny("norm").deny("softmax"));
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  EXPECT_EQ(torch::einsum("ij->i", {ones_of()}).scalar_type(), kBFloat16);
  EXPECT_EQ(ones_of(kBFloat16).sum().scalar_type(), kFloat);
  EXPECT_EQ(softmax_dtype(kBFloat16), kFloat);
  EXPECT_EQ(torch::softmax(ones_of(kBFloat16), 1, kBFloat16).scalar_type(), kBFloat16);
  EXPECT_EQ(ones_of(kBFloat16).norm().scalar_type(), kFloat);
}

TEST(OpOverrides, ThrowsForUnknownOp) {
  EXPECT_THAT(message_of([] { return OpOverrides().deny("lineer"); }),
              HasSubstr("no operator \"aten::lineer\" is registered"));
  EXPECT_THAT(message_of([] { return OpOverrides().deny("aten::softmax.itn"); }),
              HasSubstr("no operator \"aten::softmax.itn\" is registered"));
  EXPECT_THAT(message_of([] { return OpOverrides().deny("aten::cat."); }),
              HasSubstr("no operator \"aten::cat.\" is registered"));
}

TEST(OpOverrides, ThrowsForInPlaceOp) {
  EXPECT_THAT(message_of([] { return OpOverrides().deny("relu_"); }), HasSubstr("writes into its"));
  EXPECT_THAT(message_of([] { return OpOverrides().deny("mm.out"); }),
              HasSubstr("writes into its"));
}

bool returns_alias(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(),
                     [](const auto& result) { return result.alias_info() != nullptr; });
}

TEST(OpOverrides, ThrowsForCastOfViewOp) {
  int views = 0;
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(op_name);
    if (!op.has_value() || op->schema().is_mutable() || !returns_alias(op->schema())) continue;
    const std::string name = c10::toString(op_name);
    ++views;
    const auto has_reason = HasSubstr("op: " + name + " may return a view of its argument");
    EXPECT_THAT(message_of([&] { return OpOverrides().deny(name); }), has_reason);
    EXPECT_THAT(message_of([&] { return OpOverrides().allow(name); }), has_reason);
    EXPECT_THAT(message_of([&] { return OpOverrides().promote(name); }), has_reason);
    EXPECT_NO_THROW(static_cast<void>(OpOverrides().ignore(name))) << "no cast: " << name;
  }
  EXPECT_GT(views, 90);
}

TEST(OpOverridesText, ThrowsForCastOfViewOp) {
  EXPECT_THAT(message_of([] { return OpOverrides::parse("allow relu\ndeny view\n"); }),
              HasSubstr("op overrides, line 2: op: aten::view may return a view"));
  EXPECT_THAT(message_of([] { return OpOverrides().deny("squeeze_"); }),
              HasSubstr("writes into its"));
  EXPECT_NO_THROW(static_cast<void>(OpOverrides().deny("clone").deny("view_copy")));
}

// dropout returns its argument in evaluation, which its schema does not declare.
TEST(OpOverrides, CopiesArgumentReturnedByCastOp) {
  const auto denying = install_op_overrides(OpOverrides().deny("dropout").deny("unsafe_chunk"));
  const auto allowing = install_op_overrides(OpOverrides().allow("dropout").allow("unsafe_chunk"));
  for (const auto& overrides : {denying, allowing}) {
    const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
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

// The cast copy of a weight is in libtorch's cache; a write through the result would change it.
TEST(OpOverrides, ResultDoesNotAliasCachedCast) {
  const auto overrides = install_op_overrides(OpOverrides().allow("dropout"));
  const auto weight = torch::ones({2, 2}, torch::requires_grad());
  const AutocastGuard<kCPU> autocast({.op_overrides = overrides});
  {
    const torch::NoGradGuard no_grad;
    torch::dropout(weight, 0.5, /*train=*/false).mul_(8);
  }
  EXPECT_EQ(torch::mm(torch::ones({1, 2}, kBFloat16), weight).sum().item<float>(), 4);
}

TEST(OpOverrides, WritesThroughViewReachBase) {
  const AutocastGuard<kCPU> autocast(
      {.op_overrides = install_op_overrides(OpOverrides().ignore("view"))});
  const auto h = torch::zeros({2, 4}, kBFloat16);
  h.view({8}).add_(1);
  EXPECT_TRUE(torch::equal(h, torch::ones({2, 4}, kBFloat16)));
}

TEST(OpOverrides, SuppressesDispatcherWarning) {
  testing::internal::CaptureStderr();
  const auto overrides = install_op_overrides(OpOverrides().deny("addmm"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(OpOverridesText, RoundTrips) {
  const auto overrides =
      OpOverrides().allow("relu").deny("linear").ignore("mm").promote("mul.Tensor");
  EXPECT_EQ(OpOverrides::parse(overrides.to_string()).entries(), overrides.entries());
  EXPECT_EQ(OpOverrides::parse("").entries(), OpOverrides().entries());
  EXPECT_EQ(OpOverrides().deny("softmax.int").allow("relu").to_string(),
            "allow aten::relu\ndeny aten::softmax.int\n");
}

TEST(OpOverridesText, ParsesVerbsAndComments) {
  const auto overrides =
      OpOverrides::parse("# mine\nallow relu tanh  # both\n\n  deny aten::linear\n");
  EXPECT_EQ(overrides.entries(),
            OpOverrides().allow("relu").allow("tanh").deny("linear").entries());
}

TEST(OpOverridesText, ErrorNamesLine) {
  EXPECT_THAT(
      message_of([] { return OpOverrides::parse("allow relu\nforbid mm\n"); }),
      HasSubstr("op overrides, line 2: unexpected \"forbid\"; use allow, deny, promote or ignore"));
  EXPECT_THAT(message_of([] { return OpOverrides::parse("allow\n"); }), HasSubstr("names no op"));
  EXPECT_THAT(message_of([] { return OpOverrides::parse("deny lineer\n"); }),
              HasSubstr("line 1: op: no operator \"aten::lineer\""));
}

TEST(OpOverridesText, ReadsFileAndReportsMissingOne) {
  const auto path = testing::TempDir() + "mezzo_policy.txt";
  std::ofstream(path) << "deny mm\nallow nosuchop\n";
  EXPECT_THAT(message_of([&] { return OpOverrides::from_file(path); }),
              HasSubstr(path + ", line 2"));
  std::ofstream(path) << "deny mm\n";
  EXPECT_EQ(OpOverrides::from_file(path).entries(), OpOverrides().deny("mm").entries());
  std::remove(path.c_str());
  EXPECT_THAT(message_of([&] { return OpOverrides::from_file(path); }),
              HasSubstr("cannot be opened"));
  EXPECT_THAT(message_of([&] { return OpOverrides::from_file(testing::TempDir()); }),
              HasSubstr("is it a directory, or the disk damaged?"));
}

torch::Tensor scaled_product(const torch::Tensor& a, const torch::Tensor& b) { return a * b * 2; }

TORCH_LIBRARY(mezzo_policy_test, library) {
  library.def("scaled_product(Tensor a, Tensor b) -> Tensor");
  library.impl("scaled_product", c10::DispatchKey::CPU, TORCH_FN(scaled_product));
}

TEST(OpOverrides, AppliesToCustomOp) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mezzo_policy_test::scaled_product", "")
                             .typed<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>();
  const auto overrides =
      install_op_overrides(OpOverrides().allow("mezzo_policy_test::scaled_product"));
  const auto denied = install_op_overrides(OpOverrides().deny("mezzo_policy_test::scaled_product"));
  EXPECT_EQ(overrides.cast_policy("mezzo_policy_test::scaled_product", torch::kCUDA),
            CastPolicy::lower_precision_fp);
  const AutocastGuard<kCPU> autocast;
  EXPECT_EQ(op.call(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kHalf);
  const AutocastGuard<kCPU> allowing({.op_overrides = overrides});
  EXPECT_EQ(op.call(ones_of(), ones_of()).scalar_type(), kBFloat16);
  const AutocastGuard<kCPU> denying({.op_overrides = denied});
  EXPECT_EQ(op.call(ones_of(kHalf), ones_of(kHalf)).scalar_type(), kFloat);
}

}  // namespace
