#include <mezzo/diagnostics/csv_writer.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/warning_recorder.h"

namespace {

using mezzo::MetricsLogger;
using mezzo::StepMetrics;
using mezzo::StepResult;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// A step whose result is still on the device.
struct PendingStep final : mezzo::StepFuture {
  bool ready() const noexcept override { return is_ready; }
  const StepResult::Values& values() override {
    if (!is_ready) ++syncs;
    return result;
  }
  bool is_ready = false;
  int syncs = 0;
  StepResult::Values result{.applied = true, .scale = 8, .grad_norm = 2.0};
};

auto append_to(std::vector<StepMetrics>& steps) {
  return [&steps](const StepMetrics& metrics) { steps.push_back(metrics); };
}

TEST(MetricsLogger, DeliversReadyStepsInOrder) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  const auto pending = std::make_shared<PendingStep>();
  logger.record(StepResult(pending), torch::tensor(1.5));
  logger.record(StepResult(StepResult::Values{.applied = true}), torch::tensor(1.25));
  EXPECT_TRUE(steps.empty()) << "in order, behind the pending step";
  EXPECT_EQ(pending->syncs, 0);
  pending->is_ready = true;
  logger.record(StepResult(StepResult::Values{.found_inf = true}), at::Tensor());
  ASSERT_EQ(steps.size(), 3);
  EXPECT_EQ(pending->syncs, 0) << "no sync";
  EXPECT_EQ(steps[0].step, 1);
  EXPECT_EQ(steps[0].loss, 1.5);
  EXPECT_EQ(steps[0].scale, 8);
  EXPECT_EQ(steps[1].loss, 1.25);
  EXPECT_FALSE(steps[1].skipped);
  EXPECT_TRUE(steps[2].skipped);
  EXPECT_EQ(steps[2].loss, std::nullopt);
}

TEST(MetricsLogger, FlushAndDestructorDeliverPendingSteps) {
  std::vector<StepMetrics> steps;
  const auto pending = std::make_shared<PendingStep>();
  {
    MetricsLogger logger(/*first_step=*/100);
    logger.add_callback(append_to(steps));
    logger.record(StepResult(pending), torch::tensor(1.5));
    logger.flush();
    EXPECT_EQ(steps.size(), 1);
    EXPECT_GT(pending->syncs, 0);
    logger.record(StepResult(pending), torch::tensor(1.5));
  }
  ASSERT_EQ(steps.size(), 2);
  EXPECT_EQ(steps[1].step, 101);
}

TEST(MetricsLogger, SyncsForOldestOf1025Steps) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  const auto pending = std::make_shared<PendingStep>();
  logger.record(StepResult(pending), torch::tensor(1.0));
  const StepResult applied(StepResult::Values{.applied = true});
  for (int step = 2; step <= 1024; ++step) logger.record(applied, torch::tensor(2.0));
  EXPECT_TRUE(steps.empty());
  EXPECT_EQ(pending->syncs, 0);
  logger.record(applied, torch::tensor(2.0));
  EXPECT_GT(pending->syncs, 0);
  ASSERT_EQ(steps.size(), 1025) << "with the steps behind it";
  EXPECT_EQ(steps[0].step, 1);
}

TEST(MetricsLogger, RecordsGradScalerSteps) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  torch::nn::Linear model(4, 4);
  mezzo::GradScaler scaler(mezzo::GradScalerOptions::dynamic({.init_scale = 16}));
  scaler.on_skip(nullptr);
  mezzo::optim::AdamW optimizer(model->parameters());
  for (const float factor : {1.0F, std::numeric_limits<float>::infinity(), 1.0F}) {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(torch::ones({2, 4})).square().sum();
    scaler.scale(loss * factor).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 0.5});
    scaler.update();
    logger.record(result, loss, {.tokens = 10});
  }
  logger.flush();
  ASSERT_EQ(steps.size(), 3);
  EXPECT_EQ(steps[0].scale, 16);
  EXPECT_EQ(steps[2].scale, 8);
  EXPECT_TRUE(steps[1].skipped);
  EXPECT_GT(steps[0].grad_norm.value(), 0.5) << "before clipping";
  EXPECT_EQ(steps[0].tokens_per_second, std::nullopt) << "no previous step";
  EXPECT_GT(steps[1].tokens_per_second.value(), 0);
  EXPECT_GT(steps[1].memory_bytes.value(), 1 << 20);
  EXPECT_GT(steps[0].wall_time, 1.7e9);
}

