#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/lamb.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

MEZZO_INLINE void LAMBOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, bias_correction);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, always_adapt);
}
MEZZO_INLINE void LAMBOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(always_adapt);
}

MEZZO_INLINE void LAMB::check_options(const LAMBOptions& options) {
  detail::check_numbers(
      kName,
      {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
      options.betas());
}

MEZZO_INLINE void LAMB::update() {
  /// The parameters of a group, a device and a dtype, which ATen's ops take together.
  struct Together {
    std::vector<at::Tensor> parameters, gradients, means, squares;
    std::vector<at::Scalar> corrections, root_corrections;
  };
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const LAMBOptions&>(group.options());
    const auto [beta1, beta2] = options.betas();
    std::map<std::pair<std::string, at::ScalarType>, Together> all;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      LAMBParamState& state = state_of(parameter);
      if (!state.exp_avg().defined()) {
        state.exp_avg(at::zeros_like(parameter)).exp_avg_sq(at::zeros_like(parameter));
      } else if (state.exp_avg().scalar_type() != parameter.scalar_type()) {  // of other weights
        state.exp_avg(state.exp_avg().to(parameter.scalar_type()));
        state.exp_avg_sq(state.exp_avg_sq().to(parameter.scalar_type()));
      }
      state.step(state.step() + 1);
      const auto steps = static_cast<double>(options.bias_correction() ? state.step() : 0);
      const auto correction = [steps](double beta) {
        return steps == 0 ? 1.0 : 1 - std::pow(beta, steps);
      };
      Together& own = all[{parameter.device().str(), parameter.scalar_type()}];
      own.parameters.push_back(parameter);
      own.gradients.push_back(parameter.grad().to(parameter.scalar_type()));
      own.means.push_back(state.exp_avg());
      own.squares.push_back(state.exp_avg_sq());
      own.corrections.emplace_back(correction(beta1));
      own.root_corrections.emplace_back(std::sqrt(correction(beta2)));
    }
    for (const auto& [place, own] : all) {
      at::_foreach_mul_(own.means, beta1);
      at::_foreach_add_(own.means, own.gradients, 1 - beta1);
      at::_foreach_mul_(own.squares, beta2);
      at::_foreach_addcmul_(own.squares, own.gradients, own.gradients, 1 - beta2);
      std::vector<at::Tensor> divisors = at::_foreach_sqrt(own.squares);
      at::_foreach_div_(divisors, own.root_corrections);
      at::_foreach_add_(divisors, options.eps());
      at::_foreach_mul_(divisors, own.corrections);
      const std::vector<at::Tensor> updates = at::_foreach_div(own.means, divisors);
      if (options.weight_decay() != 0) {
        at::_foreach_add_(updates, own.parameters, options.weight_decay());
      }
      if (options.weight_decay() != 0 || options.always_adapt()) {
        const auto wide = own.parameters.front().is_mps() ? at::kFloat : at::kDouble;
        const at::Tensor lengths = at::stack(at::_foreach_norm(own.parameters, 2, wide));
        const at::Tensor steps = at::stack(at::_foreach_norm(updates, 2, wide));
        const at::Tensor ratios = at::where((lengths == 0).logical_or(steps == 0),
                                            at::ones_like(lengths), lengths / steps);
        at::_foreach_mul_(updates, ratios.unbind());
      }
      at::_foreach_add_(own.parameters, updates, -options.lr());
    }
  }
}

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
