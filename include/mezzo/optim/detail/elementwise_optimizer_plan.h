#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/move_average.h>

#include <typeinfo>

// An optimizer's parameters: which have a gradient and take part in a step, what the state keeps of
// them, in which buckets they are; and averages of those that a step passes by.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
void ElementwiseOptimizer<Traits>::check_options(const Options& options) {
  Traits::check(options);
  TORCH_CHECK(options.ema_decay() >= 0 && options.ema_decay() < 1, Traits::kName, ": ema_decay is ",
              options.ema_decay(), "; it should be at least 0 (no average) and less than 1");
}

template <class Traits>
auto ElementwiseOptimizer<Traits>::options_of(std::size_t group) const -> Options {
  return group_options<Options>(param_groups_, group, *defaults_, Traits::kName);
}

/// Null where there is none, or one of libtorch's, which has nothing of what mezzo's adds.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_of(const at::Tensor& parameter) const -> const State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<const State*>(found->second.get());
}

template <class Traits>
std::vector<at::Tensor> ElementwiseOptimizer<Traits>::own_parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& group : param_groups_) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

template <class Traits>
void ElementwiseOptimizer<Traits>::look_at_parameters() {
  settle_parameters(seen_.look(param_groups_));
}

template <class Traits>
void ElementwiseOptimizer<Traits>::settle_parameters(bool are_others) {
  if (!are_others) return;
  ++parameters_version_;
  try {
    refuse_duplicates(own_parameters(), words());
  } catch (...) {
    seen_.forget();
    throw;
  }
}

/// Parameters that are new join the buckets; and gradients come to their places.
template <class Traits>
void ElementwiseOptimizer<Traits>::follow_parameters(bool reattaches) {
  if (buckets_ == nullptr) return;
  look_at_parameters();
  if (bucketed_version_ != parameters_version_) {
    const std::vector<at::Tensor> own = own_parameters();
    buckets_->add_parameters(missing_from(buckets_->parameters(), own));
    buckets_hold_others_ = !missing_from(own, buckets_->parameters()).empty();
    bucketed_version_ = parameters_version_;
  }
  if (reattaches && !buckets_hold_others_) buckets_->reattach_gradients();
}

/// By which a change of the groups between report and step is noticed.
template <class Traits>
auto ElementwiseOptimizer<Traits>::parameter_lists() const
    -> std::vector<std::pair<const at::Tensor*, std::size_t>> {
  std::vector<std::pair<const at::Tensor*, std::size_t>> lists;
  for (const auto& group : param_groups_) {
    lists.emplace_back(group.params().data(), group.params().size());
  }
  return lists;
}

/// The one walk over the parameters before a step.
template <class Traits>
void ElementwiseOptimizer<Traits>::make_plan(bool of_masters) {
  const c10::NoGradGuard no_grad;
  plan_.clear();
  plan_.groups = parameter_lists();
  plan_.states = state_.size();
  plan_.options.reserve(param_groups_.size());
  std::uint64_t number = 0;
  seen_.begin();
  try {
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      const Options& options = plan_.options.emplace_back(options_of(group));
      check_options(options);
      for (const at::Tensor& parameter : param_groups_[group].params()) {
        seen_.see(parameter);
        plan_parameter(parameter, number++, options, of_masters);
      }
    }
    settle_parameters(seen_.end());
  } catch (...) {
    seen_.forget();
    plan_.clear();
    throw;
  }
}

