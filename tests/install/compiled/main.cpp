// Trains in two translation units with the same optimizer.
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>

#include "step.h"

int main() {
  const at::Tensor scaler_parameter = at::ones({37}).requires_grad_();
  const at::Tensor parameter = at::ones({37}).requires_grad_();
  parameter.mutable_grad() = at::ones({37});
  step(parameter);

  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(std::vector<at::Tensor>{scaler_parameter}, 0.1);
  scaler.scale(scaler_parameter.sum()).backward();
  scaler.step(optimizer);
  return at::allclose(scaler_parameter, parameter) && scaler_parameter.min().item<float>() < 1.0F
             ? 0
             : 1;
}
