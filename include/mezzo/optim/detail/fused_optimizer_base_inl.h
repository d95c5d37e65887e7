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
#include <mezzo/optim/detail/ema_params.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/gradients.h>

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

MEZZO_INLINE FusedOptimizerBase::FusedOptimizerBase(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::unique_ptr<torch::optim::OptimizerOptions> defaults,
    const optim::WeightStorageOptions& storage_options, const char* name, OptimizerKind kind)
    : Optimizer(groups, std::move(defaults)),
      storage_options_(storage_options),
      name_(name),
      kind_(kind) {}

MEZZO_INLINE void FusedOptimizerBase::check_parameters() {
  const std::vector<at::Tensor> all = description().parameters();
  check_no_duplicates(all, description());
  num_checked_params_ = all.size();
  erase_expired_state();
}

MEZZO_INLINE void FusedOptimizerBase::erase_expired_state() {
  std::vector<void*> expired;
  for (const auto& [address, state] : state_) {
    const auto* const fused_state = dynamic_cast<const FusedParamStateBase*>(state.get());
    const bool has_weak_param = fused_state != nullptr && fused_state->weak_param;
    // A state at another address was moved to a new parameter.
    if (has_weak_param && fused_state->weak_param->expired() &&
        fused_state->weak_param->_unsafe_get_target() == address) {
      expired.push_back(address);
    }
  }
  for (void* const address : expired) state_.erase(address);
}

MEZZO_INLINE at::Tensor FusedOptimizerBase::master_param(const at::Tensor& parameter) {
  using optim::WeightStorage;
  const WeightStorage storage =
      select_weight_storage(parameter, storage_options_.weight_storage, description());
  TORCH_CHECK(storage != WeightStorage::split_master, name_,
              ": WeightStorage::split_master has no master tensor; clip with "
              "scaler.step(optimizer, {.max_norm = ...}), or use WeightStorage::fp32_master");
  if (storage != WeightStorage::fp32_master) return parameter;
  check_no_ema_guard(parameter, description());
  const NoGradInferenceGuard no_grad;
  FusedParamStateBase& fused_state = get_or_create_state(parameter);
  check_state_shape(fused_state.master, "a master", parameter, description());
  prepare_master(parameter, fused_state);
  update_master_from_param(parameter, fused_state);
  fused_state.expose_master(parameter);
  return fused_state.master;
}

/// Checks a state, which the user may have written or copied from another model.
MEZZO_INLINE void FusedOptimizerBase::check_state(FusedParamStateBase& fused_state,
                                                  const at::Tensor& parameter,
                                                  const GroupHyperParams& hyper_params) const {
  fused_state.step_count().check();
  TORCH_CHECK(!hyper_params.has_dampening || fused_state.moment(0).defined() ||
                  fused_state.step_count().is_zero_on_host(),
              description(), ": momentum with dampening was enabled after ",
              description().describe_param(parameter),
              " had been stepped without it; set both before the first step, or dampening(0)");
  check_state_shape(fused_state.master, "a master", parameter, description());
  for (int k = 0; k < hyper_params.num_moments; ++k) {
    check_state_shape(fused_state.moment(k), "a moment", parameter, description());
  }
}

MEZZO_INLINE FusedParamStateBase& FusedOptimizerBase::get_or_create_state(
    const at::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) state = make_param_state();
  return bind_state(*state, parameter);
}

MEZZO_INLINE FusedParamStateBase& FusedOptimizerBase::bind_state(
    torch::optim::OptimizerParamState& state, const at::Tensor& parameter) const {
  FusedParamStateBase* const fused_state = as_fused_state(state);
  TORCH_CHECK(fused_state != nullptr, description(), ": the state of ",
              description().describe_param(parameter), " is not a mezzo::optim::", name_,
              "ParamState; copy states only between optimizers of the same class");
  if (!fused_state->weak_param ||
      fused_state->weak_param->_unsafe_get_target() != parameter.unsafeGetTensorImpl()) {
    fused_state->weak_param.emplace(parameter.getIntrusivePtr());
  }
  return *fused_state;
}

