// Does not compile; check.cmake has what the compiler should say.

#include <mezzo/opt_levels/amp.h>

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

struct Net : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& batch) { return batch; }
};

void misuse(torch::optim::SGD& optimizer, mezzo::Amp& amp) {
  Net net;
  const Net fixed;
  (void)mezzo::initialize(fixed, optimizer);
  (void)mezzo::initialize(net, &optimizer);
  (void)amp.forward(fixed, torch::Tensor());
}
