#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/step_engine.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Parameters and options --------------------------------------------------------------------

MEZZO_INLINE StepEngine::StepEngine(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                    std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                    const optim::WeightStorageOptions& weights, const char* name,
                                    OptimizerKind kind)
    : Optimizer(groups, std::move(defaults)), weights_(weights), name_(name), kind_(kind) {}

MEZZO_INLINE void StepEngine::meet_parameters() {
  const std::vector<at::Tensor> all = words().parameters();
  refuse_duplicates(all, words());
  parameters_ = all.size();
  std::vector<void*> gone;
  for (const auto& [address, state] : state_) {
    const auto* const slot = dynamic_cast<const ParamSlot*>(state.get());
    const bool is_owned = slot != nullptr && slot->owner;
    // A state at another address was moved to a parameter that has taken the owner's place.
    if (is_owned && slot->owner->expired() && slot->owner->_unsafe_get_target() == address) {
      gone.push_back(address);
    }
  }
  for (void* const address : gone) state_.erase(address);
}

MEZZO_INLINE at::Tensor StepEngine::master_param(const at::Tensor& parameter) {
  using optim::WeightStorage;
  const WeightStorage storage = storage_of(parameter, weights_.weight_storage, words());
  TORCH_CHECK(storage != WeightStorage::split_master, name_,
              ": WeightStorage::split_master keeps no master as a tensor; clip with "
              "scaler.step(optimizer, {.max_norm = ...}), or use WeightStorage::fp32_master");
  if (storage != WeightStorage::fp32_master) return parameter;
  refuse_average(parameter, words());
  const NoGradInferenceGuard no_graph;
  ParamSlot& slot = make_slot(parameter);
  check_shape_of(slot.master, "a master", parameter, words());
  settle_master(parameter, slot);
  heal_master(parameter, slot);
  slot.show(parameter);
  return slot.master;
}

// --- Slots -------------------------------------------------------------------------------------

/// Checks a state, which may be of another model, or written by the user.
MEZZO_INLINE void StepEngine::check_slot(ParamSlot& slot, const at::Tensor& weights,
                                         const GroupNumbers& numbers) const {
  slot.count().check();
  TORCH_CHECK(!numbers.begins_as_gradient || slot.moment(0).defined() || slot.count().is_new(),
              words(), ": momentum with dampening was switched on after ",
              words().parameter(weights),
              " had taken steps without; set both before the first step, or dampening(0)");
  check_shape_of(slot.master, "a master", weights, words());
  for (int k = 0; k < numbers.moments; ++k) {
    check_shape_of(slot.moment(k), "a moment", weights, words());
  }
}

MEZZO_INLINE ParamSlot& StepEngine::make_slot(const at::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) state = new_state();
  return checked_slot(*state, parameter);
}

MEZZO_INLINE ParamSlot& StepEngine::checked_slot(torch::optim::OptimizerParamState& state,
                                                 const at::Tensor& parameter) const {
  ParamSlot* const slot = slot_in(state);
  TORCH_CHECK(slot != nullptr, words(), ": the state of ", words().parameter(parameter),
              " is not a mezzo::optim::", name_,
              "ParamState; copy states only between optimizers of the same class");
  if (!slot->owner || slot->owner->_unsafe_get_target() != parameter.unsafeGetTensorImpl()) {
    slot->owner.emplace(parameter.getIntrusivePtr());
  }
  return *slot;
}

/// Returns whether a loop can walk a moment beside its parameter.
inline bool is_fitting(const at::Tensor& moment, at::ScalarType dtype,
                       const at::Tensor& parameter) {
  return moment.defined() && moment.scalar_type() == dtype &&
         moment.device() == parameter.device() && is_resolved(moment) &&
         same_strides(parameter, moment);
}

/// Returns the k-th moment in memory laid out as the parameter's: made when there is none yet, and
/// converted when it was loaded from elsewhere or is to be kept otherwise.
inline at::Tensor& fitting_moment(ParamSlot& slot, int k, optim::WeightStorage storage,
                                  const at::Tensor& parameter) {
  at::Tensor& moment = slot.moment(k);
  const at::ScalarType dtype = moment_dtype(parameter, storage);
  if (is_fitting(moment, dtype, parameter)) return moment;
  const bool is_as_kept =
      moment.defined() && moment.scalar_type() == dtype && moment.device() == parameter.device();
  if (!is_as_kept) check_not_capturing(parameter.device(), "a moment");
  if (!moment.defined()) {
    const auto options = parameter.options().requires_grad(false);
    return moment = at::zeros_like(parameter, options.dtype(dtype), at::MemoryFormat::Preserve);
  }
  return moment = with_strides_of(parameter, moment.detach().to(parameter.device(), dtype));
}

