// An exception of a user's callback propagates from the call that ran it, after that call has done
// its work; later steps are bitwise identical to those of a run without exceptions.

#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/divergence_monitor.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/diagnostics/trace_on_skips.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/scaling/finite_grad_accumulator.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using mezzo::GradScaler;
using torch::Tensor;

/// A training run whose steps 2 to 4 overflow.
class CallbackRun {
 public:
  explicit CallbackRun(bool throws) : throws_(throws) { scaler.on_skip(nullptr); }

  /// Called by the callback under test; throws in one of the two compared runs.
  void in_callback() {
    ++calls;
    if (throws_) throw std::runtime_error("from a callback");
  }

  void train() {
    for (int step = 1; step <= 8; ++step) {
      const bool overflows = 2 <= step && step <= 4;
      torch::manual_seed(step);
      const Tensor batch = torch::randn({5, 4});
      model->zero_grad();
      const auto backward = [&] {
        const Tensor loss = model(batch).square().sum();
        scaler.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss).backward();
      };
      if (!completes(backward)) {
        model->zero_grad();
        throws_ = false;
        backward();
        throws_ = true;
      }
      const auto result = scaler.step(optimizer, {.max_norm = 1.0});
      completes([&] { scaler.update(); });
      completes([&] { ema.update(); });
      completes([&] { logger.record(result, torch::ones({})); });
      scales.push_back(scaler.get_scale());
    }
  }

  torch::nn::Linear model = [] {
    torch::manual_seed(0);
    return torch::nn::Linear(4, 3);
  }();
  mezzo::optim::AdamW optimizer{model->parameters(), mezzo::optim::AdamWOptions(0.1)};
  GradScaler scaler{{.init_scale = 1024, .growth_interval = 3}};
  mezzo::Ema ema{model->parameters(), {}};
  mezzo::MetricsLogger logger;
  std::vector<std::int64_t> recorded;  ///< by the last callback
  std::vector<double> scales;
  int calls = 0;   ///< of the callback under test
  int caught = 0;  ///< exceptions

 private:
  template <class Call>
  bool completes(const Call& call) {
    try {
      call();
      return true;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "from a callback");
      ++caught;
      return false;
    }
  }

  bool throws_;
};

/// An API that calls a user's function.
struct CallbackCase {
  std::string name;
  std::function<void(CallbackRun&)> install;
};
std::ostream& operator<<(std::ostream& stream, const CallbackCase& callback_case) {
  return stream << callback_case.name;
}

const CallbackCase kCallbackCases[] = {
    {"OnSkip",
     [](CallbackRun& run) {
       run.scaler.on_skip([&run](const mezzo::SkippedStep&) { run.in_callback(); });
     }},
    {"OverflowReport",
     [](CallbackRun& run) {
       run.scaler.on_skip(mezzo::OverflowReport(
           *run.model,
           {.stream = nullptr, .callback = [&run](const mezzo::Overflow&) { run.in_callback(); }}));
     }},
    {"MetricsLoggerCallback",
     [](CallbackRun& run) {
       run.logger.add_callback([&run](const mezzo::StepMetrics&) { run.in_callback(); });
     }},
    {"TraceOnSkips",
     [](CallbackRun& run) {
       run.logger.add_callback(mezzo::TraceOnSkips(
           *run.model, {.consecutive_skips = 2,
                        .stream = nullptr,
                        .callback = [&run](const mezzo::AnomalyTrace&) { run.in_callback(); }}));
     }},
    {"DivergenceMonitor",
     [](CallbackRun& run) {
       run.logger.add_callback(mezzo::DivergenceMonitor(
           *run.model, {.consecutive_skips = 2,
                        .callback = [&run](const mezzo::Finding&) { run.in_callback(); }}));
     }},
};

class ThrowingCallbacks : public testing::TestWithParam<CallbackCase> {};

TEST_P(ThrowingCallbacks, PropagateAndPreserveLaterSteps) {
  CallbackRun throwing(true), reference(false);
  for (CallbackRun* run : {&throwing, &reference}) {
    GetParam().install(*run);
    run->logger.add_callback(
        [run](const mezzo::StepMetrics& metrics) { run->recorded.push_back(metrics.step); });
    run->train();
  }
  EXPECT_GT(reference.calls, 0) << "the callback was never called";
  EXPECT_GE(throwing.calls, reference.calls);
  EXPECT_GT(throwing.caught, 0);
  EXPECT_EQ(reference.caught, 0);
  EXPECT_TRUE(torch::equal(throwing.model->weight, reference.model->weight));
  EXPECT_TRUE(torch::equal(throwing.model->bias, reference.model->bias));
  EXPECT_TRUE(torch::equal(throwing.ema.averages().front(), reference.ema.averages().front()));
  EXPECT_EQ(throwing.optimizer.applied_steps(), reference.optimizer.applied_steps());
  EXPECT_EQ(throwing.scales, reference.scales);
  EXPECT_EQ(throwing.recorded, reference.recorded) << "every callback received every step";
}

INSTANTIATE_TEST_SUITE_P(Callbacks, ThrowingCallbacks, testing::ValuesIn(kCallbackCases),
                         [](const auto& test) { return test.param.name; });

// FiniteGradAccumulator::add runs the user's backward pass.
TEST(ThrowingCallbacks, PreserveAccumulatedGradsOfMicroBatches) {
  CallbackRun run(true);
  run.model->zero_grad();
  const Tensor batch = torch::ones({2, 4});
  mezzo::FiniteGradAccumulator accumulator(run.model->parameters());
  accumulator.add([&] { run.model(batch).sum().backward(); });
  const Tensor before = run.model->weight.grad().clone();
  EXPECT_THROW(accumulator.add([&] {
    run.model(batch).square().sum().backward();
    run.in_callback();
  }),
               std::runtime_error);
  EXPECT_TRUE(torch::equal(run.model->weight.grad(), before));
  accumulator.add([&] { run.model(batch).sum().backward(); });
  EXPECT_TRUE(torch::equal(run.model->weight.grad(), before * 2));
}

// Ema calls `masters` in every update.
TEST(ThrowingCallbacks, ThrowingMastersPreserveEma) {
  bool throws = false;
  const Tensor weight = torch::ones({3});
  mezzo::Ema ema({weight}, {.decay = 0.5, .masters = [&]() -> std::vector<Tensor> {
                              if (throws) throw std::runtime_error("from a callback");
                              return {weight};
                            }});
  ema.update();
  const Tensor before = ema.averages().front().clone();
  throws = true;
  EXPECT_THROW(ema.update(), std::runtime_error);
  throws = false;
  EXPECT_TRUE(torch::equal(ema.averages().front(), before));
  EXPECT_NO_THROW(ema.update());
}

}  // namespace