/// Returns the k-th moment as kernels update it. Creates it if it is undefined and converts it if
/// it has another dtype, device or layout.
inline at::Tensor& ensure_moment(FusedParamStateBase& fused_state, int k,
                                 optim::WeightStorage storage, const at::Tensor& parameter) {
  at::Tensor& moment = fused_state.moment(k);
  const at::ScalarType dtype = moment_dtype(parameter, storage);
  if (moment.defined()) return moment = match_param_layout(parameter, moment, dtype, "a moment");
  check_not_capturing(parameter.device(), "a moment");
  const auto options = parameter.options().requires_grad(false);
  return moment = at::zeros_like(parameter, options.dtype(dtype), at::MemoryFormat::Preserve);
}

/// Returns whether a step supports a gradient dtype other than the parameter's.
inline bool is_gradient_dtype_supported(at::ScalarType parameter, at::ScalarType gradient) {
  if (parameter == at::kDouble && gradient == at::kFloat) return true;
  return (parameter == at::kFloat && is_low_precision(gradient)) ||
         (is_low_precision(parameter) && gradient == at::kFloat);
}

/// Warns once if the storage is for bfloat16 and no parameter has 16 bits.
inline void warn_unused_storage(optim::WeightStorage storage,
                                const OptimizerDescription& optimizer) {
  const bool needs_bfloat16 = storage == optim::WeightStorage::split_master ||
                              storage == optim::WeightStorage::stochastic_rounding;
  if (!needs_bfloat16) return;
  for (const auto& group : optimizer.groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (is_low_precision(parameter)) return;
    }
  }
  TORCH_WARN_ONCE(
      optimizer,
      ": WeightStorage::split_master and stochastic_rounding are for bfloat16 parameters, and "
      "this model has none: they have no effect. Cast it with model->to(torch::kBFloat16) "
      "before the optimizer is constructed.");
}

/// Prefetches the first cache lines of an object.
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

/// Prefetches what the parameters after `i` will read. Parameter, gradient, state, moments and
/// their storages are a chain of pointers, none of it cached after a backward pass. To overlap the
/// misses, each link is loaded for a parameter one stride further ahead than the next link.
MEZZO_INLINE void FusedOptimizerBase::prefetch(std::span<const at::Tensor> parameters,
                                               std::size_t i, int num_moments) const {
  constexpr std::size_t kStride = 2;
  const auto ahead = [&](std::size_t strides) -> at::TensorImpl* {
    const std::size_t next = i + strides * kStride;
    return next < parameters.size() ? parameters[next].unsafeGetTensorImpl() : nullptr;
  };
  const auto find_state = [this](at::TensorImpl* parameter) {
    const auto found = state_.find(parameter);
    return found != state_.end() ? found->second.get() : nullptr;
  };
  const auto for_each_moment = [&](at::TensorImpl* parameter, const auto& visit) {
    auto* const state = find_state(parameter);
    FusedParamStateBase* const fused_state = state != nullptr ? as_fused_state(*state) : nullptr;
    for (int k = 0; fused_state != nullptr && k < num_moments; ++k) {
      visit(fused_state->moment(k).unsafeGetTensorImpl());
    }
  };
  if (auto* const parameter = ahead(5)) prefetch_object(parameter);
  if (auto* const parameter = ahead(4)) {
    prefetch_object(parameter->autograd_meta(), 2);
    prefetch_storage(parameter);
  }
  if (auto* const parameter = ahead(3)) {
    prefetch_object(find_state(parameter));
    prefetch_object(parameter->grad().unsafeGetTensorImpl());
  }
  if (auto* const parameter = ahead(2)) {
    prefetch_storage(parameter->grad().unsafeGetTensorImpl());
    for_each_moment(parameter, [](const at::TensorImpl* moment) { prefetch_object(moment); });
  }
  if (auto* const parameter = ahead(1)) for_each_moment(parameter, prefetch_storage);
}

