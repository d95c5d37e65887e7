// Exits while all training objects have static storage duration, at namespace scope and in
// functions:
//
//   statics_at_exit return       return from main
//   statics_at_exit on_skip      exit() in the callback of a skipped step
//   statics_at_exit hook         exit() in a hook of the backward pass
//   statics_at_exit closure      exit() in a step's closure
//   statics_at_exit thread       return from main while a thread is in an autocast region
//
// A crash or a sanitizer's finding changes the exit status.

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

/// All objects of a training loop, in the order of their dependencies.
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

/// An optimizer of torch::optim with master weights.
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

// Constructed before main, destroyed after it.
Trainer before_main;
mezzo::AnomalyTrace trace_before_main(*before_main.layer);
TrainerWithMasters masters_before_main;

/// Constructed at its first use, and destroyed before the objects above.
Trainer& function_static() {
  static Trainer trainer;
  return trainer;
}

[[noreturn]] void exit_successfully() { std::exit(EXIT_SUCCESS); }

void start_thread_in_autocast_region() {
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
  const std::string exit_by = argc == 2 ? argv[1] : "";
  for (Trainer* trainer : {&before_main, &function_static()}) {
    for (int step = 0; step < 3; ++step) trainer->step(/*overflows=*/step == 1);
  }
  masters_before_main.step();
  static const mezzo::EmaGuard averaged(function_static().ema);
  if (exit_by == "on_skip") {
    before_main.scaler.on_skip([](const mezzo::SkippedStep&) { exit_successfully(); });
    before_main.step(/*overflows=*/true);
  } else if (exit_by == "hook") {
    before_main.layer->weight.register_hook([](const Tensor&) { exit_successfully(); });
    before_main.step();
  } else if (exit_by == "closure") {
    before_main.optimizer.step([]() -> Tensor { exit_successfully(); });
  } else if (exit_by == "thread") {
    start_thread_in_autocast_region();
    return EXIT_SUCCESS;
  } else if (exit_by == "return") {
    return EXIT_SUCCESS;
  }
  std::fprintf(stderr, "unknown argument or no exit: \"%s\"\n", exit_by.c_str());
  return EXIT_FAILURE;
}
