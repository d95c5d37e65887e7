// What a user's callback throws: it comes out of the call that the callback was run from, that call
// has done its work, and the steps that follow have the bits of a run in which nothing was thrown.

#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
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

/// A run whose steps 2 to 4 overflow.
class CallbackRun {
 public:
  explicit CallbackRun(bool throws) : throws_(throws) { scaler.on_skip(nullptr); }

  /// What a callback ends with. Only in one of two runs that are compared.
  void in_callback() {
    ++calls;
    if (throws_) throw std::runtime_error("of a callback");
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
      if (!survives(backward)) {
        model->zero_grad();
        throws_ = false;
        backward();
        throws_ = true;
      }
      const auto result = scaler.step(optimizer, {.max_norm = 1.0});
      survives([&] { scaler.update(); });
      survives([&] { ema.update(); });
      survives([&] { logger.record(result, torch::ones({})); });
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
  std::vector<std::int64_t> recorded;  ///< by a writer behind all others
  std::vector<double> scales;
  int calls = 0;   ///< of the callback
  int caught = 0;  ///< what it threw

 private:
  template <class Call>
  bool survives(const Call& call) {
    try {
      call();
      return true;
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "of a callback");
      ++caught;
      return false;
    }
  }

  bool throws_;
};

/// Where a user's code is called.
struct CallbackPlace {
  std::string name;
  std::function<void(CallbackRun&)> install;
};
std::ostream& operator<<(std::ostream& stream, const CallbackPlace& place) {
  return stream << place.name;
}

const CallbackPlace kCallbackPlaces[] = {
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
    {"TelemetryWriter",
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

class ThrowingCallbacks : public testing::TestWithParam<CallbackPlace> {};

TEST_P(ThrowingCallbacks, AreHeardOfAndTheNextStepsHaveTheSameBits) {
  CallbackRun thrown(true), plain(false);
  for (CallbackRun* run : {&thrown, &plain}) {
    GetParam().install(*run);
    run->logger.add_callback(
        [run](const mezzo::StepMetrics& record) { run->recorded.push_back(record.step); });
    run->train();
  }
  EXPECT_GT(plain.calls, 0) << "nothing would have been thrown";
  EXPECT_GE(thrown.calls, plain.calls);
  EXPECT_GT(thrown.caught, 0);
  EXPECT_EQ(plain.caught, 0);
  EXPECT_TRUE(torch::equal(thrown.model->weight, plain.model->weight));
  EXPECT_TRUE(torch::equal(thrown.model->bias, plain.model->bias));
  EXPECT_TRUE(torch::equal(thrown.ema.averages().front(), plain.ema.averages().front()));
  EXPECT_EQ(thrown.optimizer.applied_steps(), plain.optimizer.applied_steps());
  EXPECT_EQ(thrown.scales, plain.scales);
  EXPECT_EQ(thrown.recorded, plain.recorded) << "every writer had every record";
}

INSTANTIATE_TEST_SUITE_P(Of, ThrowingCallbacks, testing::ValuesIn(kCallbackPlaces),
                         [](const auto& place) { return place.param.name; });

// A backward pass that the user wrote, run by mezzo: what was accumulated before is what is left.
TEST(ThrowingCallbacks, OfAMicroBatchLeaveWhatWasAccumulated) {
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

// An Ema of masters asks the program for them at every update.
TEST(ThrowingCallbacks, OfAnEmasMastersCostOneUpdate) {
  bool throws = false;
  const Tensor weight = torch::ones({3});
  mezzo::Ema ema({weight}, {.decay = 0.5, .masters = [&]() -> std::vector<Tensor> {
                              if (throws) throw std::runtime_error("of a callback");
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