MEZZO_INLINE StepPlan FusedOptimizerBase::plan() {
  const c10::NoGradGuard no_grad;
  StepPlan plan{.has_dense_gradients = true};
  std::size_t param_index = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    plan.groups.push_back(read_group_hyperparams(group));
    plan.params.reserve(plan.params.size() + param_groups_[group].params().size());
    const std::vector<at::Tensor>& parameters = param_groups_[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i, ++param_index) {
      if (!parameters[i].mutable_grad().defined()) continue;
      prefetch(parameters, i, plan.groups[group].num_moments);
      add_param(plan, parameters[i], group, param_index);
    }
  }
  if (param_index != num_checked_params_ || state_.size() > param_index) check_parameters();
  if (plan.spans_devices) group_by_device(plan);
  if (!plan.params.empty()) warn_unused_storage(storage_options_.weight_storage, description());
  return plan;
}

MEZZO_INLINE void FusedOptimizerBase::add_param(StepPlan& plan, const at::Tensor& parameter,
                                                std::size_t group, std::size_t param_index) {
  const GroupHyperParams& hyper_params = plan.groups[group];
  const at::Tensor& gradient = parameter.grad();
  const auto storage =
      select_weight_storage(parameter, storage_options_.weight_storage, description());
  const bool has_master = storage == optim::WeightStorage::fp32_master;
  const at::ScalarType param_dtype = parameter.scalar_type();
  const at::ScalarType gradient_dtype = gradient.scalar_type();
  Param param{{.group = static_cast<std::uint32_t>(group),
               .param_index = static_cast<std::uint32_t>(param_index),
               .has_extra_moment = hyper_params.has_extra_moment,
               .model_param_is_fp16 = has_master && param_dtype == at::kHalf,
               .storage = storage,
               .parameter_dtype = has_master ? at::kFloat : param_dtype,
               .gradient_dtype = gradient_dtype},
              &parameter,
              gradient};
  FusedParamStateBase* fused_state = nullptr;
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  if (found != state_.end()) param.state = found->second.get();
  if (param.state != nullptr) {
    fused_state = &bind_state(*param.state, parameter);
    check_state(*fused_state, parameter, hyper_params);
  }
  check_dense_gradient(parameter, description());
  TORCH_CHECK(select_step_kernel(hyper_params, storage, param.parameter_dtype) != nullptr &&
                  (param_dtype == gradient_dtype ||
                   is_gradient_dtype_supported(param_dtype, gradient_dtype)),
              description(), ": ", description().describe_param(parameter), " has a gradient of ",
              dtype_name(gradient_dtype),
              "; parameters should be float32, float64, bfloat16 or float16, and gradients of the ",
              "same dtype, for float32 also bfloat16 or float16, for float64, bfloat16 and "
              "float16 also float32: cast the model before the optimizer is constructed");
  if (kernel_backend(parameter.device()) != KernelBackend::aten) {
    set_pointers(param, fused_state, hyper_params);
  }
  plan.has_fp16_without_master =
      plan.has_fp16_without_master || (!has_master && gradient_dtype == at::kHalf);
  plan.spans_devices =
      plan.spans_devices ||
      (!plan.params.empty() && gradient.device() != plan.params.back().gradient.device());
  plan.params.push_back(std::move(param));
}

MEZZO_INLINE void FusedOptimizerBase::set_pointers(Param& param, FusedParamStateBase* fused_state,
                                                   const GroupHyperParams& hyper_params) {
  const at::Tensor& parameter = *param.parameter;
  param.pointers.numel = parameter.numel();
  param.pointers.parameter = parameter.mutable_data_ptr();
  const bool has_same_layout =
      is_resolved(param.gradient) && same_strides(parameter, param.gradient);
  if (has_same_layout && !c10::impl::cow::is_cow_data_ptr(param.gradient.storage().data_ptr())) {
    param.pointers.gradient = const_cast<void*>(param.gradient.const_data_ptr());
  }
  if (fused_state == nullptr) return;
  const at::ScalarType dtype = moment_dtype(parameter, param.storage);
  for (int k = 0; k < hyper_params.num_moments; ++k) {
    const at::Tensor& moment = fused_state->moment(k);
    if (!has_param_layout(parameter, moment, dtype)) continue;
    param.pointers.moments[k] = moment.mutable_data_ptr();
  }
}