// --- The plan ----------------------------------------------------------------------------------

/// Returns whether a step can read a gradient whose dtype is not the parameter's.
inline bool takes_gradient(at::ScalarType parameter, at::ScalarType gradient) {
  if (parameter == at::kDouble && gradient == at::kFloat) return true;
  return (parameter == at::kFloat && is_low_precision(gradient)) ||
         (is_low_precision(parameter) && gradient == at::kFloat);
}

/// Warns once where the storage is for bfloat16 and no weight has 16 bits.
inline void warn_of_unused_storage(optim::WeightStorage storage, const OptimizerWords& optimizer) {
  if (storage != optim::WeightStorage::split_master &&
      storage != optim::WeightStorage::stochastic_rounding)
    return;
  for (const auto& group : optimizer.groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (is_low_precision(parameter)) return;
    }
  }
  TORCH_WARN_ONCE(
      optimizer,
      ": WeightStorage::split_master and stochastic_rounding are for weights of bfloat16, and "
      "this model has none: they do nothing. Cast it with model->to(torch::kBFloat16) "
      "before its optimizer is made.");
}

/// Begins to load the cache lines of an object, such as a tensor.
inline void prefetch_object([[maybe_unused]] const void* object, int lines = 4) {
  for (int line = 0; line < lines; ++line) {
#ifdef __GNUC__
    __builtin_prefetch(static_cast<const char*>(object) + line * 64);
#endif
  }
}

inline void prefetch_storage(const at::TensorImpl* tensor) {
  if (tensor->has_storage()) prefetch_object(tensor->unsafe_storage().unsafeGetStorageImpl(), 2);
}

/// Begins to load what the rows after parameter `i` will read. From a parameter to its gradient,
/// state, moments and their storages is a chain of pointers; the caches hold none of it after a
/// backward pass, and each row would wait for one link after the other. So the next link is loaded
/// of parameters that are one, two and more strides ahead.
MEZZO_INLINE void StepEngine::prefetch(std::span<const at::Tensor> parameters, std::size_t i,
                                       int moments) const {
  constexpr std::size_t kStride = 2;
  const auto ahead = [&](std::size_t strides) -> at::TensorImpl* {
    const std::size_t next = i + strides * kStride;
    return next < parameters.size() ? parameters[next].unsafeGetTensorImpl() : nullptr;
  };
  const auto state_of = [this](at::TensorImpl* parameter) {
    const auto found = state_.find(parameter);
    return found != state_.end() ? found->second.get() : nullptr;
  };
  const auto for_each_moment = [&](at::TensorImpl* parameter, const auto& visit) {
    auto* const state = state_of(parameter);
    ParamSlot* const slot = state != nullptr ? slot_in(*state) : nullptr;
    for (int k = 0; slot != nullptr && k < moments; ++k) {
      visit(slot->moment(k).unsafeGetTensorImpl());
    }
  };
  if (auto* const parameter = ahead(5)) prefetch_object(parameter);
  if (auto* const parameter = ahead(4)) {
    prefetch_object(parameter->autograd_meta(), 2);
    prefetch_storage(parameter);
  }
  if (auto* const parameter = ahead(3)) {
    prefetch_object(state_of(parameter));
    prefetch_object(parameter->grad().unsafeGetTensorImpl());
  }
  if (auto* const parameter = ahead(2)) {
    prefetch_storage(parameter->grad().unsafeGetTensorImpl());
    for_each_moment(parameter, [](const at::TensorImpl* moment) { prefetch_object(moment); });
  }
  if (auto* const parameter = ahead(1)) for_each_moment(parameter, prefetch_storage);
}

MEZZO_INLINE StepPlan StepEngine::plan() {
  const c10::NoGradGuard no_grad;
  StepPlan plan{.is_checked = true};
  std::size_t number = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    plan.groups.push_back(group_numbers(group));
    plan.rows.reserve(plan.rows.size() + param_groups_[group].params().size());
    const std::vector<at::Tensor>& parameters = param_groups_[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      prefetch(parameters, i, plan.groups[group].moments);
      add_row(plan, parameters[i], group, number++);
    }
  }
  if (number != parameters_ || state_.size() > number) meet_parameters();
  if (plan.has_devices) group_by_device(plan);
  if (!plan.rows.empty()) warn_of_unused_storage(weights_.weight_storage, words());
  return plan;
}

