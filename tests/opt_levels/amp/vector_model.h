#pragma once

#include <mezzo/opt_levels/amp.h>
#include <mezzo/opt_levels/opt_level.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include "../../support/special_values.h"

namespace initialize_test {

inline constexpr double kScale = 128;
inline const mezzo::InitializeOptions kQuiet{.verbosity = 0};

inline mezzo::OptLevel scaled(const mezzo::OptLevel& level) {
  return mezzo::OptLevel::parse(
      level.name(), {.loss_scale = mezzo::GradScalerOptions::dynamic({.init_scale = kScale})});
}

/// A weight vector of 4 whose gradient is the factor of the loss.
struct VectorImpl : torch::nn::Module {
  VectorImpl() { weight = register_parameter("weight", torch::ones({4})); }
  torch::Tensor forward(const torch::Tensor& factor) { return (weight * factor).sum(); }
  torch::Tensor weight;
};
TORCH_MODULE(Vector);

inline torch::Tensor filled(double value) { return torch::full({4}, value); }

inline float get_weight(const Vector& model) {
  return model->weight.to(torch::kFloat)[0].item<float>();
}

}  // namespace initialize_test
