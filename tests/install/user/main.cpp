// Runs a function of mezzo and an op of libtorch, which fails if a linked library does not load or
// registers no operators.
#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <iostream>

int main() {
  const auto rule = mezzo::GradScalerOptions::dynamic({.init_scale = 1024.});
  const auto after_overflow = rule.next(rule.initial_state(), /*found_inf=*/true);
  const at::Tensor sum = at::full({2}, after_overflow.scale).sum();
  std::cout << "mezzo " << MEZZO_VERSION_MAJOR << '.' << MEZZO_VERSION_MINOR << ": scale "
            << after_overflow.scale << '\n';
  return sum.item<float>() == 1024.F ? 0 : 1;
}
