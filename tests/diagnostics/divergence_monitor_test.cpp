#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/divergence_monitor.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/step_metrics.h>
#include <mezzo/diagnostics/trace_on_skips.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace {

using mezzo::DivergenceAction;
using mezzo::DivergenceMonitor;
using mezzo::DivergenceMonitorOptions;
using mezzo::Finding;
using mezzo::StepMetrics;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kInfiniteLoss = std::numeric_limits<double>::infinity();

/// Two layers with gradients of 1.
struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    register_module("body", body);
    register_module("head", head);
    for (const at::Tensor& parameter : parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
  }
  torch::nn::Linear body{4, 4}, head{4, 2};
};

DivergenceMonitorOptions collect_into(std::vector<Finding>& findings) {
  return {.callback = [&findings](const Finding& finding) { findings.push_back(finding); }};
}

StepMetrics make_step_metrics(std::int64_t step, double loss, bool skipped = false,
                              double scale = 1024) {
  return {.step = step, .loss = loss, .scale = scale, .skipped = skipped};
}

TEST(DivergenceMonitor, LimitsConsecutiveSkipReports) {
  const TwoLayers model;
  std::vector<Finding> findings;
  DivergenceMonitor monitor(model, collect_into(findings));
  for (std::int64_t i = 1; i <= 9; ++i) monitor(make_step_metrics(i, 1.0, true));
  monitor(make_step_metrics(10, 1.0));
  for (std::int64_t i = 11; i <= 19; ++i) monitor(make_step_metrics(i, 1.0, true));
  EXPECT_TRUE(findings.empty()) << "never ten consecutive skips";
  for (std::int64_t i = 20; i <= 2500; ++i) monitor(make_step_metrics(i, 1.0, true));
  ASSERT_EQ(findings.size(), 3);
  EXPECT_THAT(findings[0].location, HasSubstr("(step 20, 10 consecutive skipped steps"));
  EXPECT_THAT(findings[1].location, HasSubstr("(step 1020,"));
}

TEST(DivergenceMonitor, ReportsSkipAtLowScaleAndNonFiniteLoss) {
  const TwoLayers model;
  std::vector<Finding> findings;
  DivergenceMonitor scale_monitor(model, collect_into(findings));
  scale_monitor(make_step_metrics(1, 1.0, false, 0.5));
  EXPECT_TRUE(findings.empty()) << "that step was applied";
  scale_monitor(make_step_metrics(2, 1.0, true, 0.5));
  EXPECT_EQ(findings.size(), 1);
  DivergenceMonitor loss_monitor(model, collect_into(findings));
  loss_monitor(make_step_metrics(1, 1.0));
  loss_monitor({.step = 2, .skipped = true});
  EXPECT_EQ(findings.size(), 1) << "no loss was recorded";
  loss_monitor(make_step_metrics(3, kInfiniteLoss));
  ASSERT_EQ(findings.size(), 2);
  EXPECT_THAT(findings[1].message(),
              AllOf(HasSubstr("but all weights are finite"),
                    HasSubstr("the cause is unknown: check this batch for log(0)"),
                    HasSubstr("divide the learning rate by 10")));
}

TEST(DivergenceMonitor, ThrowsFinding) {
  const TwoLayers model;
  mezzo::MetricsLogger logger;
  logger.add_callback(
      DivergenceMonitor(model, {.action = DivergenceAction::report_and_throw, .rank = 3}));
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  logger.record(skipped, torch::tensor(1.0));
  EXPECT_THAT([&] { logger.record(skipped, torch::tensor(kInfiniteLoss)); },
              ThrowsMessage<c10::Error>(HasSubstr(
                  "Training diverges (rank 3, step 2, 2 consecutive skipped steps, loss scale 1, "
                  "loss inf): the loss is inf or NaN, but all weights are finite")));
}

