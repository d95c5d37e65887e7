// Does not compile; check.cmake has what the compiler should say.

#include <mezzo/levels/initialize.h>

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

struct Net : torch::nn::Module {
  struct Output {
    torch::Tensor logits, loss;
  };
  Output forward(const torch::Tensor& batch) { return {batch, batch.sum()}; }
};

void misuse(torch::optim::SGD& optimizer, mezzo::Amp& amp) {
  Net net;
  const Net fixed;
  (void)mezzo::initialize(fixed, optimizer);
  (void)mezzo::initialize(net, &optimizer);
  (void)amp(fixed, torch::Tensor());
  (void)amp(net, torch::Tensor());
}
