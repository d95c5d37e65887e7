// Inference with a bfloat16 model under autocast, from several threads. The weights are stored in
// bfloat16, so that no call casts them. Exits with 1 if an output differs much from float32.
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
  const auto expected = model(input);
  model->to(torch::kBFloat16);  // so that autocast does not cast weights

  // AutocastModule enables autocast in every calling thread; a guard is thread-local. Autocast
  // casts the float32 input, and runs ops that need float32's range in float32.
  mezzo::AutocastModule net(model, {.device_type = torch::kCPU, .output_dtype = torch::kFloat});
  std::vector<double> errors(4);
  std::vector<std::thread> workers;
  for (double& error : errors) {
    workers.emplace_back([&] {
      const torch::NoGradGuard no_grad;  // thread-local too
      for (int request = 0; request < 50; ++request) {
        error = (net(input) - expected).abs().max().item<double>();
      }
    });
  }
  for (auto& worker : workers) worker.join();
  const double error = *std::max_element(errors.begin(), errors.end());
  std::printf("largest error of 4 threads: %.4f\n", error);
  return error > 0 && error < 0.05 ? 0 : 1;
}
