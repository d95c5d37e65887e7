// A learning rate that is too high, in float16: activations overflow, nearly every step is skipped,
// and the loss scale decreases. Prints mezzo's findings, and stops the run. Exits with 1 if the run
// is not stopped.
#include <mezzo/diagnostics/divergence_monitor.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <iostream>

int main() {
  torch::manual_seed(0);
  std::setbuf(stdout, nullptr);  // orders stdout and stderr
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor inputs = torch::randn({256, 16}, device);
  const torch::Tensor labels = inputs.slice(1, 0, 4).argmax(1);

  mezzo::optim::SGD optimizer(model->parameters(), mezzo::optim::SGDOptions(30.0));
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(*model));  // prints the gradients that are inf or NaN
  mezzo::MetricsLogger logger;
  logger.add_callback(  // is the run lost, and why?
      mezzo::DivergenceMonitor(*model, {.action = mezzo::DivergenceAction::report_and_throw}));

  try {
    for (int step = 1; step <= 100; ++step) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const mezzo::AutocastGuard autocast({.device_type = device.type(), .dtype = torch::kHalf});
        loss = torch::nn::functional::cross_entropy(model->forward(inputs), labels);
      }
      std::printf("step %2d: loss %g, loss scale %g\n", step, loss.item<double>(),
                  scaler.get_scale());
      scaler.scale(loss).backward();
      const auto result = scaler.step(optimizer);
      scaler.update();
      logger.record(result, loss);
    }
    logger.flush();
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << "\n";
    return 0;
  }
  std::cout << "the run was not stopped\n";
  return 1;
}