MEZZO_INLINE GradStats FusedOptimizerBase::grad_stats(const StepPlan& plan,
                                                      const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  const bool has_pointers =
      !plan.params.empty() && !plan.spans_devices &&
      std::all_of(plan.params.begin(), plan.params.end(),
                  [](const Param& param) { return param.pointers.gradient != nullptr; });
  if (!has_pointers) return MixedPrecisionOptimizer::grad_stats(plan, inv_scale);
  ContiguousRanges ranges;
  for (const Param& param : plan.params) {
    ranges.add(param.gradient,
               {param.pointers.gradient, param.pointers.numel, param.gradient_dtype});
  }
  return compute_grad_stats_of_ranges(
      ranges.ranges(), to_device(inv_scale, plan.params.front().parameter->device()));
}

/// \throws c10::Error, before any write, for a step that ATen's kernels do not support
MEZZO_INLINE void FusedOptimizerBase::check_aten_supports(
    const Param& param, const GroupHyperParams& hyper_params) const {
  TORCH_CHECK(hyper_params.aten_unsupported_reason == nullptr, name_, ": ",
              description().describe_param(*param.parameter),
              " is on a device without mezzo kernels, and ", hyper_params.aten_unsupported_reason,
              "; link the CMake target mezzo::cuda, or keep the parameters on the CPU");
  TORCH_CHECK(
      param.storage == optim::WeightStorage::plain ||
          param.storage == optim::WeightStorage::fp32_master,
      name_, ": WeightStorage::split_master and stochastic_rounding need mezzo's kernels, which ",
      "exist for the CPU, and for CUDA if the CMake target mezzo::cuda is linked; ",
      description().describe_param(*param.parameter), " has none; use WeightStorage::fp32_master");
}

MEZZO_INLINE void FusedOptimizerBase::apply_impl(StepPlan& plan, const GradStats& stats,
                                                 const StepOptions& options, bool with_aten) {
  const NoGradInferenceGuard no_grad;  // creates no inference tensors
  bool is_counted = false;
  set_plan_lrs(plan);
  for (const Param& param : plan.params) {  // before the first device is stepped
    const at::Device device = param.parameter->device();
    if (!with_aten && kernel_backend(device) != KernelBackend::aten) continue;
    check_aten_supports(param, plan.groups[param.group]);
  }
  for (auto begin = plan.params.begin(); begin != plan.params.end();) {
    const at::Device device = begin->parameter->device();
    auto end = plan.spans_devices ? begin + 1 : plan.params.end();
    while (end != plan.params.end() && end->parameter->device() == device) ++end;
    const Params params(begin, end);
    const GradStats local_stats = stats.to(device);
    switch (with_aten ? KernelBackend::aten : kernel_backend(device)) {
      case KernelBackend::cpu:
        step_cpu(params, plan.groups, local_stats, options);
        break;
      case KernelBackend::cuda:
        is_counted = !plan.spans_devices && !plan.is_partial;
        step_on_cuda(params, plan.groups, local_stats, options, is_counted);
        break;
      case KernelBackend::aten:
        step_with_aten(params, plan.groups, local_stats, options);
    }
    begin = end;
  }
  clear_autocast_cache();
  if (!is_counted && !plan.is_partial) count_applied_step(plan, stats);
}

/// Sets the lrs of a step under a schedule: the base lrs if the device multiplies them by the
/// factor.
MEZZO_INLINE void FusedOptimizerBase::set_plan_lrs(StepPlan& plan) {
  if (!has_schedule() || plan.params.empty()) return;
  const bool on_device =
      !plan.spans_devices && !lr_factors_.has_manual_lr(param_groups_) &&
      kernel_backend(plan.params.front().parameter->device()) != KernelBackend::cpu;
  const std::vector<double> group_lrs = on_device ? base_lrs() : lrs();
  for (std::size_t group = 0; group < plan.groups.size(); ++group) {
    plan.groups[group].lr = group_lrs[group];
    plan.groups[group].lr_factor_on_device = on_device;
  }
}

