#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/named_parameters.h>

#include <ATen/ThreadLocalState.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using mezzo::Anomaly;
using mezzo::AnomalyFrame;
using mezzo::AnomalyTrace;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

using Float16Autocast = mezzo::AutocastGuard<torch::kCPU, torch::kHalf>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Two linear layers with an activation.
torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
}

TEST(AnomalyTrace, ForwardOverflowReportsOpAndModule) {
  auto model = make_model();
  at::NoGradGuard no_grad;
  model->named_parameters()["2.weight"].fill_(3e4);
  AnomalyTrace trace(*model);
  {
    Float16Autocast autocast;
    const auto& last = *model[2]->as<torch::nn::Linear>();
    torch::linear(model[0]->as<torch::nn::Linear>()->forward(torch::full({3, 4}, 10.0F)),
                  last.weight, last.bias);
  }
  const std::vector<Anomaly> anomalies = trace.anomalies();
  ASSERT_THAT(anomalies, SizeIs(1)) << trace;
  const Anomaly& first = anomalies[0];
  EXPECT_EQ(first.frame.op, "aten::linear");
  EXPECT_EQ(first.frame.module, "2");
  EXPECT_TRUE(first.frame.reads_parameter);
  EXPECT_FALSE(first.frame.is_backward());
  EXPECT_EQ(first.frame.outputs[0].dtype, torch::kHalf);
  EXPECT_GT(first.frame.outputs[0].infs, 0);
  ASSERT_THAT(first.inputs, SizeIs(3));
  EXPECT_EQ(first.inputs[1].name, "2.weight");
  EXPECT_EQ(first.inputs[1].max_abs, 3e4F);
  EXPECT_THAT(first.message(), HasSubstr("In float32 the result is finite, up to 4.44e+05"));
}

/// The gradient of the second layer's input, 300 times the scale, overflows float16.
void float16_backward(torch::nn::Sequential& model, double scale) {
  torch::Tensor loss;
  {
    Float16Autocast autocast;
    loss = model->forward(torch::ones({3, 4})).to(torch::kFloat).sum();
  }
  (loss * scale).backward();
}

TEST(AnomalyTrace, DistinguishesLossScaleOverflow) {
  auto model = make_model();
  {
    at::NoGradGuard no_grad;
    model->named_parameters()["2.weight"].fill_(30);
  }
  for (const double scale : {2048.0, 1.0}) {
    const double factor =
        scale == 1 ? 2048 : 1;  // the same gradients, which do not come from the loss scale
    AnomalyTrace trace(*model, {.loss_scale = [&] { return scale; }});
    float16_backward(model, scale * factor);
    const std::vector<Anomaly> anomalies = trace.anomalies();
    ASSERT_FALSE(anomalies.empty()) << trace;
    EXPECT_TRUE(anomalies[0].frame.is_backward());
    EXPECT_EQ(anomalies[0].frame.op, "aten::mm");
    EXPECT_EQ(anomalies[0].frame.node, "AddmmBackward0");
    EXPECT_EQ(anomalies[0].frame.module, "2");
    EXPECT_THAT(anomalies[0].message(), HasSubstr("the result is finite, up to 1.23e+05"));
    EXPECT_THAT(anomalies[0].message(),
                HasSubstr(scale > 1 ? "fits float16 without the loss scale of 2048"
                                    : "use bfloat16, or run this op"));
  }
}

TEST(AnomalyTrace, KeepsFramesBeforeFirstAnomaly) {
  auto model = make_model();
  AnomalyTrace trace(*model, {.max_frames = 2, .rank = 3});
  torch::Tensor loss = model->forward(torch::ones({3, 4})).square().sum();
  loss = (loss * 0).log() + loss;
  loss.backward();
  const std::vector<Anomaly> anomalies = trace.anomalies();
  ASSERT_THAT(anomalies, SizeIs(2)) << trace;
  EXPECT_EQ(anomalies[1].frame.node, "LogBackward0") << "1 / 0";
  EXPECT_EQ(anomalies[0].frame.op, "aten::log");
  EXPECT_EQ(anomalies[0].frame.module, "2");
  EXPECT_FALSE(anomalies[0].frame.reads_parameter);
  EXPECT_EQ(anomalies[0].frame.outputs[0].negative_infs, 1);
  EXPECT_THAT(
      anomalies[0].message(),
      testing::StartsWith(
          "rank 3, forward pass: aten::log (after 2) produced float32 [], 1 -inf. "
          "Inputs: float32 [] in [0, 0]. In float64 the result is not finite either: log of 0; "
          "clamp the input or add an eps"));
  const std::vector<AnomalyFrame> frames = trace.frames();
  ASSERT_THAT(frames, SizeIs(2)) << trace;
  EXPECT_EQ(frames[1].op, "aten::mul");
  std::ostringstream text;
  text << trace;
  EXPECT_THAT(text.str(), HasSubstr("\nops before the first anomaly:\n"));
}

