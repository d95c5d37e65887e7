#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/move_average.h>

// Averages of weights. Those of parameters that are trained move in the step's own pass, those of
// the others here.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
bool ElementwiseOptimizer<Traits>::keeps_averages() const {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    if (options_of(group).ema_decay() != 0) return true;
  }
  return false;
}

template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::average_of(const at::Tensor& parameter) const {
  const State* const state = state_of(parameter);
  return state == nullptr ? at::Tensor() : state->ema();
}

/// Whether a parameter without a gradient has an average, or is to have one. Checks what is kept.
template <class Traits>
bool ElementwiseOptimizer<Traits>::is_averaged(const at::Tensor& parameter,
                                               const Options& options) {
  if (options.ema_decay() == 0 && !average_of(parameter).defined()) return false;
  (void)checked_state(parameter, options);
  return at::isFloatingType(parameter.scalar_type()) && parameter.layout() == at::kStrided;
}

/// found_inf on `device`; undefined if the step runs unconditionally. A device without gradients
/// gets a copy of another's: all are equal.
template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::found_inf_on(at::Device device,
                                                      const optim::FusedStep& step) {
  for (const optim::DeviceVerdict& verdict : step.verdicts) {
    if (verdict.found_inf.device() == device) return verdict.found_inf;
  }
  return step.verdicts.empty() ? at::Tensor() : step.verdicts.front().found_inf.to(device);
}

/// Moves the averages of parameters that this step does not train, if the step is applied.
template <class Traits>
void ElementwiseOptimizer<Traits>::average(const std::vector<Bystander>& bystanders,
                                           const optim::FusedStep& step) {
  for (const auto& [parameter, ema_decay, storage] : bystanders) {
    at::Tensor found_inf = found_inf_on(parameter->device(), step);
    if (found_inf.defined() && found_inf.is_cpu()) {
      if (*found_inf.template const_data_ptr<float>() != 0.0F) return;
      found_inf = at::Tensor();
    }
    const NoGraphGuard no_graph(parameter->is_inference());
    State& state = state_for(*parameter);
    const at::Tensor value = present_value(*parameter, storage, state);
    settle_average(*parameter, ema_decay, state);
    if (ema_decay != 0) move_average(state.ema(), value, 1.0 - ema_decay, found_inf);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