/// Counts the step on the device that decides whether it is applied. With several devices one
/// counts, since all of them apply or skip the step. A step without any gradient counts too. If
/// only other ranks have gradients, the device of `stats` counts.
MEZZO_INLINE void FusedOptimizerBase::count_applied_step(const StepPlan& plan,
                                                         const GradStats& stats) {
  at::Device device = at::kCPU;
  if (applied_steps_.on_device().defined()) {  // a captured step may count there
    device = applied_steps_.on_device().device();
  } else if (plan.other_ranks_have_grads && stats.defined()) {
    device = stats.found_inf.device();
  }
  const auto is_on_device = [&](const Param& param) { return param.parameter->device() == device; };
  if (!plan.params.empty() && std::none_of(plan.params.begin(), plan.params.end(), is_on_device)) {
    device = plan.params.front().parameter->device();
  }
  increment_step(applied_steps_.step_count(), device, stats.to(device).found_inf);
}

/// Creates the state of a parameter if it needs one, and updates its master or low bits. Returns
/// the state; null if it needs none.
MEZZO_INLINE FusedParamStateBase* FusedOptimizerBase::prepare_state(
    Param& param, const GroupHyperParams& hyper_params) {
  using optim::WeightStorage;
  const bool needs_state = hyper_params.num_moments > 0 || param.storage != WeightStorage::plain;
  FusedParamStateBase* const fused_state = param.state != nullptr ? as_fused_state(*param.state)
                                           : needs_state ? &get_or_create_state(*param.parameter)
                                                         : nullptr;
  if (fused_state == nullptr) return nullptr;
  if (param.state == nullptr) param.state = state_[param.parameter->unsafeGetTensorImpl()].get();
  if (param.storage == WeightStorage::fp32_master) {
    prepare_master(*param.parameter, *fused_state);
  } else if (param.storage == WeightStorage::split_master) {
    prepare_low_bits(*param.parameter, *fused_state);
  } else {
    fused_state->master = fused_state->low_bits = at::Tensor();
  }
  if (needs_state) return fused_state;
  param.state = nullptr;
  return nullptr;
}

/// Returns whether two gradients share memory. Then none may be zeroed before all are read.
inline bool gradients_overlap(std::span<const StepPlan::Param> params) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(params.size());
  for (const StepPlan::Param& param : params) gradients.push_back(param.gradient);
  return find_overlap(gradients).has_value();
}

MEZZO_INLINE FusedParamStateBase* FusedOptimizerBase::prepare_param(
    Param& param, const GroupHyperParams& hyper_params, bool zeroes_grad, GradientCopies& copies) {
  FusedParamStateBase* const fused_state = prepare_state(param, hyper_params);
  const at::Tensor& parameter = *param.parameter;
  ParamPointers& pointers = param.pointers;
  if (pointers.parameter == nullptr)
    set_pointers(param, fused_state, hyper_params);  // kernels were loaded after plan()
  if (pointers.gradient == nullptr) {  // a lazy copy, or with other strides than the parameter
    at::Tensor gradient = with_strides_of(parameter, param.gradient);
    if (zeroes_grad && !gradient.is_same(param.gradient)) copies.to_zero.push_back(param.gradient);
    pointers.gradient =
        zeroes_grad ? gradient.mutable_data_ptr() : const_cast<void*>(gradient.const_data_ptr());
    copies.gradients.push_back(std::move(gradient));
  }
  if (fused_state == nullptr) return nullptr;
  for (int k = 0; k < hyper_params.num_moments; ++k) {
    if (pointers.moments[k] != nullptr) continue;
    pointers.moments[k] =
        ensure_moment(*fused_state, k, param.storage, parameter).mutable_data_ptr();
  }
  if (param.storage == optim::WeightStorage::fp32_master) {
    pointers.low_bits_or_model_param = pointers.parameter;
    pointers.parameter = fused_state->master.mutable_data_ptr();
  } else if (param.storage == optim::WeightStorage::split_master) {
    pointers.low_bits_or_model_param = fused_state->low_bits.mutable_data_ptr();
  }
  return fused_state;
}