TEST(AnomalyTrace, ReportsDomainErrors) {
  const auto get_cause = [](const auto& op) {
    AnomalyTrace trace(mezzo::TensorsByName{});
    (void)op(torch::tensor({0.0F, 1.0F}), torch::tensor({-2.0F, 2.0F}));
    const std::vector<Anomaly> anomalies = trace.anomalies();
    return anomalies.empty() ? "nothing" : anomalies[0].cause;
  };
  using torch::Tensor;
  EXPECT_THAT(get_cause([](const Tensor& zero, const Tensor& two) { return two.div(zero); }),
              HasSubstr("division by 0"));
  EXPECT_THAT(get_cause([](const Tensor& zero, const Tensor&) { return zero.rsqrt_(); }),
              HasSubstr("division by 0"));
  EXPECT_THAT(get_cause([](const Tensor&, const Tensor& two) { return two.sqrt(); }),
              HasSubstr("square root of a negative number (-2)"));
  EXPECT_THAT(get_cause([](const Tensor&, const Tensor& two) { return two.log1p(); }),
              HasSubstr("log1p of -2"));
  EXPECT_THAT(get_cause([](const Tensor&, const Tensor& two) { return two.acos(); }),
              HasSubstr("acos of a number outside [-1, 1] (2 in magnitude)"));
  EXPECT_THAT(get_cause([](const Tensor& zero, const Tensor& two) { return two.atan2(zero); }),
              "nothing");
}

// What a composite op saves for its backward pass carries the same anomaly.
TEST(AnomalyTrace, ReportsCompositeOpOnce) {
  auto model = make_model();
  {
    at::NoGradGuard no_grad;
    model->named_parameters()["2.weight"].fill_(3e38F);
  }
  AnomalyTrace trace(*model);
  torch::nn::functional::cross_entropy(model->forward(torch::full({3, 4}, 100.0F)),
                                       torch::zeros({3}, torch::kLong))
      .backward();
  const std::vector<Anomaly> anomalies = trace.anomalies();
  ASSERT_THAT(anomalies, SizeIs(1)) << trace;
  EXPECT_EQ(anomalies[0].frame.op, "aten::addmm");
}

TEST(AnomalyTrace, IgnoresUninitializedOutputs) {
  auto model = make_model();
  for (int repeat = 0; repeat < 20; ++repeat) {
    { const torch::Tensor garbage = torch::full({1, 8}, kInfinity, torch::kHalf); }  // to be reused
    AnomalyTrace trace(*model);
    torch::ones({3, 8}, torch::kHalf).mean(0, true);
    ASSERT_THAT(trace.anomalies(), IsEmpty()) << trace;
  }
}

TEST(AnomalyTrace, AttributesGradSumsToLastNode) {
  auto model = make_model();
  AnomalyTrace trace(*model);
  model->forward(torch::ones({3, 4})).sum().backward();
  int sums = 0;
  for (const AnomalyFrame& frame : trace.frames()) {
    if (frame.op != "aten::sum" || frame.outputs[0].sizes.size() != 2) continue;
    ++sums;  // of a bias's gradient, to its shape
    EXPECT_EQ(frame.node, "AddmmBackward0");
  }
  EXPECT_GT(sums, 0) << trace;
}

TEST(AnomalyTrace, IgnoresGradsOfPreviousStep) {
  auto model = make_model();
  model->forward(torch::full({3, 4}, kInfinity)).sum().backward();
  AnomalyTrace trace(*model);
  for (const auto& parameter : model->parameters()) parameter.grad().norm();
  model->zero_grad(/*set_to_none=*/false);
  model->forward(torch::ones({3, 4})).sum().backward();
  EXPECT_THAT(trace.anomalies(), IsEmpty()) << trace;
}