MEZZO_INLINE void StepEngine::add_row(StepPlan& plan, const at::Tensor& parameter,
                                      std::size_t group, std::size_t number) {
  const GroupNumbers& numbers = plan.groups[group];
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return;
  const auto storage = storage_of(parameter, weights_.weight_storage, words());
  const bool has_master = storage == optim::WeightStorage::fp32_master;
  const at::ScalarType own = parameter.scalar_type();
  const at::ScalarType given = gradient.scalar_type();
  Row row{{.group = static_cast<std::uint32_t>(group),
           .param_index = static_cast<std::uint32_t>(number),
           .has_extra_moment = numbers.has_extra_moment,
           .model_param_is_fp16 = has_master && own == at::kHalf,
           .storage = storage,
           .parameter_dtype = has_master ? at::kFloat : own,
           .gradient_dtype = given},
          &parameter,
          gradient};
  ParamSlot* slot = nullptr;
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found != state_.end()) row.state = found->second.get();
  if (row.state != nullptr) {
    slot = &checked_slot(*row.state, parameter);
    check_slot(*slot, parameter, numbers);
  }
  check_dense_gradient(parameter, words());
  TORCH_CHECK(loop_for(numbers, storage, row.parameter_dtype) != nullptr &&
                  (own == given || takes_gradient(own, given)),
              words(), ": ", words().parameter(parameter), " has a gradient of ", dtype_name(given),
              "; parameters are of float32, float64, bfloat16 or float16, and gradients of the ",
              "same dtype, for float32 also of bfloat16 or float16, for float64, bfloat16 and "
              "float16 also of float32: cast the model before its optimizer is made");
  if (kernel_backend(parameter.device()) != KernelBackend::aten) set_addresses(row, slot, numbers);
  plan.has_bare_half = plan.has_bare_half || (!has_master && given == at::kHalf);
  plan.has_devices = plan.has_devices || (!plan.rows.empty() &&
                                          gradient.device() != plan.rows.back().gradient.device());
  plan.rows.push_back(std::move(row));
}

MEZZO_INLINE void StepEngine::set_addresses(Row& row, ParamSlot* slot,
                                            const GroupNumbers& numbers) {
  const at::Tensor& parameter = *row.parameter;
  row.pointers.numel = parameter.numel();
  row.pointers.parameter = parameter.mutable_data_ptr();
  const bool is_laid_out = is_resolved(row.gradient) && same_strides(parameter, row.gradient);
  if (is_laid_out && !c10::impl::cow::is_cow_data_ptr(row.gradient.storage().data_ptr())) {
    row.pointers.gradient = const_cast<void*>(row.gradient.const_data_ptr());
  }
  if (slot == nullptr) return;
  const at::ScalarType dtype = moment_dtype(parameter, row.storage);
  for (int k = 0; k < numbers.moments; ++k) {
    const at::Tensor& moment = slot->moment(k);
    if (is_fitting(moment, dtype, parameter)) row.pointers.moments[k] = moment.mutable_data_ptr();
  }
}

MEZZO_INLINE GradStats StepEngine::read(const StepPlan& plan, const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  const bool has_addresses = !plan.rows.empty() && !plan.has_devices &&
                             std::all_of(plan.rows.begin(), plan.rows.end(), [](const Row& row) {
                               return row.pointers.gradient != nullptr;
                             });
  if (!has_addresses) return FusedOptimizer::read(plan, inv_scale);
  ContiguousRanges memory;
  for (const Row& row : plan.rows) {
    memory.add(row.gradient, {row.pointers.gradient, row.pointers.numel, row.gradient_dtype});
  }
  return compute_grad_stats_of_ranges(memory.all(),
                                      to_device(inv_scale, plan.rows.front().parameter->device()));
}

// --- Applying it -------------------------------------------------------------------------------

