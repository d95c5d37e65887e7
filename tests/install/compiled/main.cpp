// A user's program of two units that train with the same optimizer.
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>

#include "step.h"

int main() {
  const at::Tensor here = at::ones({37}).requires_grad_();
  const at::Tensor there = at::ones({37}).requires_grad_();
  there.mutable_grad() = at::ones({37});
  step(there);

  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(std::vector<at::Tensor>{here}, 0.1);
  scaler.scale(here.sum()).backward();
  scaler.step(optimizer);
  return at::allclose(here, there) && here.min().item<float>() < 1.0F ? 0 : 1;
}
