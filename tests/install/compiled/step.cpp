#include "step.h"

#include <mezzo/optim/adamw.h>

void step(const at::Tensor& parameter) {
  mezzo::optim::AdamW optimizer(std::vector<at::Tensor>{parameter}, 0.1);
  optimizer.step();
}
