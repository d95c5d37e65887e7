#pragma once

#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/parameter_swap.h>
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
/// where MasterWeights waits. The reports of all devices say the same.
inline std::optional<double> factor_on_host(const GradientReport& report, double max_norm) {
  if (report.devices.empty()) return 1.0;
  const DeviceGradientReport& one = report.devices.front();
  const auto wide = one.inv_scale.is_mps() ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> values{one.inv_scale.to(wide), one.found_inf.to(wide)};
  if (one.sum_of_squares.defined()) values.push_back(one.sum_of_squares.to(wide));
  const at::Tensor on_host = at::stack(values).to(at::kCPU, at::kDouble);
  const double* const value = on_host.const_data_ptr<double>();
  if (value[1] != 0.0) return std::nullopt;
  if (!one.sum_of_squares.defined()) return value[0];
  return value[0] * clip_coefficient(value[2], max_norm);
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

MEZZO_INLINE MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer) : inner_(&optimizer) {
  TORCH_CHECK(dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
              "MasterWeights: torch::optim::LBFGS calls its closure several times in a step, each "
              "time with other weights, of which the model would have to know; train the model in "
              "float, or use an optimizer that takes a step from one gradient");
  TORCH_CHECK(detail::as_fused(optimizer) == nullptr,
              "MasterWeights is for optimizers that keep no masters, and this one is mezzo's: set "
              "weight_storage(WeightStorage::master) in its options instead");
  follow_parameters();
}

MEZZO_INLINE bool MasterWeights::keeps_master(std::size_t /*group*/,
                                              const at::Tensor& parameter) const {
  return detail::is_low_precision(parameter);
}

MEZZO_INLINE at::Tensor MasterWeights::master_param(std::size_t group,
                                                    const at::Tensor& parameter) {
  return keeps_master(group, parameter) ? settled_master(parameter) : parameter;
}

MEZZO_INLINE at::Tensor MasterWeights::step(torch::optim::Optimizer::LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (const auto& [parameter, kept] : masters_) detail::refuse_unscaled_master(kept.master, kName);
  apply({});
  return loss;
}

MEZZO_INLINE GradientReport MasterWeights::report(const at::Tensor& inv_scale, bool of_masters) {
  follow_parameters();
  return FusedOptimizer::report(inv_scale, of_masters);
}

MEZZO_INLINE void MasterWeights::apply(const GradientReport& report, const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  follow_parameters();
  const std::optional<double> factor = detail::factor_on_host(report, options.max_norm);
  if (factor) {
    const std::vector<Participant> all = participants(report.of_masters);
    step_inner(all, *factor);
    applied_count().set(applied_steps() + 1);
  }
  if (options.zero_grad) detail::zero_gradients(*inner_);
}

MEZZO_INLINE std::vector<MasterWeights::Participant> MasterWeights::participants(bool of_masters) {
  std::vector<Participant> all;
  for (const auto& group : inner_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const bool has_master = detail::is_low_precision(parameter);
      at::Tensor gradient = parameter.grad();
      if (has_master && of_masters) {
        const at::Tensor master = find_master(parameter);
        gradient = master.defined() ? master.grad() : at::Tensor();
      }
      if (!gradient.defined()) continue;
      all.push_back({parameter, has_master ? settled_master(parameter) : at::Tensor(), gradient});
    }
  }
  return all;
}

/// Undefined where none was made.
MEZZO_INLINE at::Tensor MasterWeights::find_master(const at::Tensor& parameter) const {
  const auto found = masters_.find(parameter.unsafeGetTensorImpl());
  return found == masters_.end() ? at::Tensor() : found->second.master;
}

/// In agreement with the parameter as it is now; made if there is none. The two are compared at
/// each step: an optimizer of libtorch's that steps alone writes through `data()`, which bumps no
/// version.
MEZZO_INLINE at::Tensor MasterWeights::settled_master(const at::Tensor& parameter) {
  const c10::NoGradGuard no_grad;
  Kept& kept = masters_[parameter.unsafeGetTensorImpl()];
  kept.parameter = parameter;
  detail::check_shape_of(kept.master, "a master", parameter, words());
  if (kept.master.defined()) {
    detail::follow_writes(parameter, kept.master);
  } else {
    kept.master = parameter.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  kept.master.set_requires_grad(parameter.requires_grad());  // an optimizer may look at it
  return kept.master;
}

/// Looks at the parameters of 16 bits when they are others, or more, than they were.
MEZZO_INLINE void MasterWeights::follow_parameters() {
  std::vector<at::Tensor> low_precision;
  for (const auto& group : inner_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (detail::is_low_precision(parameter)) low_precision.push_back(parameter);
    }
  }
  seen_.begin();
  for (const at::Tensor& parameter : low_precision) seen_.see(parameter);
  if (!seen_.end()) return;
  try {
    detail::refuse_duplicates(low_precision, words());
  } catch (...) {
    seen_.forget();
    throw;
  }
  decltype(masters_) left;
  for (const at::Tensor& parameter : low_precision) {
    const auto found = masters_.find(parameter.unsafeGetTensorImpl());
    if (found != masters_.end()) left.insert(std::move(*found));
  }
  masters_ = std::move(left);
}

MEZZO_INLINE void MasterWeights::step_inner(const std::vector<Participant>& all, double factor) {
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

/// Parameters become their masters, rounded to nearest.
MEZZO_INLINE void MasterWeights::finish(const std::vector<Participant>& all) {
  const c10::NoGradGuard no_grad;
  for (const Participant& one : all) {
    if (one.master.defined()) {
      one.parameter.detach().copy_(one.master);
    } else if (publishes() && one.parameter.scalar_type() == at::kFloat) {
      at::Tensor copy = copy_for(one.parameter);
      if (!copy.defined()) continue;
      copy.copy_(one.parameter);
      publish(one.parameter, copy);
    }
  }
}

MEZZO_INLINE std::vector<at::Tensor> master_params(AnyOptimizer optimizer) {
  const detail::StepTaker taker(optimizer);
  std::vector<at::Tensor> all;
  detail::for_each_parameter(taker.optimizer(),
                             [&](std::size_t group, const at::Tensor& parameter) {
                               all.push_back(taker.master_param(group, parameter));
                             });
  return all;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