/// Throws, before anything is written or counted, for a step that ATen's kernels cannot take.
MEZZO_INLINE void StepEngine::check_for_aten(const Row& row, const GroupNumbers& numbers) const {
  TORCH_CHECK(numbers.missing_in_aten == nullptr, name_, ": ", words().parameter(*row.parameter),
              " has gradients on a device where mezzo has no kernel, and ", numbers.missing_in_aten,
              "; link the CMake target mezzo::cuda, or keep the parameters on the CPU");
  TORCH_CHECK(row.storage == optim::WeightStorage::plain ||
                  row.storage == optim::WeightStorage::fp32_master,
              name_,
              ": WeightStorage::split_master and stochastic_rounding need mezzo's kernels, which ",
              "there are for the CPU, and for CUDA where the CMake target mezzo::cuda is linked; ",
              words().parameter(*row.parameter), " has none; use WeightStorage::fp32_master there");
}

MEZZO_INLINE void StepEngine::apply_on_devices(StepPlan& plan, const GradStats& stats,
                                               const StepOptions& options, bool with_aten) {
  const NoGradInferenceGuard no_graph;  // what is made are plain tensors under InferenceMode too
  bool is_counted = false;
  set_lrs(plan);
  for (const Row& row : plan.rows) {  // before any device has stepped
    const at::Device device = row.parameter->device();
    if (!with_aten && kernel_backend(device) != KernelBackend::aten) continue;
    check_for_aten(row, plan.groups[row.group]);
  }
  for (auto begin = plan.rows.begin(); begin != plan.rows.end();) {
    const at::Device device = begin->parameter->device();
    auto end = plan.has_devices ? begin + 1 : plan.rows.end();
    while (end != plan.rows.end() && end->parameter->device() == device) ++end;
    const Rows rows(begin, end);
    const GradStats own = stats.to(device);
    switch (with_aten ? KernelBackend::aten : kernel_backend(device)) {
      case KernelBackend::cpu:
        step_cpu(rows, plan.groups, own, options);
        break;
      case KernelBackend::cuda:
        is_counted = !plan.has_devices;
        step_on_cuda(rows, plan.groups, own, options, is_counted);
        break;
      case KernelBackend::aten:
        step_with_aten(rows, plan.groups, own, options);
    }
    begin = end;
  }
  clear_autocast_cache();
  if (!is_counted) count_applied(plan, stats);
}

/// Sets the rates of a step under a schedule: on a device the bases, which it multiplies, otherwise
/// the rates of the step.
MEZZO_INLINE void StepEngine::set_lrs(StepPlan& plan) {
  if (!has_schedule() || plan.rows.empty()) return;
  const bool on_device =
      !plan.has_devices && !lr_factors_.is_lr_written(param_groups_) &&
      kernel_backend(plan.rows.front().parameter->device()) != KernelBackend::cpu;
  const std::vector<double> rates = on_device ? base_lrs() : lrs();
  for (std::size_t group = 0; group < plan.groups.size(); ++group) {
    plan.groups[group].lr = rates[group];
    plan.groups[group].follows_table = on_device;
  }
}

/// Counts the step on the device that decides whether it is applied. Of several devices one counts
/// for all: they step together or not at all. A step without any gradient counts too. If other
/// ranks have rows and this one has none, the device of the statistics counts.
MEZZO_INLINE void StepEngine::count_applied(const StepPlan& plan, const GradStats& stats) {
  at::Device device = at::kCPU;
  if (applied_steps_.on_device().defined()) {  // a captured step may go on counting there
    device = applied_steps_.on_device().device();
  } else if (plan.has_rows_elsewhere && stats.defined()) {
    device = stats.found_inf.device();
  }
  const auto steps_there = [&](const Row& row) { return row.parameter->device() == device; };
  if (!plan.rows.empty() && std::none_of(plan.rows.begin(), plan.rows.end(), steps_there)) {
    device = plan.rows.front().parameter->device();
  }
  count_step(applied_steps_.count(), device, stats.to(device).found_inf);
}

/// Makes the slot of a row if it needs one, and brings the weights that it keeps up to date.
/// Returns the slot; null where nothing is kept.
MEZZO_INLINE ParamSlot* StepEngine::open_slot(Row& row, const GroupNumbers& numbers) {
  using optim::WeightStorage;
  const bool keeps = numbers.moments > 0 || row.storage != WeightStorage::plain;
  ParamSlot* const slot = row.state != nullptr ? slot_in(*row.state)
                          : keeps              ? &make_slot(*row.parameter)
                                               : nullptr;
  if (slot == nullptr) return nullptr;
  if (row.state == nullptr) row.state = state_[row.parameter->unsafeGetTensorImpl()].get();
  if (row.storage == WeightStorage::fp32_master) {
    settle_master(*row.parameter, *slot);
  } else if (row.storage == WeightStorage::split_master) {
    settle_lower_half(*row.parameter, *slot);
  } else {
    slot->master = slot->lower_half = at::Tensor();
  }
  if (keeps) return slot;
  row.state = nullptr;
  return nullptr;
}

