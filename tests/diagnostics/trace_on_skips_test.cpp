#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/trace_on_skips.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <vector>

namespace {

using mezzo::AnomalyTrace;
using testing::HasSubstr;

torch::nn::Sequential make_two_layers() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
}

TEST(TraceOnSkips, TwoInstancesTraceSameStep) {
  auto model = make_two_layers();
  mezzo::MetricsLogger logger;
  int calls = 0;
  for (int i = 0; i < 2; ++i) {
    logger.add_callback(mezzo::TraceOnSkips(
        *model,
        {.consecutive_skips = 1, .stream = nullptr, .callback = [&](const AnomalyTrace& trace) {
           ++calls;
           EXPECT_FALSE(trace.anomalies().empty());
         }}));
  }
  const mezzo::StepResult skipped(mezzo::StepResult::Values{.found_inf = true});
  logger.record(skipped, torch::ones({}));
  model->forward(torch::ones({3, 4})).mul(0).log().sum().backward();
  logger.record(skipped, torch::ones({}));
  EXPECT_EQ(calls, 2);
}

TEST(TraceOnSkips, LateMetricsDoNotEndTrace) {
  auto model = make_two_layers();
  int calls = 0;
  mezzo::TraceOnSkips trace_on_skips(
      *model,
      {.consecutive_skips = 1, .stream = nullptr, .callback = [&](const AnomalyTrace& trace) {
         ++calls;
         EXPECT_FALSE(trace.anomalies().empty());
       }});
  mezzo::StepMetrics metrics;
  metrics.skipped = true;
  trace_on_skips(metrics);
  trace_on_skips(metrics);  // of the step before the trace, delivered late
  EXPECT_EQ(calls, 0);
  model->forward(torch::ones({3, 4})).mul(0).log().sum().backward();
  trace_on_skips(metrics);
  EXPECT_EQ(calls, 1);
}

TEST(TraceOnSkips, TracesOneStepAfterConsecutiveSkips) {
  auto model = make_two_layers();
  std::ostringstream out;
  int calls = 0;
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::TraceOnSkips(
      *model, {.consecutive_skips = 2, .stream = &out, .callback = [&](const AnomalyTrace& trace) {
                 ++calls;
                 EXPECT_FALSE(trace.anomalies().empty());
               }}));
  mezzo::GradScaler scaler;
  scaler.on_skip(nullptr);
  mezzo::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<int> traced;
  for (int step = 1; step <= 8; ++step) {
    if (at::hasGlobalCallbacks()) traced.push_back(step);
    optimizer.zero_grad();
    torch::Tensor loss = model->forward(torch::ones({3, 4})).square().sum();
    if (step != 2) loss = loss / (loss - loss);
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();
    logger.record(result, loss);
  }
  EXPECT_THAT(traced, testing::ElementsAre(5)) << "skipped: 1, then 3 and 4";
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(out.str(), testing::StartsWith("Traced a step after 2 consecutive skipped steps: "
                                             "forward pass: aten::div (after 2) produced"));
  std::ostringstream rank_3_out;
  mezzo::TraceOnSkips rank_3(*model,
                             {.consecutive_skips = 1, .trace = {.rank = 3}, .stream = &rank_3_out});
  mezzo::StepMetrics metrics;
  metrics.skipped = true;
  rank_3(metrics);
  model->forward(torch::ones({3, 4})).sum().backward();
  rank_3(metrics);
  EXPECT_EQ(rank_3_out.str(), "") << "no anomaly on this rank";
  EXPECT_FALSE(at::hasGlobalCallbacks());
  EXPECT_THAT([&] { mezzo::TraceOnSkips(*model, {.consecutive_skips = 0}); },
              testing::ThrowsMessage<c10::Error>(
                  HasSubstr("consecutive_skips must be positive, but got 0")));
}

}  // namespace