MEZZO_INLINE void FusedOptimizerBase::finish_step(Params params,
                                                  std::span<const CpuGroupArgs> calls,
                                                  bool zeroes_grad, bool zeroed_in_kernel,
                                                  const GradientCopies& copies) {
  for (const at::Tensor& gradient : copies.to_zero) zero_grad_(gradient);
  for (const Param& param : params) {
    if (zeroes_grad && !zeroed_in_kernel) zero_grad_(param.gradient);
    if (zeroed_in_kernel) bump_version(param.gradient);
    bump_version(*param.parameter);
    if (param.state == nullptr) continue;
    FusedParamStateBase& fused_state = *as_fused_state(*param.state);
    if (!calls.empty())
      fused_state.step_count().set_on_host(static_cast<int64_t>(calls[param.group].step));
    if (fused_state.master.defined()) bump_version(fused_state.master);
    fused_state.end_step();
  }
}

MEZZO_INLINE void FusedOptimizerBase::step_cpu(Params params, const Groups& groups,
                                               const GradStats& stats, const StepOptions& options) {
  const std::optional<GradMultipliers> multipliers = grad_multipliers(stats, options.max_norm);
  if (!multipliers) {
    for (const Param& param : params) {
      if (param.state != nullptr) as_fused_state(*param.state)->end_step();
      if (options.zero_grad) zero_grad_(param.gradient);
    }
    return;
  }
  const bool zeroes_in_kernel = options.zero_grad && !gradients_overlap(params);
  GradientCopies copies;
  std::vector<CpuGroupArgs> calls;
  const Param* last = nullptr;
  std::size_t last_group = 0;
  for (Param& param : params) {
    const GroupHyperParams& hyper_params = groups[param.group];
    FusedParamStateBase* const fused_state =
        prepare_param(param, hyper_params, zeroes_in_kernel, copies);
    const int64_t step = fused_state != nullptr ? fused_state->step_count().value() + 1 : 1;
    const bool shares_call = last != nullptr && last_group == param.group &&
                             calls.back().step == static_cast<std::uint64_t>(step) &&
                             last->storage == param.storage &&
                             last->parameter_dtype == param.parameter_dtype;
    if (!shares_call) {
      calls.push_back({select_step_kernel(hyper_params, param.storage, param.parameter_dtype),
                       make_functor_args(hyper_params, step), static_cast<std::uint64_t>(step)});
    }
    last_group = param.group;
    last = &param;
    param.group = static_cast<std::uint32_t>(calls.size() - 1);
  }
  run_step_cpu(
      params, calls,
      {.multipliers = *multipliers, .zero_grad = zeroes_in_kernel, .seed = storage_options_.seed});
  finish_step(params, calls, options.zero_grad, zeroes_in_kernel, copies);
}

inline DeviceStepArgs make_device_step_args(const GradStats& stats, const StepOptions& options) {
  DeviceStepArgs step_args{.max_norm = options.max_norm, .zero_grad = options.zero_grad};
  if (!stats.defined()) return step_args;
  step_args.inv_scale = stats.inv_scale.const_data_ptr<float>();
  step_args.found_inf = stats.found_inf.const_data_ptr<float>();
  if (stats.norm_sq.defined()) {
    step_args.norm_sq = stats.norm_sq.const_data_ptr<double>();
  }
  return step_args;
}

