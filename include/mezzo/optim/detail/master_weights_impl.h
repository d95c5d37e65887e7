#pragma once

#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/parameter_swap.h>
#include <mezzo/optim/detail/rank_sum.h>
#include <mezzo/optim/master_weights.h>

#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>

#include <cmath>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What the gradients are to be multiplied with; none when the step is to be skipped. The one place
/// where MasterWeights waits. The verdicts of all devices say the same.
inline std::optional<double> factor_on_host(const optim::FusedStep& step) {
  if (step.verdicts.empty()) return 1.0;
  const optim::DeviceVerdict& verdict = step.verdicts.front();
  const auto wide = verdict.inv_scale.is_mps() ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> values{verdict.inv_scale.to(wide), verdict.found_inf.to(wide)};
  if (verdict.sum_of_squares.defined()) values.push_back(verdict.sum_of_squares.to(wide));
  const at::Tensor on_host = at::stack(values).to(at::kCPU, at::kDouble);
  const double* const value = on_host.const_data_ptr<double>();
  if (value[1] != 0.0) return std::nullopt;
  if (!verdict.sum_of_squares.defined()) return value[0];
  return value[0] * clip_coefficient(value[2], step.options.max_norm);
}

/// In float where it has 16 bits, and only then multiplied, so that nothing underflows on the way.
/// Never the gradient itself where that would be written.
inline at::Tensor multiplied(const at::Tensor& gradient, double factor) {
  const at::Tensor wide = is_low_precision(gradient) ? gradient.to(at::kFloat) : gradient;
  return factor == 1.0 ? wide : wide.mul(factor);
}

}  // namespace detail

/// A parameter with a gradient.
struct MasterWeights::Participant {
  at::Tensor parameter;
  at::Tensor master;  ///< undefined where the parameter itself is trained
  at::Tensor gradient;
};

inline MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer)
    : FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup>(), /*defaults=*/nullptr),
      inner_(&optimizer),
      groups_(param_groups_, defaults_, optimizer) {
  TORCH_CHECK(dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
              "MasterWeights: torch::optim::LBFGS calls its closure several times in a step, each "
              "time with other weights, of which the model would have to know; train the model in "
              "float, or use an optimizer that takes a step from one gradient");
  TORCH_CHECK(dynamic_cast<FusedOptimizer*>(&optimizer) == nullptr,
              "MasterWeights is for optimizers that keep no masters, and this one is mezzo's: set "
              "weight_storage(WeightStorage::master) in its options instead");
  refresh_groups();
}

inline std::vector<torch::optim::OptimizerParamGroup>& MasterWeights::param_groups() {
  refresh_groups();
  return inner_->param_groups();
}
inline const std::vector<torch::optim::OptimizerParamGroup>& MasterWeights::param_groups() const {
  groups_.settle();
  return inner_->param_groups();
}

inline void MasterWeights::zero_grad(bool set_to_none) {
  refresh_groups();
  inner_->zero_grad(set_to_none);
}

inline void MasterWeights::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  refresh_groups();
  inner_->add_param_group(group);
  refresh_groups();
}

inline void MasterWeights::refresh_groups() {
  groups_.settle();
  masters_.follow(inner_->param_groups());
}

inline bool MasterWeights::keeps_master(std::size_t /*group*/, const at::Tensor& parameter) const {
  return detail::is_low_precision(parameter);
}

inline at::Tensor MasterWeights::master_param(std::size_t group, const at::Tensor& parameter) {
  return keeps_master(group, parameter) ? masters_.settled(parameter) : parameter;
}

inline at::Tensor MasterWeights::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enable_grad(true);
    loss = closure();
  }
  refresh_groups();
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      detail::refuse_unscaled_master(masters_.find(parameter), detail::KeptMasters::kName);
    }
  }
  fused_step({});
  return loss;
}

inline void MasterWeights::fused_step(const optim::FusedStep& step) {
  const c10::NoGradGuard no_grad;
  refresh_groups();
  const std::optional<double> factor = detail::factor_on_host(step);
  if (factor) {
    const std::vector<Participant> all = participants(step.master_gradients);
    step_inner(all, *factor * rank_factor_of(all, step));
    if (!all.empty()) applied_count().set(applied_steps() + 1);
  }
  if (step.options.zero_grad) detail::zero_gradients(*this);
}

inline std::vector<MasterWeights::Participant> MasterWeights::participants(bool master_gradients) {
  std::vector<Participant> all;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const bool has_master = detail::is_low_precision(parameter);
      at::Tensor gradient = parameter.grad();
      if (has_master && master_gradients) {
        const at::Tensor master = masters_.find(parameter);
        gradient = master.defined() ? master.grad() : at::Tensor();
      }
      if (!gradient.defined()) continue;
      all.push_back({parameter, has_master ? masters_.settled(parameter) : at::Tensor(), gradient});
    }
  }
  return all;
}

/// Of gradients that are sums over ranks. A verdict's inv_scale has it in it.
inline double MasterWeights::rank_factor_of(const std::vector<Participant>& all,
                                            const optim::FusedStep& step) {
  if (!step.verdicts.empty()) return 1.0;
  std::vector<at::Tensor> parameters;
  for (const Participant& one : all) parameters.push_back(one.parameter);
  return detail::rank_sum_factor(parameters);
}

inline void MasterWeights::step_inner(const std::vector<Participant>& all, double factor) {
  {
    detail::ParameterSwap parameter_swap(*inner_);
    std::vector<std::pair<at::Tensor, at::Tensor>> with_master;
    for (const Participant& one : all) {
      const at::Tensor& trained = one.master.defined() ? one.master : one.parameter;
      parameter_swap.lend_gradient(trained, detail::multiplied(one.gradient, factor));
      if (one.master.defined()) with_master.emplace_back(one.parameter, one.master);
    }
    parameter_swap.put_in(with_master);
    if (!lr_factors().empty()) parameter_swap.multiply_lrs(lr_factor(applied_steps()));
    try {
      inner_->step();
    } catch (...) {
      finish(all);  // as without masters, what was trained before it threw is trained
      throw;
    }
  }
  finish(all);
}

inline void MasterWeights::finish(const std::vector<Participant>& all) {
  for (const Participant& one : all) {
    if (one.master.defined()) {
      masters_.round(one.parameter);
    } else if (publishes() && one.parameter.scalar_type() == at::kFloat) {
      at::Tensor copy = copy_for(one.parameter);
      if (!copy.defined()) continue;
      copy.copy_(one.parameter);
      publish(one.parameter, copy);
    }
  }
}

inline std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer) {
  auto* const fused = detail::refreshed(optimizer);
  std::vector<at::Tensor> all;
  detail::for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
    all.push_back(fused != nullptr ? fused->master_param(group, parameter) : parameter);
  });
  return all;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