/// Returns whether two gradients share memory: then none may be cleared before all are read.
inline bool share_gradients(std::span<const StepPlan::Row> rows) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(rows.size());
  for (const StepPlan::Row& row : rows) gradients.push_back(row.gradient);
  return find_overlap(gradients).has_value();
}

MEZZO_INLINE ParamSlot* StepEngine::prepare(Row& row, const GroupNumbers& numbers, bool clear,
                                            Prepared& prepared) {
  ParamSlot* const slot = open_slot(row, numbers);
  const at::Tensor& parameter = *row.parameter;
  ParamPointers& pointers = row.pointers;
  if (pointers.parameter == nullptr)
    set_addresses(row, slot, numbers);  // kernels were loaded since
  if (pointers.gradient == nullptr) {   // lazy, or no loop can walk it beside its parameter
    at::Tensor gradient = with_strides_of(parameter, row.gradient);
    if (clear && !gradient.is_same(row.gradient)) prepared.uncleared.push_back(row.gradient);
    pointers.gradient =
        clear ? gradient.mutable_data_ptr() : const_cast<void*>(gradient.const_data_ptr());
    prepared.gradients.push_back(std::move(gradient));
  }
  if (slot == nullptr) return nullptr;
  for (int k = 0; k < numbers.moments; ++k) {
    if (pointers.moments[k] != nullptr) continue;
    pointers.moments[k] = fitting_moment(*slot, k, row.storage, parameter).mutable_data_ptr();
  }
  if (row.storage == optim::WeightStorage::fp32_master) {
    pointers.low_bits_or_model_param = pointers.parameter;
    pointers.parameter = slot->master.mutable_data_ptr();
  } else if (row.storage == optim::WeightStorage::split_master) {
    pointers.low_bits_or_model_param = slot->lower_half.mutable_data_ptr();
  }
  return slot;
}

MEZZO_INLINE void StepEngine::finish(Rows rows, std::span<const CpuGroupArgs> calls, bool clears,
                                     bool are_cleared, const Prepared& prepared) {
  for (const at::Tensor& gradient : prepared.uncleared) zero_grad_(gradient);
  for (const Row& row : rows) {
    if (clears && !are_cleared) zero_grad_(row.gradient);
    if (are_cleared) bump_version(row.gradient);
    bump_version(*row.parameter);
    if (row.state == nullptr) continue;
    ParamSlot& slot = *slot_in(*row.state);
    if (!calls.empty()) slot.count().set(static_cast<int64_t>(calls[row.group].step));
    if (slot.master.defined()) bump_version(slot.master);
    slot.end_step();
  }
}

// --- The CPU -----------------------------------------------------------------------------------

MEZZO_INLINE void StepEngine::step_cpu(Rows rows, const Groups& groups, const GradStats& stats,
                                       const StepOptions& options) {
  const std::optional<GradMultipliers> multipliers = grad_multipliers(stats, options.max_norm);
  if (!multipliers) {
    for (const Row& row : rows) {
      if (row.state != nullptr) slot_in(*row.state)->end_step();
      if (options.zero_grad) zero_grad_(row.gradient);
    }
    return;
  }
  const bool clears_on_the_way = options.zero_grad && !share_gradients(rows);
  Prepared prepared;
  std::vector<CpuGroupArgs> calls;
  const Row* last = nullptr;
  std::size_t last_group = 0;
  for (Row& row : rows) {
    const GroupNumbers& numbers = groups[row.group];
    ParamSlot* const slot = prepare(row, numbers, clears_on_the_way, prepared);
    const int64_t step = slot != nullptr ? slot->count().value() + 1 : 1;
    const bool is_alike = last != nullptr && last_group == row.group &&
                          calls.back().step == static_cast<std::uint64_t>(step) &&
                          last->storage == row.storage &&
                          last->parameter_dtype == row.parameter_dtype;
    if (!is_alike) {
      calls.push_back({loop_for(numbers, row.storage, row.parameter_dtype),
                       coefficients(numbers, step), static_cast<std::uint64_t>(step)});
    }
    last_group = row.group;
    last = &row;
    row.group = static_cast<std::uint32_t>(calls.size() - 1);
  }
  run_step_cpu(rows, calls, {.multipliers = *multipliers, .seed = weights_.seed},
               clears_on_the_way);
  finish(rows, calls, options.zero_grad, clears_on_the_way, prepared);
}

