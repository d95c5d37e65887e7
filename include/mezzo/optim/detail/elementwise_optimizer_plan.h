#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/member_table.h>

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <utility>

// An optimizer's parameters: which have a gradient and take part in a step, whether that can be
// done, which are trained as masters. All is checked before anything
// is written.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether anything is remembered of a parameter: of one that is rounded stochastically at least
/// how many steps there were, for each has random bits of its own.
template <class Traits>
bool keeps_state(const typename Traits::Options& options, optim::WeightStorage storage) {
  return Traits::has_state(options) || options.ema_decay() != 0 ||
         storage != optim::WeightStorage::plain;
}

inline void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient,
                           const OptimizerWords& optimizer) {
  TORCH_CHECK(!parameter.is_inference() || c10::InferenceMode::is_enabled(), optimizer, ": ",
              optimizer.parameter(parameter),
              " was made under c10::InferenceMode, outside of which it cannot be written; make or "
              "load the model outside of it, or step inside of it");
  TORCH_CHECK(gradient.layout() == at::kStrided && parameter.layout() == at::kStrided, optimizer,
              " takes dense parameters and gradients, and the gradient of ",
              optimizer.parameter(parameter), " is ", tensor_words(gradient),
              "; give this parameter to a torch::optim::SGD of its own, which takes sparse ones, "
              "or make the embedding with sparse(false)");
  TORCH_CHECK(gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              optimizer, ": ", optimizer.parameter(parameter), " has a gradient that is ",
              tensor_words(gradient),
              "; call zero_grad() after the model was moved or resized, and backward() after that");
  TORCH_CHECK(at::has_internal_overlap(parameter) != at::MemOverlap::Yes, optimizer,
              ": several elements of ", optimizer.parameter(parameter),
              " are the same memory, as expand() makes them; give the tensor that was expanded");
}

/// The CPU's loop for what is kept of a parameter; other devices have the same.
template <class Traits>
typename Traits::Loop checked_loop(const typename Traits::Options& options,
                                   optim::WeightStorage storage, const at::Tensor& parameter,
                                   const at::Tensor& gradient, const OptimizerWords& optimizer) {
  check_gradient(parameter, gradient, optimizer);
  const at::ScalarType own = parameter.scalar_type();
  const auto kept = storage == optim::WeightStorage::master ? at::kFloat : own;
  const auto run = Traits::loop(options, storage, kept, gradient.scalar_type(), best_isa());
  TORCH_CHECK(run, optimizer, ": ", optimizer.parameter(parameter), " has a gradient of ",
              dtype_name(gradient.scalar_type()), "; parameters are of float32, float64, bfloat16 ",
              "or float16, and gradients of the same dtype, for float32 also of bfloat16 or ",
              "float16, and for float64 of float32: cast the model before its optimizer is made");
  return run;
}

/// Makes `device`'s entry the last.
template <class Traits>
void select_device(std::vector<DeviceParticipants<Traits>>& all, at::Device device) {
  for (DeviceParticipants<Traits>& one : all) {
    if (one.device != device) continue;
    std::swap(one, all.back());
    return;
  }
  all.push_back({device, {}});
}

template <class Traits>
void ElementwiseOptimizer<Traits>::check_options(const Options& options) {
  check_members(Traits::kName, options);
  Traits::check(options);
  TORCH_CHECK(is_at_least(options.ema_decay(), 0) && options.ema_decay() < 1, Traits::kName,
              ": ema_decay is ", options.ema_decay(),
              "; it should be at least 0 (no average) and less than 1");
}

/// A group may be empty, as one rank's part of a model can be; a model without parameters is one
/// whose layers were not registered.
template <class Traits>
void ElementwiseOptimizer<Traits>::check_has_parameters(bool has_parameters) {
  TORCH_CHECK(
      has_parameters, Traits::kName,
      ": optimizer got an empty parameter list. In C++: give model->parameters() of a model "
      "that has registered its layers with register_module");
}

template <class Traits>
auto ElementwiseOptimizer<Traits>::options_of(std::size_t group) const -> Options {
  return group_options<Options>(param_groups_, group, *defaults_, Traits::kName);
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
  try {
    refuse_duplicates(own_parameters(), words());
  } catch (...) {
    seen_.forget();
    throw;
  }
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