TEST(MetricsLogger, ThrowsForLossWithSeveralElements) {
  MetricsLogger logger;
  const StepResult applied(StepResult::Values{.applied = true});
  EXPECT_THAT(
      [&] { logger.record(applied, torch::ones({2})); },
      ThrowsMessage<c10::Error>(HasSubstr("expected a loss with one element, but got 2 elements")));
  EXPECT_THAT(
      [] { mezzo::CsvWriter("/no/such/directory/run.csv"); },
      ThrowsMessage<c10::Error>(HasSubstr("Cannot open /no/such/directory/run.csv for writing")));
  std::vector<StepMetrics> steps;
  logger.add_callback(append_to(steps));
  logger.record(applied, torch::ones({1}));
  ASSERT_EQ(steps.size(), 1);
  EXPECT_EQ(steps[0].step, 1) << "the rejected loss was not counted";
}

/// A step whose result throws.
struct LostStep final : mezzo::StepFuture {
  bool ready() const noexcept override { return true; }
  const StepResult::Values& values() override { throw std::runtime_error("device lost"); }
};

TEST(MetricsLogger, ContinuesAfterThrowingResult) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  EXPECT_THAT([&] { logger.record(StepResult(std::make_shared<LostStep>()), at::Tensor()); },
              ThrowsMessage<std::runtime_error>("device lost"));
  logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  ASSERT_EQ(steps.size(), 1);
  EXPECT_EQ(steps[0].step, 2);
}

TEST(MetricsLogger, RunsAllCallbacksIfOneThrows) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback([](const StepMetrics&) { throw std::runtime_error("disk full"); });
  logger.add_callback(append_to(steps));
  logger.add_callback([](const StepMetrics&) { throw std::runtime_error("not the first"); });
  const auto record = [&] {
    logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  };
  EXPECT_THAT(record, ThrowsMessage<std::runtime_error>("disk full"));
  EXPECT_THAT(record, ThrowsMessage<std::runtime_error>("disk full"));
  ASSERT_EQ(steps.size(), 2);
  EXPECT_EQ(steps[1].step, 2);
}

TEST(MetricsLogger, CallbackMayAddCallback) {
  MetricsLogger logger;
  std::vector<StepMetrics> steps;
  logger.add_callback([&, name = std::string(100, 'x')](const StepMetrics& metrics) {
    for (int i = 0; metrics.step == 1 && i < 50; ++i) logger.add_callback(append_to(steps));
    EXPECT_EQ(name.size(), 100U);
  });
  for (int step = 1; step <= 2; ++step) {
    logger.record(StepResult(StepResult::Values{.applied = true}), at::Tensor());
  }
  EXPECT_EQ(steps.size(), 50U) << "from the second step on";
}

TEST(MetricsLogger, DestructorWarnsForNonStdException) {
  test_support::WarningRecorder warnings;
  {
    MetricsLogger logger;
    logger.add_callback([](const StepMetrics&) { throw 7; });
    logger.record(StepResult(std::make_shared<PendingStep>()), at::Tensor());
  }
  EXPECT_THAT(warnings.texts, testing::ElementsAre(HasSubstr("failed to flush the last steps")));
}

TEST(MetricsLogger, PreservesFloat64Loss) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  logger.record(StepResult(StepResult::Values{.applied = true}),
                torch::tensor(1e39, torch::kDouble));
  EXPECT_EQ(steps.at(0).loss, 1e39);
}

TEST(MetricsLogger, RestartClockExcludesElapsedTime) {
  std::vector<StepMetrics> steps;
  MetricsLogger logger;
  logger.add_callback(append_to(steps));
  const StepResult applied(StepResult::Values{.applied = true, .scale = 1});
  logger.restart_clock();
  logger.record(applied, torch::tensor(1.0), {.tokens = 10});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  logger.restart_clock();
  logger.record(applied, torch::tensor(1.0), {.tokens = 10, .learning_rate = 0.5});
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_TRUE(steps[0].tokens_per_second) << "timed since restart_clock()";
  EXPECT_LT(steps[1].step_seconds, 0.2);
  EXPECT_EQ(steps[1].learning_rate, 0.5);
}

}  // namespace
