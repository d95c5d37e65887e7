#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>

// An optimizer's parameters: which have a gradient and take part in a step, what the state keeps of
// them, and in which buckets they are.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Traits>
void ElementwiseOptimizer<Traits>::check_options(const Options& options) {
  Traits::check(options);
  TORCH_CHECK(options.ema_decay() >= 0 && options.ema_decay() < 1, Traits::kName, ": ema_decay is ",
              options.ema_decay(), "; it should be at least 0, which is none, and less than 1");
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
  if (!seen_.look(param_groups_)) return;
  ++parameters_version_;
  try {
    refuse_duplicates(own_parameters(), Traits::kName);
  } catch (...) {
    seen_.forget();
    throw;
  }
}

/// From the buckets where these are the gradients of all that lies in them.
template <class Traits>
GradientSummary ElementwiseOptimizer<Traits>::summarize(const std::vector<at::Tensor>& gradients,
                                                        const at::Tensor& inv_scale) {
  if (buckets_ == nullptr) return FusedOptimizer::summarize(gradients, inv_scale);
  look_at_parameters();
  follow_parameters();
  return buckets_hold_others_ ? FusedOptimizer::summarize(gradients, inv_scale)
                              : buckets_->summarize(inv_scale);
}

/// New ones join the buckets. Who reads but some of what lies there leaves the division of sums to
/// the reduction from here on, and divides for the others those that they have not read yet.
template <class Traits>
void ElementwiseOptimizer<Traits>::follow_parameters() {
  if (buckets_ == nullptr || bucketed_version_ == parameters_version_) return;
  buckets_->add_parameters(missing_from(buckets_->parameters(), own_parameters()));
  const std::vector<at::Tensor> others = missing_from(own_parameters(), buckets_->parameters());
  buckets_hold_others_ = !others.empty();
  bucketed_version_ = parameters_version_;
  dividing_reader_ = buckets_hold_others_ ? nullptr : buckets_->dividing_reader();
  average_rank_sums(others);
}

template <class Traits>
auto ElementwiseOptimizer<Traits>::participants_by_device(bool master_gradients,
                                                          std::vector<Bystander>& bystanders)
    -> std::vector<DeviceParticipants<Traits>> {
  const c10::NoGradGuard no_grad;  // gradients that are sums over ranks may be divided here
  look_at_parameters();
  follow_parameters();
  std::vector<DeviceParticipants<Traits>> all;
  uint64_t number = 0;
  step_options_.clear();
  step_options_.reserve(param_groups_.size());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const Options& options = step_options_.emplace_back(options_of(group));
    check_options(options);
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const uint64_t own_number = number++;
      const auto storage = storage_of(parameter, options.weight_storage(), Traits::kName);
      const bool is_masters = master_gradients && storage == optim::WeightStorage::master;
      const at::Tensor gradient = is_masters ? master_gradient(parameter) : parameter.grad();
      if (!gradient.defined()) {
        if (is_averaged(parameter, options)) {
          bystanders.push_back({&parameter, options.ema_decay(), storage});
        }
        continue;
      }
      const auto run = checked_loop<Traits>(options, storage, parameter, gradient);
      State* const state =
          keeps_state<Traits>(options, storage) ? checked_state(parameter, options) : nullptr;
      const at::Device device = parameter.device();
      if (all.empty() || all.back().device != device) select_device(all, device);
      all.back().participants.push_back(
          {&parameter, gradient, &options, storage, run, state, own_number});
    }
  }
  return all;
}

/// What was unscaled onto the master; undefined where there is none.
template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::master_gradient(const at::Tensor& parameter) const {
  const State* const state = state_of(parameter);
  return state != nullptr && state->master().defined() ? state->master().grad() : at::Tensor();
}

template <class Traits>
void ElementwiseOptimizer<Traits>::clear_gradients_beside_masters() {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      if (!keeps_master(group, parameter) || !parameter.grad().defined()) continue;
      clear_gradient(parameter.grad());
    }
  }
}

template <class Traits>
bool ElementwiseOptimizer<Traits>::keeps_master(std::size_t group,
                                                const at::Tensor& parameter) const {
  const optim::WeightStorage wanted = options_of(group).weight_storage();
  return storage_of(parameter, wanted, Traits::kName) == optim::WeightStorage::master;
}

template <class Traits>
at::Tensor ElementwiseOptimizer<Traits>::master_param(std::size_t group,
                                                      const at::Tensor& parameter) {
  using optim::WeightStorage;
  const auto storage = storage_of(parameter, options_of(group).weight_storage(), Traits::kName);
  TORCH_CHECK(storage != WeightStorage::split_master, Traits::kName,
              ": WeightStorage::split_master keeps no master as a tensor; clip with "
              "scaler.step(optimizer, {.max_norm = ...}), or use WeightStorage::master");
  if (storage != WeightStorage::master) return parameter;
  const NoGraphGuard no_graph(parameter.is_inference());
  State& state = state_for(parameter);
  check_shape_of(state.master(), "a master", parameter, Traits::kName);
  settle_weights(parameter, storage, state);
  state.master() = in_layout_of(dense_parameter(parameter), state.master());
  return state.master();
}

/// Made if there is none.
template <class Traits>
auto ElementwiseOptimizer<Traits>::state_for(const at::Tensor& parameter) -> State& {
  return own_state<State>(state_[parameter.unsafeGetTensorImpl()], Traits::kName);
}

/// Null if there is none. What is kept may be another optimizer's, or another model's.
template <class Traits>
auto ElementwiseOptimizer<Traits>::checked_state(const at::Tensor& parameter,
                                                 const Options& options) -> State* {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found == state_.end()) return nullptr;
  State& state = own_state<State>(found->second, Traits::kName);
  state.count().check();
  check_shape_of(state.master(), "a master", parameter, Traits::kName);
  check_shape_of(state.ema(), "an ema", parameter, Traits::kName);
  for (int k = 0; k < Traits::moments(options); ++k) {
    check_shape_of(Traits::moment(state, k), "a moment", parameter, Traits::kName);
  }
  return &state;
}

/// For a step that will not be skipped, as far as the host knows.
template <class Traits>
void ElementwiseOptimizer<Traits>::open_states(Many& all) {
  for (One& one : all) {
    if (!keeps_state<Traits>(*one.options, one.storage)) {
      if (average_of(*one.parameter).defined()) state_for(*one.parameter).ema() = at::Tensor();
      continue;
    }
    if (one.state == nullptr) one.state = &state_for(*one.parameter);
    one.begins = Traits::begins(*one.options, *one.state);
  }
}

/// The k-th moment, in memory laid out as the parameter's: made when there is none yet, and
/// converted when it was loaded from elsewhere.
template <class Traits>
at::Tensor& ElementwiseOptimizer<Traits>::fitting_moment(const One& one, int k,
                                                         const at::Tensor& parameter) {
  at::Tensor& moment = Traits::moment(*one.state, k);
  const at::ScalarType dtype = moment_dtype(parameter, one.storage);
  if (!moment.defined()) {
    moment = at::zeros_like(parameter, parameter.options().dtype(dtype).requires_grad(false),
                            at::MemoryFormat::Preserve);
    return moment;
  }
  moment = in_layout_of(parameter, moment.to(parameter.device(), dtype));
  return moment;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