// --- CUDA, and devices without kernels of mezzo's -----------------------------------------------

inline DeviceStepArgs device_step_args(const GradStats& stats, const StepOptions& options) {
  DeviceStepArgs inputs{.max_norm = options.max_norm, .zero_grad = options.zero_grad};
  if (!stats.defined()) return inputs;
  inputs.inv_scale = stats.inv_scale.const_data_ptr<float>();
  inputs.found_inf = stats.found_inf.const_data_ptr<float>();
  if (stats.norm_sq.defined()) {
    inputs.norm_sq = stats.norm_sq.const_data_ptr<double>();
  }
  return inputs;
}

MEZZO_INLINE void StepEngine::step_on_cuda(Rows rows, const Groups& groups, const GradStats& stats,
                                           const StepOptions& options, bool counts_applied) {
  const at::Device device = rows.front().parameter->device();
  DeviceStepArgs inputs = device_step_args(stats, options);
  inputs.zero_grad = inputs.zero_grad && !share_gradients(rows);
  at::Tensor applied;
  if (counts_applied) applied = counts_on(device, {applied_steps_.count()}).front();
  if (groups.front().follows_table) {
    const at::Tensor& factors = lr_factors_.on(device);
    inputs.applied_steps = applied.const_data_ptr<float>();
    inputs.lr_factors = factors.const_data_ptr<double>();
    inputs.lr_factor_count = factors.numel();
  }
  Prepared prepared;
  std::vector<DeviceGroupArgs> step_groups;
  for (const GroupNumbers& group : groups) {
    step_groups.push_back({group.functor_args, group.lr, weights_.seed});
  }
  std::vector<ParamArgs> step_rows;
  std::vector<StepCount> counts;
  for (Row& row : rows) {
    const GroupNumbers& numbers = groups[row.group];
    ParamSlot* const slot = prepare(row, numbers, inputs.zero_grad, prepared);
    step_rows.push_back(row);
    if (slot != nullptr) counts.push_back(slot->count());
  }
  std::vector<float*> counters;
  const std::vector<at::Tensor> on_device = counts_on(device, counts);
  auto next = on_device.begin();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].state == nullptr) continue;
    step_rows[i].state_step = (next++)->mutable_data_ptr<float>();
    counters.push_back(step_rows[i].state_step);
  }
  cuda_kernels()->step_(device, kind_, step_rows, step_groups, inputs);
  if (counts_applied) counters.push_back(applied.mutable_data_ptr<float>());
  if (!counters.empty()) {
    cuda_kernels()->increment_state_steps_(device, counters, inputs.found_inf);
  }
  finish(rows, {}, options.zero_grad, inputs.zero_grad, prepared);
}

inline AtenVerdict aten_verdict(const GradStats& stats, double max_norm) {
  if (!stats.defined()) return {};
  at::Tensor grad_scale = stats.inv_scale.reciprocal();  // ATen's kernels divide by it
  const bool clips = max_norm != std::numeric_limits<double>::infinity();
  if (clips && stats.norm_sq.defined()) {
    const at::Tensor norm = stats.norm_sq.sqrt();
    grad_scale = norm.add(1e-6).div(max_norm).clamp_min(1.0).mul(grad_scale).to(at::kFloat);
  }
  // ATen's kernels skip where it is 1, and a sum of several checks may be more.
  return {grad_scale, stats.found_inf.ne(0).to(at::kFloat), std::nullopt};
}

