// Inference: a model in bfloat16 under autocast, called by several threads. Its weights are stored
// in the dtype in which they are multiplied, so that no call casts them. Exits with 1 if an output
// is far from float32's.
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::gelu(first(x))); }

  torch::nn::Linear first = register_module("first", torch::nn::Linear(64, 256));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(256, 8));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  torch::manual_seed(0);
  Net model;
  model->eval();
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  const auto input = torch::randn({32, 64});
  const auto exact = model(input);
  model->to(torch::kBFloat16);  // after this no call casts a weight

  // The module enters its region in every thread that calls it; a guard works in its own thread
  // only. The region casts the float input, and runs ops that need the range in float32.
  mezzo::AutocastModule net(model, {.device_type = torch::kCPU, .output_dtype = torch::kFloat});
  std::vector<double> errors(4);
  std::vector<std::thread> workers;
  for (double& error : errors) {
    workers.emplace_back([&] {
      const torch::NoGradGuard no_grad;  // thread-local too
      for (int request = 0; request < 50; ++request) {
        error = (net(input) - exact).abs().max().item<double>();
      }
    });
  }
  for (auto& worker : workers) worker.join();
  const double error = *std::max_element(errors.begin(), errors.end());
  std::printf("largest error of 4 threads: %.4f\n", error);
  return error > 0 && error < 0.05 ? 0 : 1;
}