TEST(AnomalyTrace, ClearsTaintOfZeroedGrads) {
  for (const std::string gradient : {"separate", "in a bucket", "in a bucket, zeroed as a view"}) {
    SCOPED_TRACE(gradient);
    auto model = make_model();
    torch::Tensor bias = model->named_parameters()["2.bias"];
    const torch::Tensor old = torch::full({gradient == "separate" ? 2 : 4}, kInfinity);
    bias.mutable_grad() = old.narrow(0, 0, 2);
    AnomalyTrace trace(*model);
    (gradient.ends_with("view") ? bias.grad() : old).zero_();
    (bias * 2e38).sum().backward();
    EXPECT_THAT(trace.anomalies(), IsEmpty()) << trace;
    (bias * 2e38).sum().backward();
    ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
    EXPECT_THAT(trace.anomalies()[0].frame.op, testing::StartsWith("aten::add"));
    EXPECT_THAT(trace.anomalies()[0].frame.node, HasSubstr("AccumulateGrad"));
  }
}

TEST(AnomalyTrace, ReportsInfOppositeToMask) {
  auto model = make_model();
  AnomalyTrace trace(*model);
  torch::ones({2}).masked_fill(torch::ones({2}, torch::kBool), -kInfinity).neg();
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::neg");
}

TEST(AnomalyTrace, ReportsNonfiniteReductionOfMask) {
  auto model = make_model();
  const auto expect_op = [&](const std::string& op, const auto& total) {
    AnomalyTrace trace(*model);
    total(torch::ones({3}).masked_fill(torch::arange(3) == 1, -kInfinity));
    ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
    EXPECT_EQ(trace.anomalies()[0].frame.op, op);
  };
  expect_op("aten::sum", [](const torch::Tensor& masked) { return masked.sum(); });
  expect_op("aten::mean", [](const torch::Tensor& masked) { return masked.mean(); });
  expect_op("aten::min", [](const torch::Tensor& masked) { return masked.min(); });
}

TEST(AnomalyTrace, ReportsInfNotExplainedByMask) {
  auto model = make_model();
  const torch::Tensor infinite = torch::full({2}, kInfinity);
  const torch::Tensor masked = torch::full({2}, -kInfinity);
  const auto get_anomaly = [&](const torch::Tensor& read, const auto& op) {
    AnomalyTrace trace(*model);
    op(read);
    EXPECT_THAT(trace.anomalies(), SizeIs(1)) << trace;
    return trace.anomalies().at(0);
  };
  const auto softmax = [](const torch::Tensor& row) { row.softmax(0); };
  const auto doubled = [](const torch::Tensor& row) { row.mul(2); };
  EXPECT_FALSE(get_anomaly(masked, softmax).from_input) << "NaN, since all of the row is masked";
  EXPECT_TRUE(get_anomaly(infinite, doubled).from_input);
  model->named_parameters()["2.bias"].detach().fill_(-kInfinity);
  EXPECT_THAT(get_anomaly(model->named_parameters()["2.bias"], doubled).cause, HasSubstr("2.bias"));
}

TEST(AnomalyTrace, ReportsOverflowingCast) {
  auto model = make_model();
  AnomalyTrace trace(*model);
  torch::full({2, 2}, -1e9).to(torch::kHalf);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::to");
  EXPECT_THAT(trace.anomalies()[0].cause, HasSubstr("finite, up to 1e+09"));
}

TEST(AnomalyTrace, ReportsInPlaceOpWithOriginalInput) {
  auto model = make_model();
  AnomalyTrace trace(*model);
  torch::Tensor values = torch::full({3}, 1e4, torch::kHalf);
  values.mul_(50);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::mul_");
  EXPECT_NEAR(trace.anomalies()[0].inputs[0].max_abs, 1e4, 10);
  EXPECT_THAT(trace.anomalies()[0].cause, HasSubstr("finite, up to 5e+05"));
  values.add_(1);
  EXPECT_THAT(trace.anomalies(), SizeIs(1)) << "propagated";
}

TEST(AnomalyTrace, ReportsNonfiniteGradArgument) {
  auto model = make_model();
  torch::Tensor bad = torch::ones({3, 2});
  bad[2][1] = std::numeric_limits<float>::quiet_NaN();
  AnomalyTrace trace(*model);
  model->forward(torch::ones({3, 4})).backward(bad);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_TRUE(trace.anomalies()[0].from_input);
  EXPECT_EQ(trace.anomalies()[0].frame.module, "2");
}