/// Steps through ATen's fused optimizers, without a wait.
MEZZO_INLINE void StepEngine::step_with_aten(Rows rows, const Groups& groups,
                                             const GradStats& stats, const StepOptions& options) {
  const at::Device device = rows.front().parameter->device();
  AtenVerdict own = aten_verdict(stats, options.max_norm);
  if (groups.front().follows_table) {
    const at::Tensor& factors = lr_factors_.on(device);
    const at::Tensor applied = counts_on(device, {applied_steps_.count()}).front();
    own.lr_factor =
        factors.take(applied.clamp_max(factors.numel() - 1).to(at::kLong)).to(at::kFloat);
  }
  std::vector<StepCount> kept;
  for (Row& row : rows) {
    ParamSlot* const slot = open_slot(row, groups[row.group]);
    if (slot != nullptr) kept.push_back(slot->count());
  }
  const std::vector<at::Tensor> counts = counts_on(device, kept);
  std::vector<AtenLists> calls;  // rows come group by group
  for (const Row& row : rows) {
    at::Tensor parameter = *row.parameter;
    ParamSlot* const slot = row.state != nullptr ? slot_in(*row.state) : nullptr;
    if (row.storage == optim::WeightStorage::fp32_master) {
      heal_master(parameter, *slot);
      parameter = slot->master;
    }
    const bool joins = !calls.empty() && calls.back().group == row.group &&
                       calls.back().parameters.back().scalar_type() == parameter.scalar_type();
    if (!joins) calls.push_back({row.group});
    AtenLists& lists = calls.back();
    lists.parameters.push_back(parameter);
    // ATen's kernels write unscaled gradients back, and a step leaves gradients as they are.
    const bool copies = own.grad_scale.has_value() || row.gradient.is_inference();
    lists.gradients.push_back(with_strides_of(
        parameter, row.gradient.to(parameter.scalar_type(), /*non_blocking=*/false, copies)));
    if (slot == nullptr) continue;
    lists.counts.push_back(slot->count().on_device());
    for (int k = 0; k < groups[row.group].moments; ++k) {
      lists.moments[static_cast<std::size_t>(k)].push_back(
          fitting_moment(*slot, k, row.storage, *row.parameter));
    }
  }
  // ATen's kernels expect counts of this step, also where they skip it.
  if (!counts.empty()) at::_foreach_add_(counts, 1);
  const auto round_masters = [&] {
    for (const Row& row : rows) {
      if (row.storage != optim::WeightStorage::fp32_master) continue;
      row.parameter->copy_(slot_in(*row.state)->master);
    }
  };
  auto call = calls.begin();
  try {
    for (; call != calls.end(); ++call) aten_step(groups[call->group], *call, own);
  } catch (...) {
    for (; call != calls.end(); ++call) {  // steps that were not taken
      if (!call->counts.empty()) at::_foreach_add_(call->counts, -1);
    }
    round_masters();  // of the calls before the one that threw
    throw;
  }
  if (!counts.empty() && own.found_inf) at::_foreach_add_(counts, own.found_inf->neg());
  round_masters();
  finish(rows, {}, options.zero_grad, /*are_cleared=*/false, {});
}

// --- Files -------------------------------------------------------------------------------------

MEZZO_INLINE void StepEngine::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  FiledOptimizer filed;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    (void)group_numbers(group);  // of this class, or it throws
    filed.param_groups().push_back(param_groups_[group]);
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      refuse_average(parameter, words());
      filed.state()[found->first] = filed_state(parameter, *found->second);
    }
  }
  write_file(archive, filed);
}

/// Serialises as the base classes, since a state may be libtorch's.
MEZZO_INLINE void StepEngine::write_file(torch::serialize::OutputArchive& archive,
                                         const FiledOptimizer& filed) const {
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, filed);
  archive.write(kClassKey, c10::IValue(std::string(name_)));
  save_progress(archive);
  if (weights_ == optim::WeightStorageOptions()) return;
  archive.write("storage", c10::IValue(static_cast<int64_t>(weights_.weight_storage)));
  archive.write("seed", c10::IValue(static_cast<int64_t>(weights_.seed)));
}

/// Reads the storage and the seed. A file without them is of plain weights, which need no state of
/// their own and can go on in any storage.
MEZZO_INLINE optim::WeightStorageOptions StepEngine::filed_weights(
    torch::serialize::InputArchive& archive) const {
  using optim::WeightStorage;
  c10::IValue storage, seed;
  if (!archive.try_read("storage", storage)) return weights_;
  const int64_t number = storage.toInt();
  TORCH_CHECK(
      number >= 0 && number <= static_cast<int64_t>(WeightStorage::stochastic_rounding),
      "The archive of an optimizer has the weight_storage ", number,
      ", which this version of mezzo does not know; read it with the version that wrote it");
  archive.read("seed", seed);
  optim::WeightStorageOptions filed{static_cast<WeightStorage>(number),
                                    static_cast<std::uint64_t>(seed.toInt())};
  if (filed.weight_storage == WeightStorage::plain) filed.weight_storage = weights_.weight_storage;
  return filed;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