/// Whether the plan was made for `report`, and what it points to is still there. Of states the
/// number and one are looked at: a file or clear() replaces all, and looking each up takes longer
/// than the rest of this.
template <class Traits>
bool ElementwiseOptimizer<Traits>::is_planned(const GradientReport& report) const {
  if (report.plan == 0 || report.plan != plan_.number) return false;
  if (plan_.groups != parameter_lists() || plan_.states != state_.size()) return false;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    if (!(plan_.options[group] == options_of(group))) return false;
  }
  bool has_seen_state = false;
  const auto is_current = [&](const One& one) {
    const at::Tensor& gradient = one.parameter->grad();
    if (!report.of_masters && !gradient.is_same(one.gradient)) return false;
    if (one.state == nullptr || std::exchange(has_seen_state, true)) return true;
    const auto state = state_.find(one.parameter->unsafeGetTensorImpl());
    return state != state_.end() && state->second.get() == one.state;
  };
  return std::all_of(plan_.devices.begin(), plan_.devices.end(), [&](const auto& device) {
    return std::all_of(device.participants.begin(), device.participants.end(), is_current);
  });
}

template <class Traits>
void ElementwiseOptimizer<Traits>::plan_parameter(const at::Tensor& parameter, std::uint64_t number,
                                                  const Options& options, bool of_masters) {
  const auto storage = storage_of(parameter, options.weight_storage(), words());
  const bool has_master = storage == optim::WeightStorage::master;
  at::Tensor gradient = of_masters && has_master ? master_gradient(parameter) : parameter.grad();
  if (!gradient.defined()) {
    if (is_averaged(parameter, options)) {
      plan_.bystanders.push_back({&parameter, options.ema_decay(), storage});
    }
    return;
  }
  const auto run = checked_loop<Traits>(options, storage, parameter, gradient, words());
  State* const state =
      keeps_state<Traits>(options, storage) ? checked_state(parameter, options) : nullptr;
  const at::Device device = parameter.device();
  if (plan_.devices.empty() || plan_.devices.back().device != device) {
    select_device(plan_.devices, device);
  }
  plan_.has_inference = plan_.has_inference || parameter.is_inference();
  plan_.has_bare_half = plan_.has_bare_half || (!has_master && gradient.scalar_type() == at::kHalf);
  plan_.devices.back().participants.push_back(
      {&parameter, std::move(gradient), &options, storage, run, state, number});
}

/// What was unscaled onto the master; undefined where there is none.
template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::master_gradient(const at::Tensor& parameter) const {
  const State* const state = state_of(parameter);
  return state != nullptr && state->master().defined() ? state->master().grad() : at::Tensor();
}

template <class Traits>
optim::WeightStorage ElementwiseOptimizer<Traits>::storage_in(std::size_t group,
                                                              const at::Tensor& parameter) const {
  const auto* const own = dynamic_cast<const Options*>(&param_groups_[group].options());
  const auto wanted = own != nullptr ? own->weight_storage() : options_of(group).weight_storage();
  return storage_of(parameter, wanted, words());
}

template <class Traits>
bool ElementwiseOptimizer<Traits>::keeps_master(std::size_t group,
                                                const at::Tensor& parameter) const {
  return storage_in(group, parameter) == optim::WeightStorage::master;
}

template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::master_param(std::size_t group,
                                                      const at::Tensor& parameter) {
  using optim::WeightStorage;
  const WeightStorage storage = storage_in(group, parameter);
  TORCH_CHECK(storage != WeightStorage::split_master, Traits::kName,
              ": WeightStorage::split_master keeps no master as a tensor; clip with "
              "scaler.step(optimizer, {.max_norm = ...}), or use WeightStorage::master");
  if (storage != WeightStorage::master) return parameter;
  const NoGraphGuard no_graph(parameter.is_inference());
  State& state = state_for(parameter);
  check_shape_of(state.master(), "a master", parameter, words());
  settle_weights(parameter, storage, state);
  state.master() = in_layout_of(dense_parameter(parameter), state.master());
  return state.master();
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

/// For a step that will not be skipped, as far as the host knows.
template <class Traits>
void ElementwiseOptimizer<Traits>::open_state(One& one) {
  if (!keeps_state<Traits>(*one.options, one.storage)) {
    if (average_of(*one.parameter).defined()) state_for(*one.parameter).ema() = at::Tensor();
    return;
  }
  if (one.state == nullptr) one.state = &state_for(*one.parameter);
  one.begins = Traits::begins(*one.options, *one.state);
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
