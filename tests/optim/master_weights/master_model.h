#pragma once

#include <mezzo/optim/lamb.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/optim.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../support/same_bits.h"
#include "../../support/special_values.h"

namespace master_weights_test {

using test_support::copies_of;
using test_support::same_bits;
using test_support::SameBits;

inline constexpr double kScale = 1024;

using Tensors = std::vector<torch::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;

/// A scaler that has seen a loss, and tells nobody of its skips.
inline mezzo::GradScaler quiet_scaler(const mezzo::LossScale& options = {.init_scale = kScale}) {
  mezzo::GradScaler scaler(options);
  scaler.on_skip(nullptr);
  (void)scaler.scale(torch::zeros({}));
  return scaler;
}

/// Parameters of `dtype` and float in two groups, one of them transposed, one empty, and one with
/// gaps, which mezzo's own optimizers refuse; and what they are in float.
struct Model {
  Tensors parameters;

  explicit Model(torch::ScalarType dtype, bool has_gaps = true) {
    torch::manual_seed(3);
    add(torch::randn({7, 5}).to(dtype));
    add(torch::randn({33}));
    add(torch::randn({6, 5}).to(dtype).t());
    const auto sliced = torch::randn({6, 8}).to(dtype).slice(1, 0, 8, 2);
    add(has_gaps ? sliced : sliced.contiguous());
    add(torch::randn({0}).to(dtype));
    add(torch::randn({}).to(dtype));
  }

  /// The same values, all in float.
  Model in_float() const {
    Model model = *this;
    for (auto& parameter : model.parameters) {
      parameter = parameter.detach().to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
      parameter.requires_grad_();
    }
    return model;
  }

  Groups groups() const {
    const auto middle = parameters.begin() + 3;
    return {torch::optim::OptimizerParamGroup(Tensors(parameters.begin(), middle)),
            torch::optim::OptimizerParamGroup(Tensors(middle, parameters.end()))};
  }

  /// Gradients of step number `step` as backward leaves them, times the scale.
  void set_gradients(int step, double scale = kScale) const {
    torch::manual_seed(100 + step);
    for (const auto& parameter : parameters) {
      parameter.mutable_grad() =
          (torch::randn(parameter.sizes()) * scale).to(parameter.scalar_type());
    }
  }

  /// Those of `other`, unscaled in float.
  void take_gradients(const Model& other, double scale = kScale) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = other.parameters[i].grad().to(torch::kFloat).mul(1 / scale);
    }
  }

  Tensors gradients() const {
    Tensors all;
    for (const auto& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }

 private:
  void add(const torch::Tensor& values) { parameters.push_back(values.requires_grad_()); }
};

template <class Optimizer, class Options>
MakeOptimizer maker(const Options& options) {
  return [options](const Groups& groups) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(groups, options);
  };
}

/// Optimizers that keep no masters themselves.
inline std::vector<MakeOptimizer> libtorch_optimizers() {
  return {
      maker<torch::optim::SGD>(torch::optim::SGDOptions(0.01)),
      maker<torch::optim::SGD>(
          torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.1)),
      maker<torch::optim::Adam>(torch::optim::AdamOptions(1e-3).amsgrad(true)),
      maker<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1)),
      maker<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5)),
      maker<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2)),
      maker<mezzo::optim::LAMB>(mezzo::optim::LAMBOptions(1e-3).weight_decay(0.1))};
}

}  // namespace master_weights_test
