// error: amp.forward\(model, \.\.\.\): the first argument is not a model
#include <mezzo/opt_levels/amp.h>

#include <torch/nn/modules/linear.h>

void forward_without_model(mezzo::Amp& amp, torch::nn::Linear model, torch::Tensor x) {
#ifdef MEZZO_LEGAL
  (void)amp.forward(model, x);
#else
  (void)amp.forward(x, x);
#endif
}
