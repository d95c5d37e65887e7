// Inference: a frozen model under autocast, called by several threads. A weight cache in which its
// weights are pinned keeps their casts, for all threads and all calls. Exits with 1 if a weight was
// cast later, or if an output is far from float32's.
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

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
  // Once, before there are threads.
  const auto cache = mezzo::install_op_overrides(mezzo::WeightCache());

  Net model;
  model->eval();
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  cache.pin(model->parameters());
  // The module enters its region in every thread that calls it; a guard works in its own thread
  // only.
  mezzo::AutocastModule net(model, {.device = torch::kCPU, .cache = cache});

  const auto input = torch::randn({32, 64});
  const auto exact = model(input);
  net(input);  // casts each weight
  const auto casts = cache.statistics().casts;

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

  const auto statistics = cache.statistics();
  std::printf("%lld casts of weights at the start, %lld later; %lld uses of copies; error %.4f\n",
              static_cast<long long>(casts), static_cast<long long>(statistics.casts - casts),
              static_cast<long long>(statistics.hits), errors[0]);
  return casts > 0 && statistics.casts == casts && errors[0] < 0.05 ? 0 : 1;
}
