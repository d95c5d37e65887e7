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

/// With a learning rate of 1, so that a step subtracts the gradient.
inline torch::optim::SGD sgd(std::vector<torch::Tensor> parameters) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(1.0));
}

inline void set_grad(const torch::Tensor& parameter, std::vector<float> values) {
  parameter.mutable_grad() = torch::tensor(values);
}

/// A scaler that has seen a loss, and has_skip_callback nobody of its skips.
inline mezzo::GradScaler make_silent_scaler(const mezzo::GradScalerOptions& options = {
                                                .init_scale = 1024}) {
  mezzo::GradScaler scaler(options);
  scaler.on_skip(nullptr);
  (void)scaler.scale(torch::zeros({}));
  return scaler;
}

/// A weight that libtorch's SGD trains at a rate of 1 under a scaler.
struct SingleParamTraining {
  explicit SingleParamTraining(mezzo::GradScaler own) : scaler(std::move(own)) {
    (void)scaler.scale(torch::zeros({}));
  }
  explicit SingleParamTraining(const mezzo::GradScalerOptions& options = {.init_scale = 1024})
      : SingleParamTraining(make_silent_scaler(options)) {}

  /// One iteration whose gradient is `gradient`.
  mezzo::StepResult step(float gradient) {
    (void)scaler.scale(torch::zeros({}));
    set_grad(x, {gradient});
    mezzo::StepResult result = scaler.step(optimizer);
    scaler.update();
    return result;
  }
  /// The scale after each of some iterations.
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
