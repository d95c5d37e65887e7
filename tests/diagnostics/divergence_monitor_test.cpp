#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
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

/// Two layers with gradients of 1; tests break one of them.
struct Patient : torch::nn::Module {
  Patient() {
    register_module("body", body);
    register_module("head", head);
    for (const at::Tensor& parameter : parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
  }
  torch::nn::Linear body{4, 4}, head{4, 2};
};

DivergenceMonitorOptions told_to(std::vector<Finding>& heard) {
  return {.callback = [&heard](const Finding& finding) { heard.push_back(finding); }};
}

StepMetrics step_record(std::int64_t number, double loss, bool skipped = false,
                        double scale = 1024) {
  return {.step = number, .loss = loss, .scale = scale, .skipped = skipped};
}

TEST(DivergenceMonitor, HearsSkipsInARowOnceInAThousandSteps) {
  const Patient patient;
  std::vector<Finding> heard;
  DivergenceMonitor watch(patient, told_to(heard));
  for (std::int64_t i = 1; i <= 9; ++i) watch(step_record(i, 1.0, true));
  watch(step_record(10, 1.0));
  for (std::int64_t i = 11; i <= 19; ++i) watch(step_record(i, 1.0, true));
  EXPECT_TRUE(heard.empty()) << "never ten in a row";
  for (std::int64_t i = 20; i <= 2500; ++i) watch(step_record(i, 1.0, true));
  ASSERT_EQ(heard.size(), 3);
  EXPECT_THAT(heard[0].where, HasSubstr("(step 20; 10 skipped in a row"));
  EXPECT_THAT(heard[1].where, HasSubstr("(step 1020;"));
}

TEST(DivergenceMonitor, HearsAScaleAtItsFloorAndALossThatIsNotFinite) {
  const Patient patient;
  std::vector<Finding> heard;
  DivergenceMonitor at_floor(patient, told_to(heard));
  at_floor(step_record(1, 1.0, false, 0.5));
  EXPECT_TRUE(heard.empty()) << "that step ran";
  at_floor(step_record(2, 1.0, true, 0.5));
  EXPECT_EQ(heard.size(), 1);
  DivergenceMonitor of_loss(patient, told_to(heard));
  of_loss(step_record(1, 1.0));
  of_loss({.step = 2, .skipped = true});
  EXPECT_EQ(heard.size(), 1) << "no loss was recorded";
  of_loss(step_record(3, kInfiniteLoss));
  ASSERT_EQ(heard.size(), 2);
  EXPECT_THAT(heard[1].message(), AllOf(HasSubstr("computed from finite weights"),
                                        HasSubstr("why is not known. Look for a log"),
                                        HasSubstr("divide the learning rate by 10")));
}

TEST(DivergenceMonitor, StopsTheRunWithTheDiagnosis) {
  const Patient patient;
  mezzo::MetricsLogger logger;
  logger.add_callback(
      DivergenceMonitor(patient, {.action = DivergenceAction::report_and_throw, .rank = 3}));
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  logger.record(skipped, torch::tensor(1.0));
  EXPECT_THAT([&] { logger.record(skipped, torch::tensor(kInfiniteLoss)); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("Training diverges (rank 3, step 2; 2 skipped in a row; loss scale 1; "
                            "loss inf): the loss is inf or NaN, computed from finite weights")));
}

TEST(DivergenceMonitor, NamesABufferThatIsNotFinite) {
  Patient patient;
  patient.register_buffer("running_mean", torch::tensor({1.0F, NAN}));
  std::vector<Finding> heard;
  DivergenceMonitor watch(patient, told_to(heard));
  watch(step_record(1, kInfiniteLoss));
  ASSERT_EQ(heard.size(), 1);
  EXPECT_THAT(heard[0].message(), AllOf(HasSubstr("the buffer running_mean holds inf or NaN"),
                                        HasSubstr("no later step repairs it")));
}

TEST(DivergenceMonitor, ReadsFloat8AndSparseParameters) {
  Patient patient;
  patient.register_parameter("low", torch::ones({3}).to(at::kFloat8_e5m2), false);
  patient.register_parameter("sparse", torch::eye(3).to_sparse());
  std::vector<Finding> heard;
  DivergenceMonitor watch(patient, told_to(heard));
  patient.named_parameters()["low"].data().copy_(torch::tensor({1.0F, INFINITY, 1.0F}));
  watch(step_record(1, kInfiniteLoss));
  EXPECT_THAT(heard.at(0).message(), HasSubstr("low holds inf or NaN"));
}

TEST(DivergenceMonitor, StopWaitsForAnAnomalyWatch) {
  const Patient patient;
  for (const bool watch_is_first : {true, false}) {
    mezzo::MetricsLogger logger;
    int traces = 0;
    const mezzo::TraceOnSkips anomalies(
        patient, {.stream = nullptr, .callback = [&](const mezzo::AnomalyTrace&) { ++traces; }});
    const DivergenceMonitor divergence(patient, {.action = DivergenceAction::report_and_throw});
    if (watch_is_first) logger.add_callback(anomalies);
    logger.add_callback(divergence);
    if (!watch_is_first) logger.add_callback(anomalies);
    const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
    for (int step = 1; step <= 3; ++step) logger.record(skipped, torch::tensor(kInfiniteLoss));
    torch::ones({1}, torch::requires_grad()).log().backward();
    EXPECT_THAT([&] { logger.record(skipped, torch::tensor(kInfiniteLoss)); },
                ThrowsMessage<c10::Error>(HasSubstr("Training diverges (step 1;")));
    EXPECT_EQ(traces, 1);
  }
}

TEST(DivergenceMonitor, StopDoesNotWaitWhereNoStepWillBeTraced) {
  const Patient patient;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::TraceOnSkips(patient, {.stream = nullptr}));
  logger.add_callback(DivergenceMonitor(patient, {.action = DivergenceAction::report_and_throw}));
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  const mezzo::StepResult applied(mezzo::StepResult::Values{.applied = true});
  logger.record(skipped, torch::tensor(kInfiniteLoss));
  EXPECT_THAT([&] { logger.record(applied, torch::tensor(1.0)); },
              ThrowsMessage<c10::Error>(HasSubstr("Training diverges (step 1;")));
  logger.record(applied, torch::tensor(1.0));
}

TEST(DivergenceMonitor, WatchesARunThatGoesOnFromACheckpointAsANewOne) {
  const Patient patient;
  std::vector<Finding> heard;
  DivergenceMonitor watch(patient, told_to(heard));
  watch(step_record(100, kInfiniteLoss));
  watch(step_record(101, kInfiniteLoss));
  EXPECT_EQ(heard.size(), 1);
  watch(step_record(101, kInfiniteLoss));
  EXPECT_EQ(heard.size(), 2) << "the same step again";
}

TEST(DivergenceMonitor, WritesTheDiagnosisWhereNobodyListens) {
  const Patient patient;
  testing::internal::CaptureStderr();
  DivergenceMonitor watch(patient);
  watch(step_record(1, 1.0));
  watch(step_record(2, kInfiniteLoss));
  watch(step_record(3, kInfiniteLoss));
  const std::string written = testing::internal::GetCapturedStderr();
  EXPECT_THAT(written, HasSubstr("Training diverges (step 2;"));
  EXPECT_EQ(written.find("step 3"), std::string::npos);
  EXPECT_THAT(
      [&] { DivergenceMonitor(patient, {.consecutive_skips = 0}); },
      ThrowsMessage<c10::Error>(HasSubstr("consecutive_skips is 0; it should be positive")));
}

}  // namespace
