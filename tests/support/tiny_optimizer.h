#pragma once

#include <mezzo/scaling/grad_scaler.h>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <utility>
#include <vector>

#include "special_values.h"

namespace test_support {

inline torch::Tensor parameter(std::vector<float> values) {
  return torch::tensor(values).requires_grad_(true);
}

/// Returns an SGD with a learning rate of 1: a step subtracts the gradient.
inline torch::optim::SGD sgd(std::vector<torch::Tensor> parameters) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(1.0));
}

inline void set_grad(const torch::Tensor& parameter, std::vector<float> values) {
  parameter.mutable_grad() = torch::tensor(values);
}

/// Returns a scaler that has scaled a loss, and does not print skips.
inline mezzo::GradScaler make_silent_scaler(const mezzo::GradScalerOptions& options = {
                                                .init_scale = 1024}) {
  mezzo::GradScaler scaler(options);
  scaler.on_skip(nullptr);
  (void)scaler.scale(torch::zeros({}));
  return scaler;
}

/// A weight, a torch::optim::SGD with a learning rate of 1, and a scaler.
struct SingleParamTraining {
  explicit SingleParamTraining(mezzo::GradScaler grad_scaler) : scaler(std::move(grad_scaler)) {
    (void)scaler.scale(torch::zeros({}));
  }
  explicit SingleParamTraining(const mezzo::GradScalerOptions& options = {.init_scale = 1024})
      : SingleParamTraining(make_silent_scaler(options)) {}

  /// Runs an iteration with the scaled gradient `gradient`.
  mezzo::StepResult step(float gradient) {
    (void)scaler.scale(torch::zeros({}));
    set_grad(x, {gradient});
    mezzo::StepResult result = scaler.step(optimizer);
    scaler.update();
    return result;
  }
  /// Runs an iteration for each gradient, and returns the scale after each.
  std::vector<double> scales(const std::vector<float>& gradients) {
    std::vector<double> all;
    for (const float gradient : gradients) {
      step(gradient);
      all.push_back(scaler.get_scale());
    }
    return all;
  }

  mezzo::GradScaler scaler;
  torch::Tensor x = parameter({0});
  torch::optim::SGD optimizer = sgd({x});
};

}  // namespace test_support
