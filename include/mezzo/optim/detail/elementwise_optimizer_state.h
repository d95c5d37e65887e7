#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/group_options.h>
#include <mezzo/optim/detail/move_average.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

// What an optimizer keeps of its parameters: states, averages of those that a step passes by, and
// files, which are libtorch's with what libtorch has not under keys of its own.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Null where there is none, or one of libtorch's, which has nothing of what mezzo's adds.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_of(const at::Tensor& parameter) const -> const State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<const State*>(found->second.get());
}

/// Made if there is none.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_for(const at::Tensor& parameter) -> State& {
  return own_state<State>(state_[parameter.unsafeGetTensorImpl()], parameter, words());
}

/// Null if there is none. What is kept may be another optimizer's, or another model's.
template <class Traits>
auto ElementwiseOptimizer<Traits>::checked_state(const at::Tensor& parameter,
                                                 const Options& options) -> State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return nullptr;
  auto& slot = found->second;
  const bool is_own = slot != nullptr && typeid(*slot) == typeid(State);  // and no cast is needed
  State& state = is_own ? static_cast<State&>(*slot) : own_state<State>(slot, parameter, words());
  state.count().check();
  check_shape_of(state.master(), "a master", parameter, words());
  check_shape_of(state.ema(), "an ema", parameter, words());
  for (int k = 0; k < Traits::moments(options); ++k) {
    check_shape_of(Traits::moment(state, k), "a moment", parameter, words());
  }
  return &state;
}

/// The k-th moment, in memory laid out as the parameter's: made when there is none yet, and
/// converted when it was loaded from elsewhere.
template <class Traits>
at::Tensor& ElementwiseOptimizer<Traits>::fitting_moment(const One& one, int k,
                                                         const at::Tensor& parameter) {
  at::Tensor& moment = Traits::moment(*one.state, k);
  const at::ScalarType dtype = moment_dtype(parameter, one.storage);
  const bool is_as_kept =
      moment.defined() && moment.scalar_type() == dtype && moment.device() == parameter.device();
  if (!is_as_kept) check_is_warm(parameter.device(), "a moment");
  if (!moment.defined()) {
    moment = at::zeros_like(parameter, parameter.options().dtype(dtype).requires_grad(false),
                            at::MemoryFormat::Preserve);
    return moment;
  }
  if (!is_as_kept) moment = moment.to(parameter.device(), dtype);
  if (!is_plain(moment) || !same_layout(parameter, moment)) {
    moment = in_layout_of(parameter, moment);
  }
  return moment;
}

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
                                                      const GradientReport& report) {
  for (const DeviceGradientReport& one : report.devices) {
    if (one.found_inf.device() == device) return one.found_inf;
  }
  return report.devices.empty() ? at::Tensor() : report.devices.front().found_inf.to(device);
}

/// Moves the averages of parameters that this step does not train, if the step is applied.
template <class Traits>
void ElementwiseOptimizer<Traits>::average(const GradientReport& report) {
  for (const auto& [parameter, ema_decay, storage] : plan_.bystanders) {
    at::Tensor found_inf = found_inf_on(parameter->device(), report);
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

/// Groups and states as a file has them, until all of it is read.
class ReadOptimizer final : public torch::optim::Optimizer {
 public:
  ReadOptimizer() : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, nullptr) {}
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

template <class Traits>
void ElementwiseOptimizer<Traits>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    check_options(options_of(group));
  }
  std::vector<State*> lent;  // a file has the whole of split weights, as if they were not split
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      auto* const state = dynamic_cast<State*>(found->second.get());
      if (state == nullptr || !state->lower_half().defined() || state->master().defined()) continue;
      state->master(trained_value(parameter, *state));
      lent.push_back(state);
    }
  }
  // Serialised as the base classes, since a group's options or a state may be plain libtorch's.
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, *this);
  for (State* state : lent) state->master(at::Tensor());
  archive.write("applied_steps", c10::IValue(applied_steps()));
}

/// All or nothing: the optimizer is then what the file says, without states that the file lacks.
template <class Traits>
void ElementwiseOptimizer<Traits>::load(torch::serialize::InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; load "
              "what torch::save(optimizer, path) wrote");
  const NoGraphGuard no_graph;
  ReadOptimizer read;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read.param_groups().emplace_back(param_groups_[group].params(),
                                     std::make_unique<Options>(options_of(group)));
  }
  torch::optim::serialize<State, Options>(archive, read);
  const auto read_options = [&read](std::size_t group) -> Options& {
    return static_cast<Options&>(read.param_groups()[group].options());
  };
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    read_options(group).keep_unread(options_of(group));
    check_options(read_options(group));
  }
  const std::optional<int64_t> applied = read_applied_steps(archive, read);
  if (applied) {
    load_applied_steps(*applied);
  } else {
    forget_applied_steps();
  }
  state_ = std::move(read.state());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    set_group_options(param_groups_[group], read_options(group), *defaults_);
  }
  if (!applied) {
    TORCH_WARN(Traits::kName, ": the file of torch::optim::", Traits::kName,
               " holds no number of steps; load the schedule's own file, or call "
               "set_applied_steps(n)");
  }
}

/// Returns the count of a file of mezzo's, and from libtorch's the largest step of any parameter;
/// none where libtorch counts none.
template <class Traits>
std::optional<int64_t> ElementwiseOptimizer<Traits>::read_applied_steps(
    torch::serialize::InputArchive& archive, const Optimizer& read) {
  c10::IValue saved;
  if (archive.try_read("applied_steps", saved)) return saved.toInt();
  if constexpr (!Traits::kLibtorchCounts) return std::nullopt;
  int64_t applied = 0;
  for (const auto& [parameter, state] : read.state()) {
    applied = std::max(applied, static_cast<const State&>(*state).step());
  }
  return applied;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