MEZZO_INLINE void FusedOptimizerBase::step_on_cuda(Params params, const Groups& groups,
                                                   const GradStats& stats,
                                                   const StepOptions& options,
                                                   bool counts_applied) {
  const at::Device device = params.front().parameter->device();
  DeviceStepArgs step_args = make_device_step_args(stats, options);
  step_args.zero_grad = step_args.zero_grad && !gradients_overlap(params);
  at::Tensor applied;
  if (counts_applied || groups.front().lr_factor_on_device) {
    applied = get_step_tensors(device, {applied_steps_.step_count()}).front();
  }
  if (groups.front().lr_factor_on_device) {
    const at::Tensor& factors = lr_factors_.device_table(device);
    step_args.applied_steps = applied.const_data_ptr<float>();
    step_args.lr_factors = factors.const_data_ptr<double>();
    step_args.lr_factor_count = factors.numel();
  }
  GradientCopies copies;
  std::vector<DeviceGroupArgs> group_args;
  for (const GroupHyperParams& group : groups) {
    group_args.push_back({group.functor_args, group.lr, storage_options_.seed});
  }
  std::vector<ParamArgs> param_args;
  std::vector<StepCountRef> step_counts;
  for (Param& param : params) {
    const GroupHyperParams& hyper_params = groups[param.group];
    FusedParamStateBase* const fused_state =
        prepare_param(param, hyper_params, step_args.zero_grad, copies);
    param_args.push_back(param);
    if (fused_state != nullptr) step_counts.push_back(fused_state->step_count());
  }
  std::vector<float*> state_steps;
  const std::vector<at::Tensor> on_device = get_step_tensors(device, step_counts);
  auto next = on_device.begin();
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].state == nullptr) continue;
    param_args[i].state_step = (next++)->mutable_data_ptr<float>();
    state_steps.push_back(param_args[i].state_step);
  }
  cuda_kernels()->step_(device, kind_, param_args, group_args, step_args);
  if (counts_applied) state_steps.push_back(applied.mutable_data_ptr<float>());
  if (!state_steps.empty()) {
    cuda_kernels()->increment_state_steps_(device, state_steps, step_args.found_inf);
  }
  finish_step(params, {}, options.zero_grad, step_args.zero_grad, copies);
}

inline AtenAmpArgs make_aten_amp_args(const GradStats& stats, double max_norm) {
  if (!stats.defined()) return {};
  at::Tensor grad_scale = stats.inv_scale.reciprocal();  // ATen's kernels divide by it
  const bool has_max_norm = max_norm != std::numeric_limits<double>::infinity();
  if (has_max_norm && stats.norm_sq.defined()) {
    const at::Tensor norm = stats.norm_sq.sqrt();
    grad_scale = norm.add(1e-6).div(max_norm).clamp_min(1.0).mul(grad_scale).to(at::kFloat);
  }
  // ATen's kernels skip if found_inf is 1; a sum over several checks may be larger.
  return {grad_scale, stats.found_inf.ne(0).to(at::kFloat), std::nullopt};
}