TEST(AnomalyTrace, TracesBackwardOnAnotherThread) {
  auto model = make_model();
  AnomalyTrace trace(*model);
  const torch::Tensor loss = model->forward(torch::ones({3, 4})).sum();
  const torch::Tensor bad = (loss - loss.detach()).sqrt();
  EXPECT_THAT(trace.anomalies(), IsEmpty());
  EXPECT_FALSE(trace.has_run_backward());
  const at::ThreadLocalState state;  // as autograd hands it to its threads
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    bad.backward();
  }).join();
  EXPECT_TRUE(trace.has_run_backward());
  ASSERT_FALSE(trace.anomalies().empty()) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.node, "SqrtBackward0");
}

TEST(AnomalyTrace, MayEndDuringOtherThreadsBackward) {
  auto model = make_model();
  auto trace = std::make_unique<AnomalyTrace>(*model);
  const torch::Tensor hidden = model->forward(torch::ones({3, 4}));
  std::promise<void> begun, ended;
  hidden.register_hook([&](const torch::Tensor& gradient) {
    begun.set_value();
    ended.get_future().wait();
    return gradient * 2;  // an op without observers
  });
  const torch::Tensor loss = hidden.square().sum();
  const at::ThreadLocalState state;
  std::thread other([&] {
    const at::ThreadLocalStateGuard guard(state);
    loss.backward();
  });
  begun.get_future().wait();
  EXPECT_TRUE(trace->has_run_backward());
  trace.reset();
  ended.set_value();
  other.join();
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

TEST(AnomalyTrace, PreservesResultsGradsAndRng) {
  auto model = make_model();
  const auto run = [&](bool is_traced) {
    torch::manual_seed(7);
    model->zero_grad();
    std::optional<AnomalyTrace> trace;
    if (is_traced) trace.emplace(*model);
    torch::Tensor hidden = torch::dropout(model->forward(torch::ones({3, 4})), 0.5, true);
    // Draws random numbers, overflows in float32, and is rerun in float64.
    torch::Tensor noise = torch::zeros({64});
    const torch::Tensor too_large =
        torch::rrelu_with_noise(torch::full({64}, -3e38), noise, 2, 3, /*training=*/true);
    EXPECT_EQ(is_traced ? trace->anomalies().size() : 1, 1);
    hidden.sum().backward();
    std::vector<torch::Tensor> results{hidden, too_large, noise, torch::rand({4})};
    for (const auto& parameter : model->parameters()) results.push_back(parameter.grad().clone());
    return results;
  };
  const auto untraced = run(false);
  const auto traced = run(true);
  for (std::size_t i = 0; i < untraced.size(); ++i) {
    EXPECT_TRUE(untraced[i].equal(traced[i])) << i;
  }
}

TEST(AnomalyTrace, InstallsCallbackOnlyWhileAlive) {
  auto model = make_model();
  ASSERT_FALSE(at::hasGlobalCallbacks());
  {
    AnomalyTrace trace(*model);
    EXPECT_TRUE(at::hasGlobalCallbacks());
  }
  EXPECT_FALSE(at::hasGlobalCallbacks());
}

TEST(AnomalyTrace, TwoTracesEndInAnyOrder) {
  auto model = make_model(), other = make_model();
  auto first = std::make_unique<AnomalyTrace>(*model);
  auto second = std::make_unique<AnomalyTrace>(mezzo::named_float_parameters({{"other", *other}}));
  other->forward(torch::ones({3, 4})).mul(0).log().sum().backward();
  for (const AnomalyTrace* trace : {first.get(), second.get()}) {
    ASSERT_FALSE(trace->anomalies().empty());
    EXPECT_EQ(trace->anomalies()[0].frame.op, "aten::log");
    EXPECT_TRUE(trace->has_run_backward());
  }
  EXPECT_EQ(first->anomalies()[0].frame.module, "");
  EXPECT_EQ(second->anomalies()[0].frame.module, "other.2");
  first.reset();
  EXPECT_TRUE(at::hasGlobalCallbacks());
  torch::zeros({2}).div(0);
  EXPECT_GT(second->anomalies().size(), 1);
  second.reset();
  EXPECT_FALSE(at::hasGlobalCallbacks());
}

}  // namespace