TEST(DivergenceMonitor, ReportsNonfiniteBuffer) {
  TwoLayers model;
  model.register_buffer("running_mean", torch::tensor({1.0F, NAN}));
  std::vector<Finding> findings;
  DivergenceMonitor monitor(model, collect_into(findings));
  monitor(make_step_metrics(1, kInfiniteLoss));
  ASSERT_EQ(findings.size(), 1);
  EXPECT_THAT(findings[0].message(), AllOf(HasSubstr("buffer running_mean contains inf or NaN"),
                                           HasSubstr("skipping the step does not restore it")));
}

TEST(DivergenceMonitor, ReadsFloat8AndSparseParams) {
  TwoLayers model;
  model.register_parameter("low", torch::ones({3}).to(at::kFloat8_e5m2), false);
  model.register_parameter("sparse", torch::eye(3).to_sparse());
  std::vector<Finding> findings;
  DivergenceMonitor monitor(model, collect_into(findings));
  model.named_parameters()["low"].data().copy_(torch::tensor({1.0F, INFINITY, 1.0F}));
  monitor(make_step_metrics(1, kInfiniteLoss));
  EXPECT_THAT(findings.at(0).message(), HasSubstr("low contains inf or NaN"));
}

TEST(DivergenceMonitor, ThrowsAfterPendingTrace) {
  const TwoLayers model;
  for (const bool trace_is_first : {true, false}) {
    mezzo::MetricsLogger logger;
    int traces = 0;
    const mezzo::TraceOnSkips trace_on_skips(
        model, {.stream = nullptr, .callback = [&](const mezzo::AnomalyTrace&) { ++traces; }});
    const DivergenceMonitor monitor(model, {.action = DivergenceAction::report_and_throw});
    if (trace_is_first) logger.add_callback(trace_on_skips);
    logger.add_callback(monitor);
    if (!trace_is_first) logger.add_callback(trace_on_skips);
    const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
    for (int step = 1; step <= 3; ++step) logger.record(skipped, torch::tensor(kInfiniteLoss));
    torch::ones({1}, torch::requires_grad()).log().backward();
    EXPECT_THAT([&] { logger.record(skipped, torch::tensor(kInfiniteLoss)); },
                ThrowsMessage<c10::Error>(HasSubstr("Training diverges (step 1,")));
    EXPECT_EQ(traces, 1);
  }
}

TEST(DivergenceMonitor, ThrowsAtOnceWithoutPendingTrace) {
  const TwoLayers model;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::TraceOnSkips(model, {.stream = nullptr}));
  logger.add_callback(DivergenceMonitor(model, {.action = DivergenceAction::report_and_throw}));
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  const mezzo::StepResult applied(mezzo::StepResult::Values{.applied = true});
  logger.record(skipped, torch::tensor(kInfiniteLoss));
  EXPECT_THAT([&] { logger.record(applied, torch::tensor(1.0)); },
              ThrowsMessage<c10::Error>(HasSubstr("Training diverges (step 1,")));
  logger.record(applied, torch::tensor(1.0));
}

TEST(DivergenceMonitor, ReportsAgainAfterResumeFromCheckpoint) {
  const TwoLayers model;
  std::vector<Finding> findings;
  DivergenceMonitor monitor(model, collect_into(findings));
  monitor(make_step_metrics(100, kInfiniteLoss));
  monitor(make_step_metrics(101, kInfiniteLoss));
  EXPECT_EQ(findings.size(), 1);
  monitor(make_step_metrics(101, kInfiniteLoss));
  EXPECT_EQ(findings.size(), 2) << "the same step again";
}

TEST(DivergenceMonitor, PrintsFindingWithoutCallback) {
  const TwoLayers model;
  testing::internal::CaptureStderr();
  DivergenceMonitor monitor(model);
  monitor(make_step_metrics(1, 1.0));
  monitor(make_step_metrics(2, kInfiniteLoss));
  monitor(make_step_metrics(3, kInfiniteLoss));
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_THAT(printed, HasSubstr("Training diverges (step 2,"));
  EXPECT_EQ(printed.find("step 3"), std::string::npos);
  EXPECT_THAT(
      [&] { DivergenceMonitor(model, {.consecutive_skips = 0}); },
      ThrowsMessage<c10::Error>(HasSubstr("consecutive_skips must be positive, but got 0")));
}

}  // namespace