/// Steps with ATen's fused optimizers, without synchronizing.
MEZZO_INLINE void FusedOptimizerBase::step_with_aten(Params params, const Groups& groups,
                                                     const GradStats& stats,
                                                     const StepOptions& options) {
  const at::Device device = params.front().parameter->device();
  AtenAmpArgs amp_args = make_aten_amp_args(stats, options.max_norm);
  if (groups.front().lr_factor_on_device) {
    const at::Tensor& factors = lr_factors_.device_table(device);
    const at::Tensor applied = get_step_tensors(device, {applied_steps_.step_count()}).front();
    amp_args.lr_factor =
        factors.take(applied.clamp_max(factors.numel() - 1).to(at::kLong)).to(at::kFloat);
  }
  std::vector<StepCountRef> step_counts;
  for (Param& param : params) {
    FusedParamStateBase* const fused_state = prepare_state(param, groups[param.group]);
    if (fused_state != nullptr) step_counts.push_back(fused_state->step_count());
  }
  const std::vector<at::Tensor> state_steps = get_step_tensors(device, step_counts);
  std::vector<AtenTensorLists> calls;  // params are sorted by group
  for (const Param& param : params) {
    at::Tensor parameter = *param.parameter;
    FusedParamStateBase* const fused_state =
        param.state != nullptr ? as_fused_state(*param.state) : nullptr;
    if (param.storage == optim::WeightStorage::fp32_master) {
      update_master_from_param(parameter, *fused_state);
      parameter = fused_state->master;
    }
    const bool fits_last_call =
        !calls.empty() && calls.back().group == param.group &&
        calls.back().parameters.back().scalar_type() == parameter.scalar_type();
    if (!fits_last_call) calls.push_back({param.group});
    AtenTensorLists& lists = calls.back();
    lists.parameters.push_back(parameter);
    // ATen's kernels write unscaled gradients back; a step must not change gradients.
    const bool copies = amp_args.grad_scale.has_value() || param.gradient.is_inference();
    lists.gradients.push_back(with_strides_of(
        parameter, param.gradient.to(parameter.scalar_type(), /*non_blocking=*/false, copies)));
    if (fused_state == nullptr) continue;
    lists.state_steps.push_back(fused_state->step_count().on_device());
    for (int k = 0; k < groups[param.group].num_moments; ++k) {
      lists.moments[static_cast<std::size_t>(k)].push_back(
          ensure_moment(*fused_state, k, param.storage, *param.parameter));
    }
  }
  // ATen's kernels expect state_steps with this step included, even if they skip it.
  if (!state_steps.empty()) at::_foreach_add_(state_steps, 1);
  const auto round_masters = [&] {
    for (const Param& param : params) {
      if (param.storage != optim::WeightStorage::fp32_master) continue;
      param.parameter->copy_(as_fused_state(*param.state)->master);
    }
  };
  auto call = calls.begin();
  try {
    for (; call != calls.end(); ++call) aten_step(groups[call->group], *call, amp_args);
  } catch (...) {
    for (; call != calls.end(); ++call) {  // calls that did not run
      if (!call->state_steps.empty()) at::_foreach_add_(call->state_steps, -1);
    }
    round_masters();  // of the calls that ran
    throw;
  }
  if (!state_steps.empty() && amp_args.found_inf)
    at::_foreach_add_(state_steps, amp_args.found_inf->neg());
  round_masters();
  finish_step(params, {}, options.zero_grad, /*zeroed_in_kernel=*/false, {});
}

MEZZO_INLINE void FusedOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  SerializedOptimizer serialized;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    (void)read_group_hyperparams(group);  // throws for options of another class
    serialized.param_groups().push_back(param_groups_[group]);
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      check_no_ema_guard(parameter, description());
      serialized.state()[found->first] = serialized_state(parameter, *found->second);
    }
  }
  write_archive(archive, serialized);
}

/// Serializes through the base classes, since a state may be torch's.
MEZZO_INLINE void FusedOptimizerBase::write_archive(torch::serialize::OutputArchive& archive,
                                                    const SerializedOptimizer& serialized) const {
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, serialized);
  archive.write(kClassKey, c10::IValue(std::string(name_)));
  save_progress(archive);
  if (storage_options_ == optim::WeightStorageOptions()) return;
  archive.write("storage", c10::IValue(static_cast<int64_t>(storage_options_.weight_storage)));
  archive.write("seed", c10::IValue(static_cast<int64_t>(storage_options_.seed)));
}

/// Reads the storage and the seed. An archive without them, or of plain weights, can be loaded with
/// any storage.
MEZZO_INLINE optim::WeightStorageOptions FusedOptimizerBase::read_storage_options(
    torch::serialize::InputArchive& archive) const {
  using optim::WeightStorage;
  c10::IValue storage, seed;
  if (!archive.try_read("storage", storage)) return storage_options_;
  const int64_t value = storage.toInt();
  TORCH_CHECK(
      value >= 0 && value <= static_cast<int64_t>(WeightStorage::stochastic_rounding),
      "The archive of an optimizer has weight_storage ", value,
      ", which this version of mezzo does not support; read it with the version that wrote it");
  archive.read("seed", seed);
  optim::WeightStorageOptions storage_options{static_cast<WeightStorage>(value),
                                              static_cast<std::uint64_t>(seed.toInt())};
  if (storage_options.weight_storage == WeightStorage::plain) {
    storage_options.weight_storage = storage_options_.weight_storage;
  }
  return storage_options;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
