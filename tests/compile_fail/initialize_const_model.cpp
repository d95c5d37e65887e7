// error: mezzo::initialize: the first argument is not a model
#include <mezzo/opt_levels/amp.h>

#include <torch/nn/module.h>

#include <utility>

struct ConstModel : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& batch) { return batch; }
};

void initialize_const_model(ConstModel& model, torch::optim::Optimizer& optimizer) {
#ifdef MEZZO_LEGAL
  (void)mezzo::initialize(model, optimizer);
#else
  (void)mezzo::initialize(std::as_const(model), optimizer);
#endif
}
