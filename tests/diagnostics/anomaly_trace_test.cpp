#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

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

using HalfAutocast = mezzo::AutocastGuard<torch::kCPU, torch::kHalf>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Two layers with an activation between.
torch::nn::Sequential traced_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
}

TEST(AnomalyTrace, NamesTheOpTheModuleAndTheRangesOfAForwardOverflowInHalf) {
  auto model = traced_model();
  at::NoGradGuard no_grad;
  model->named_parameters()["2.weight"].fill_(3e4);
  AnomalyTrace trace(*model);
  {
    HalfAutocast autocast;
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
  EXPECT_THAT(first.message(), HasSubstr("In float32 it is finite, up to 4.44e+05"));
}

/// The gradient of the second layer's input, 300 times the scale, is too large for half.
void backward_in_half(torch::nn::Sequential& model, double scale) {
  torch::Tensor loss;
  {
    HalfAutocast autocast;
    loss = model->forward(torch::ones({3, 4})).to(torch::kFloat).sum();
  }
  (loss * scale).backward();
}

TEST(AnomalyTrace, TellsAnOverflowOfTheLossScaleFromOneOfTheModel) {
  auto model = traced_model();
  {
    at::NoGradGuard no_grad;
    model->named_parameters()["2.weight"].fill_(30);
  }
  for (const double scale : {2048.0, 1.0}) {
    const double factor =
        scale == 1 ? 2048 : 1;  // the same gradients, for which no scale is to blame
    AnomalyTrace trace(*model, {.loss_scale = [&] { return scale; }});
    backward_in_half(model, scale * factor);
    const std::vector<Anomaly> anomalies = trace.anomalies();
    ASSERT_FALSE(anomalies.empty()) << trace;
    EXPECT_TRUE(anomalies[0].frame.is_backward());
    EXPECT_EQ(anomalies[0].frame.op, "aten::mm");
    EXPECT_EQ(anomalies[0].frame.node, "AddmmBackward0");
    EXPECT_EQ(anomalies[0].frame.module, "2");
    EXPECT_THAT(anomalies[0].message(), HasSubstr("it is finite, up to 1.23e+05"));
    EXPECT_THAT(anomalies[0].message(),
                HasSubstr(scale > 1 ? "the dtype would hold it without the loss scale of 2048"
                                    : "use bfloat16, or run this op"));
  }
}

TEST(AnomalyTrace, KeepsTheFramesBeforeTheFirstAnomalyAndCallsWhatSpreadsNone) {
  auto model = traced_model();
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
  EXPECT_THAT(anomalies[0].message(),
              testing::StartsWith(
                  "rank 3, forward pass: aten::log, after 2 made float32 [] 1 -inf. "
                  "It read float32 [] 0 to 0. In float64 it is not finite either: it took the "
                  "logarithm of 0; clamp what it reads, or add an eps"));
  const std::vector<AnomalyFrame> frames = trace.frames();
  ASSERT_THAT(frames, SizeIs(2)) << trace;
  EXPECT_EQ(frames[1].op, "aten::mul");
  std::ostringstream text;
  text << trace;
  EXPECT_THAT(text.str(), HasSubstr("\nthe ops before the first, from to:\n"));
}

TEST(AnomalyTrace, NamesNumbersThatAnOpDoesNotTake) {
  const auto why = [](const auto& op) {
    AnomalyTrace trace(mezzo::TensorsByName{});
    (void)op(torch::tensor({0.0F, 1.0F}), torch::tensor({-2.0F, 2.0F}));
    const std::vector<Anomaly> anomalies = trace.anomalies();
    return anomalies.empty() ? "nothing" : anomalies[0].cause;
  };
  using torch::Tensor;
  EXPECT_THAT(why([](const Tensor& zero, const Tensor& two) { return two.div(zero); }),
              HasSubstr("it divided by 0"));
  EXPECT_THAT(why([](const Tensor& zero, const Tensor&) { return zero.rsqrt_(); }),
              HasSubstr("it divided by 0"));
  EXPECT_THAT(why([](const Tensor&, const Tensor& two) { return two.sqrt(); }),
              HasSubstr("it took the root of a negative number, -2"));
  EXPECT_THAT(why([](const Tensor&, const Tensor& two) { return two.log1p(); }),
              HasSubstr("it took log1p of -2"));
  EXPECT_THAT(why([](const Tensor&, const Tensor& two) { return two.acos(); }),
              HasSubstr("it took acos of a number beyond 1, 2"));
  EXPECT_THAT(why([](const Tensor& zero, const Tensor& two) { return two.atan2(zero); }),
              "nothing");
}

// What a composite op keeps for its backward pass is of no other source.
TEST(AnomalyTrace, BackwardPassOfCompositeOpIsNoSecondAnomaly) {
  auto model = traced_model();
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

TEST(AnomalyTrace, TakesMemoryThatAnOpHasNotWrittenYetForNoAnomaly) {
  auto model = traced_model();
  for (int repeat = 0; repeat < 20; ++repeat) {
    { const torch::Tensor garbage = torch::full({1, 8}, kInfinity, torch::kHalf); }  // to be reused
    AnomalyTrace trace(*model);
    torch::ones({3, 8}, torch::kHalf).mean(0, true);
    ASSERT_THAT(trace.anomalies(), IsEmpty()) << trace;
  }
}

TEST(AnomalyTrace, GivesToANodeWhatAutogradRunsAfterIt) {
  auto model = traced_model();
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

TEST(AnomalyTrace, TakesGradientsOfTheStepBeforeForNoAnomaly) {
  auto model = traced_model();
  model->forward(torch::full({3, 4}, kInfinity)).sum().backward();
  AnomalyTrace trace(*model);
  for (const auto& parameter : model->parameters()) parameter.grad().norm();
  model->zero_grad(/*set_to_none=*/false);
  model->forward(torch::ones({3, 4})).sum().backward();
  EXPECT_THAT(trace.anomalies(), IsEmpty()) << trace;
}

TEST(AnomalyTrace, ForgetsGradientsOfTheStepBeforeOnceTheyAreZero) {
  for (const std::string gradient :
       {"of its own", "in a bucket", "in a bucket, zeroed as a view"}) {
    SCOPED_TRACE(gradient);
    auto model = traced_model();
    torch::Tensor bias = model->named_parameters()["2.bias"];
    const torch::Tensor old = torch::full({gradient == "of its own" ? 2 : 4}, kInfinity);
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

TEST(AnomalyTrace, TakesAnInfOfTheOtherSignThanTheMasksForAnAnomaly) {
  auto model = traced_model();
  AnomalyTrace trace(*model);
  torch::ones({2}).masked_fill(torch::ones({2}, torch::kBool), -kInfinity).neg();
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::neg");
}

TEST(AnomalyTrace, ReportsATotalOfAMaskThatIsInf) {
  auto model = traced_model();
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

TEST(AnomalyTrace, ReportsWhatNoMaskAsksFor) {
  auto model = traced_model();
  const torch::Tensor infinite = torch::full({2}, kInfinity);
  const torch::Tensor masked = torch::full({2}, -kInfinity);
  const auto anomaly_of = [&](const torch::Tensor& read, const auto& op) {
    AnomalyTrace trace(*model);
    op(read);
    EXPECT_THAT(trace.anomalies(), SizeIs(1)) << trace;
    return trace.anomalies().at(0);
  };
  const auto softmax = [](const torch::Tensor& row) { row.softmax(0); };
  const auto doubled = [](const torch::Tensor& row) { row.mul(2); };
  EXPECT_FALSE(anomaly_of(masked, softmax).from_input) << "NaN, since all of the row is masked";
  EXPECT_TRUE(anomaly_of(infinite, doubled).from_input);
  model->named_parameters()["2.bias"].detach().fill_(-kInfinity);
  EXPECT_THAT(anomaly_of(model->named_parameters()["2.bias"], doubled).cause, HasSubstr("2.bias"));
}

TEST(AnomalyTrace, NamesTheCastThatAConstantDoesNotSurvive) {
  auto model = traced_model();
  AnomalyTrace trace(*model);
  torch::full({2, 2}, -1e9).to(torch::kHalf);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::to");
  EXPECT_THAT(trace.anomalies()[0].cause, HasSubstr("finite, up to 1e+09"));
}

TEST(AnomalyTrace, SeesWhatIsWrittenInPlaceAndReadsItAsItWasBefore) {
  auto model = traced_model();
  AnomalyTrace trace(*model);
  torch::Tensor values = torch::full({3}, 1e4, torch::kHalf);
  values.mul_(50);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_EQ(trace.anomalies()[0].frame.op, "aten::mul_");
  EXPECT_NEAR(trace.anomalies()[0].inputs[0].max_abs, 1e4, 10);
  EXPECT_THAT(trace.anomalies()[0].cause, HasSubstr("finite, up to 5e+05"));
  values.add_(1);
  EXPECT_THAT(trace.anomalies(), SizeIs(1)) << "it spreads";
}

TEST(AnomalyTrace, SeesAGradientThatNoOpMade) {
  auto model = traced_model();
  torch::Tensor bad = torch::ones({3, 2});
  bad[2][1] = std::numeric_limits<float>::quiet_NaN();
  AnomalyTrace trace(*model);
  model->forward(torch::ones({3, 4})).backward(bad);
  ASSERT_THAT(trace.anomalies(), SizeIs(1)) << trace;
  EXPECT_TRUE(trace.anomalies()[0].from_input);
  EXPECT_EQ(trace.anomalies()[0].frame.module, "2");
}

TEST(AnomalyTrace, WatchesABackwardPassOnAThreadOfADevice) {
  auto model = traced_model();
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

TEST(AnomalyTrace, MayEndWhileAnotherThreadRunsABackwardPassOverItsGraph) {
  auto model = traced_model();
  auto trace = std::make_unique<AnomalyTrace>(*model);
  const torch::Tensor hidden = model->forward(torch::ones({3, 4}));
  std::promise<void> begun, ended;
  hidden.register_hook([&](const torch::Tensor& gradient) {
    begun.set_value();
    ended.get_future().wait();
    return gradient * 2;  // an op that nobody hears any more
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

TEST(AnomalyTrace, LeavesNumbersGradientsAndTheGeneratorAlone) {
  auto model = traced_model();
  const auto run = [&](bool is_watched) {
    torch::manual_seed(7);
    model->zero_grad();
    std::optional<AnomalyTrace> trace;
    if (is_watched) trace.emplace(*model);
    torch::Tensor hidden = torch::dropout(model->forward(torch::ones({3, 4})), 0.5, true);
    // Draws random numbers, overflows in float, and runs again in double.
    torch::Tensor noise = torch::zeros({64});
    const torch::Tensor too_large =
        torch::rrelu_with_noise(torch::full({64}, -3e38), noise, 2, 3, /*training=*/true);
    EXPECT_EQ(is_watched ? trace->anomalies().size() : 1, 1);
    hidden.sum().backward();
    std::vector<torch::Tensor> results{hidden, too_large, noise, torch::rand({4})};
    for (const auto& parameter : model->parameters()) results.push_back(parameter.grad().clone());
    return results;
  };
  const auto plain = run(false);
  const auto watched = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(watched[i])) << i;
}

TEST(AnomalyTrace, IsNotThereBeforeAndAfter) {
  auto model = traced_model();
  ASSERT_FALSE(at::hasGlobalCallbacks());
  {
    AnomalyTrace trace(*model);
    EXPECT_TRUE(at::hasGlobalCallbacks());
  }
  EXPECT_FALSE(at::hasGlobalCallbacks());
}

TEST(AnomalyTrace, TwoOfAThreadEachSeeTheirModelAndEndInAnyOrder) {
  auto model = traced_model(), other = traced_model();
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

TEST(TraceOnSkips, TwoWakeInTheSameStep) {
  auto model = traced_model();
  mezzo::MetricsLogger logger;
  int heard = 0;
  for (int watch = 0; watch < 2; ++watch) {
    logger.add_callback(mezzo::TraceOnSkips(
        *model,
        {.consecutive_skips = 1, .stream = nullptr, .callback = [&](const AnomalyTrace& trace) {
           ++heard;
           EXPECT_FALSE(trace.anomalies().empty());
         }}));
  }
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  logger.record(skipped, torch::ones({}));
  model->forward(torch::ones({3, 4})).mul(0).log().sum().backward();
  logger.record(skipped, torch::ones({}));
  EXPECT_EQ(heard, 2);
}

TEST(TraceOnSkips, RecordThatComesLateDoesNotEndTheTrace) {
  auto model = traced_model();
  int heard = 0;
  mezzo::TraceOnSkips watch(
      *model,
      {.consecutive_skips = 1, .stream = nullptr, .callback = [&](const AnomalyTrace& trace) {
         ++heard;
         EXPECT_FALSE(trace.anomalies().empty());
       }});
  mezzo::StepMetrics record;
  record.skipped = true;
  watch(record);
  watch(record);  // of the step before the trace, whose device was slow
  EXPECT_EQ(heard, 0);
  model->forward(torch::ones({3, 4})).mul(0).log().sum().backward();
  watch(record);
  EXPECT_EQ(heard, 1);
}

TEST(TraceOnSkips, WakesAfterSkipsInARowAndTellsOfOneStep) {
  auto model = traced_model();
  std::ostringstream out;
  int heard = 0;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::TraceOnSkips(
      *model, {.consecutive_skips = 2, .stream = &out, .callback = [&](const AnomalyTrace& trace) {
                 ++heard;
                 EXPECT_FALSE(trace.anomalies().empty());
               }}));
  mezzo::GradScaler scaler;
  scaler.on_skip(nullptr);
  mezzo::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<int> watched;
  for (int step = 1; step <= 8; ++step) {
    if (at::hasGlobalCallbacks()) watched.push_back(step);
    optimizer.zero_grad();
    torch::Tensor loss = model->forward(torch::ones({3, 4})).square().sum();
    if (step != 2) loss = loss / (loss - loss);
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();
    logger.record(result, loss);
  }
  EXPECT_THAT(watched, testing::ElementsAre(5)) << "skipped: 1, then 3 and 4";
  EXPECT_EQ(heard, 1);
  EXPECT_THAT(out.str(), testing::StartsWith("Traced a step after 2 skipped in a row: forward "
                                             "pass: aten::div, after 2 made"));
  std::ostringstream other;
  mezzo::TraceOnSkips third(*model,
                            {.consecutive_skips = 1, .trace = {.rank = 3}, .stream = &other});
  mezzo::StepMetrics record;
  record.skipped = true;
  third(record);
  model->forward(torch::ones({3, 4})).sum().backward();
  third(record);
  EXPECT_EQ(other.str(), "") << "a rank that found nothing";
  EXPECT_FALSE(at::hasGlobalCallbacks());
  EXPECT_THAT([&] { mezzo::TraceOnSkips(*model, {.consecutive_skips = 0}); },
              testing::ThrowsMessage<c10::Error>(HasSubstr("consecutive_skips is 0")));
}

}  // namespace
