// Ends while everything that trains has static lifetime, at namespace scope and in functions:
//
//   statics_at_exit return       by the end of main
//   statics_at_exit on_skip      by exit() in the callback of a skipped step
//   statics_at_exit hook         by exit() in a hook of the backward pass
//   statics_at_exit closure      by exit() in a step's closure
//   statics_at_exit thread       by the end of main, with a thread inside an autocast region for good
//
// A crash, or what a sanitizer finds, shows in the exit status.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/diagnostics/anomaly_trace.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/lr_schedule.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <limits>
#include <string>
#include <thread>

namespace {

using torch::Tensor;

/// All that a program may keep, in the order in which it needs each other.
struct Trainer {
  double step(bool overflows = false) {
    optimizer.zero_grad();
    const Tensor loss = model(torch::ones({2, 8})).to(torch::kFloat).square().sum();
    scaler.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ema.update();
    logger.record(result, loss);
    return loss.item<double>();
  }

  torch::nn::Linear layer{8, 4};
  mezzo::OpOverrides policy = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::bmm"));
  mezzo::AutocastModule<torch::nn::Linear> model{
      layer, {.device_type = torch::kCPU, .op_overrides = policy}};
  mezzo::GradBuckets buckets{layer->parameters()};
  mezzo::optim::AdamW optimizer{layer->parameters(), mezzo::optim::AdamWOptions(0.01)};
  mezzo::LinearSchedule schedule{optimizer, {.warmup_steps = 2, .total_steps = 10}};
  mezzo::GradScaler scaler;
  mezzo::Ema ema{layer->parameters(), {}};
  mezzo::MetricsLogger logger;
};

/// Of torch::optim, whose masters are static too.
struct TrainerWithMasters {
  void step() {
    layer(torch::ones({2, 8}, torch::kBFloat16)).sum().backward();
    masters.step();
  }

  torch::nn::Linear layer = [] {
    torch::nn::Linear made(8, 4);
    made->to(torch::kBFloat16);
    return made;
  }();
  torch::optim::AdamW optimizer{layer->parameters(), torch::optim::AdamWOptions(0.01)};
  mezzo::MasterWeights masters{optimizer};
};

// Made before main, ended after it.
Trainer before_main;
mezzo::AnomalyTrace trace_before_main(*before_main.layer);
TrainerWithMasters masters_before_main;

/// Made at its first use, and so ended before the ones above.
Trainer& at_first_use() {
  static Trainer trainer;
  return trainer;
}

[[noreturn]] void end_here() { std::exit(EXIT_SUCCESS); }

void stay_in_a_region_for_good() {
  std::promise<void> inside;
  const auto is_inside = inside.get_future();
  std::thread([&inside] {
    const mezzo::AutocastGuard<torch::kCPU> autocast({.op_overrides = before_main.policy});
    before_main.model(torch::ones({2, 8}));
    inside.set_value();
    std::this_thread::sleep_for(std::chrono::hours(1));
  }).detach();
  is_inside.wait();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string way = argc == 2 ? argv[1] : "";
  for (Trainer* trainer : {&before_main, &at_first_use()}) {
    for (int step = 0; step < 3; ++step) trainer->step(/*overflows=*/step == 1);
  }
  masters_before_main.step();
  static const mezzo::EmaGuard averaged(at_first_use().ema);
  if (way == "on_skip") {
    before_main.scaler.on_skip([](const mezzo::SkippedStep&) { end_here(); });
    before_main.step(/*overflows=*/true);
  } else if (way == "hook") {
    before_main.layer->weight.register_hook([](const Tensor&) { end_here(); });
    before_main.step();
  } else if (way == "closure") {
    before_main.optimizer.step([]() -> Tensor { end_here(); });
  } else if (way == "thread") {
    stay_in_a_region_for_good();
    return EXIT_SUCCESS;
  } else if (way == "return") {
    return EXIT_SUCCESS;
  }
  std::fprintf(stderr, "it did not end by \"%s\"\n", way.c_str());
  return EXIT_FAILURE;
}
