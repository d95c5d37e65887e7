#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ema_params.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/master_state.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/master_weights.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// torch's optimizers create state in the parameter's dtype (Adagrad's sum in the constructor) and
// keep that dtype. State of steps without masters has 16 bits, in which running means do not
// change.

inline void cast_to_float_(std::initializer_list<at::Tensor*> tensors) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && is_low_precision(*tensor)) *tensor = tensor->to(at::kFloat);
  }
}

template <class State>
bool cast_adam_state_to_float_(torch::optim::OptimizerParamState& state) {
  auto* const adam = dynamic_cast<State*>(&state);
  if (adam == nullptr) return false;
  cast_to_float_({&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()});
  return true;
}

/// Casts 16-bit state of a torch optimizer to float32. Adagrad's sum becomes the unrounded
/// initial_accumulator_value where it is that value rounded.
inline void cast_state_to_float_(torch::optim::OptimizerParamState& state,
                                 const torch::optim::OptimizerOptions& defaults) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    cast_to_float_({&sgd->momentum_buffer()});
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    at::Tensor& sum = adagrad->sum();
    const auto* const options = dynamic_cast<const torch::optim::AdagradOptions*>(&defaults);
    const bool is_initial_sum =
        options != nullptr && adagrad->step() == 0 && sum.defined() && is_low_precision(sum);
    const at::Tensor is_initial_value =
        is_initial_sum ? sum.eq(at::full_like(sum, options->initial_accumulator_value()))
                       : at::Tensor();
    cast_to_float_({&sum});
    if (is_initial_sum) sum.masked_fill_(is_initial_value, options->initial_accumulator_value());
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    cast_to_float_({&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (!cast_adam_state_to_float_<torch::optim::AdamParamState>(state)) {
    cast_adam_state_to_float_<torch::optim::AdamWParamState>(state);
  }
}

/// Tensor::set_data that keeps gradient hooks when the dtype changes.
inline void replace_data(const at::Tensor& parameter, const at::Tensor& data) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

inline void set_group_lrs(torch::optim::Optimizer& optimizer, const std::vector<double>& lrs) {
  auto& groups = optimizer.param_groups();
  const std::size_t size = std::min(groups.size(), lrs.size());  // a step may add groups
  for (std::size_t i = 0; i < size; ++i) groups[i].options().set_lr(lrs[i]);
}

// An archive has the inner optimizer's archive under "optimizer" and each existing master under its
// parameter's index over all groups.

inline constexpr const char* kMasterWeightsKey = "mezzo_master_weights";  // format version
inline constexpr int64_t kMasterWeightsFormat = 1;

inline std::string master_key(std::size_t param_index) {
  return "masters/" + std::to_string(param_index);
}

}  // namespace detail

MEZZO_INLINE MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer) : inner_(&optimizer) {
  TORCH_CHECK(
      dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
      "MasterWeights does not support torch::optim::LBFGS, whose steps evaluate the closure "
      "several times with different weights; train the model in float32, or use another "
      "optimizer");
  TORCH_CHECK(
      OptimizerRef(optimizer).mixed_precision() == nullptr,
      "MasterWeights does not support mezzo's optimizers, which have masters themselves: pass "
      "the constructor {.weight_storage = WeightStorage::fp32_master} instead");
  check_parameters();
}

MEZZO_INLINE at::Tensor MasterWeights::master_param(const at::Tensor& parameter) {
  if (!detail::is_low_precision(parameter)) return parameter;
  detail::check_no_ema_guard(parameter, description());
  detail::MasterState& state = get_master_state(parameter);
  state.expose_master(parameter);
  return state.master;
}

/// Returns the master, created if necessary and updated with the parameter's current value.
MEZZO_INLINE detail::MasterState& MasterWeights::get_master_state(const at::Tensor& parameter) {
  const detail::NoGradInferenceGuard no_grad;
  MasterEntry& entry = masters_[parameter.unsafeGetTensorImpl()];
  entry.parameter = parameter;
  detail::MasterState& state = entry.state;
  const bool is_resized = state.master.defined() && state.master.sizes() != parameter.sizes();
  if (is_resized) state.master = at::Tensor();
  detail::prepare_master(parameter, state);
  detail::update_master_from_param(parameter, state);
  return state;
}

/// Checks the parameters after their number has changed, and erases the masters and states of
/// destroyed parameters. A parameter that was removed from its group keeps both.
MEZZO_INLINE void MasterWeights::check_parameters() {
  std::size_t num_params = 0;
  for (const auto& group : inner_->param_groups()) num_params += group.params().size();
  if (num_params == num_checked_params_ && masters_.size() <= num_params) return;
  std::vector<at::Tensor> all = description().parameters();
  std::erase_if(all,
                [](const at::Tensor& parameter) { return !detail::is_low_precision(parameter); });
  detail::check_no_duplicates(all, description());
  num_checked_params_ = num_params;
  all.clear();  // releases the parameters, for use_count
  for (auto entry = masters_.begin(); entry != masters_.end();) {
    if (entry->second.parameter.use_count() > 1) {
      ++entry;
      continue;
    }
    inner_->state().erase(entry->second.parameter.unsafeGetTensorImpl());
    entry = masters_.erase(entry);
  }
}

MEZZO_INLINE StepPlan MasterWeights::plan() {
  const c10::NoGradGuard no_grad;
  check_parameters();
  StepPlan plan = detail::make_torch_plan(*inner_, /*has_masters=*/true);
  for (const StepPlan::Param& param : plan.params) {
    if (param.storage == optim::WeightStorage::fp32_master) {
      detail::check_no_ema_guard(*param.parameter, description());
    }
  }
  return plan;
}

MEZZO_INLINE void MasterWeights::apply(StepPlan plan, const GradStats& stats,
                                       const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto multipliers = detail::grad_multipliers(stats, options.max_norm);
  if (multipliers) {
    step_inner(plan, *multipliers);
    if (!plan.is_partial) applied_steps_.step_count().set_on_host(applied_steps() + 1);
  }
  if (!plan.is_partial) {  // else a step of all follows
    for (auto& [parameter, entry] : masters_) entry.state.end_step();
  }
  if (options.zero_grad) detail::zero_gradients(*inner_);
}

/// Steps the inner optimizer on the masters, with unscaled float32 gradients and the schedule's
/// lrs. Afterwards restores parameters, gradients and lrs, and rounds the masters to the
/// parameters.
MEZZO_INLINE void MasterWeights::step_inner(const StepPlan& plan,
                                            const detail::GradMultipliers& multipliers) {
  struct SavedTensors {
    at::Tensor parameter, gradient, data, master;
  };
  std::vector<SavedTensors> saved;
  std::vector<double> lrs_before;  // custom options may have no lr
  if (has_schedule()) lrs_before = detail::get_current_lrs(inner_->param_groups());
  const auto restore = [&] {
    for (const SavedTensors& tensors : saved) {
      if (tensors.master.defined()) detail::replace_data(tensors.parameter, tensors.data);
      tensors.parameter.mutable_grad() = tensors.gradient;
    }
    if (has_schedule()) detail::set_group_lrs(*inner_, lrs_before);
    for (const SavedTensors& tensors : saved) {  // last, since it may throw
      if (tensors.master.defined()) tensors.parameter.detach().copy_(tensors.master);
    }
    detail::clear_autocast_cache();
  };
  try {
    for (const StepPlan::Param& param : plan.params) {
      const at::Tensor& parameter = *param.parameter;
      SavedTensors tensors{parameter, parameter.grad(), {}, {}};
      if (param.storage == optim::WeightStorage::fp32_master) {
        tensors.master = get_master_state(parameter).master;
        tensors.data = parameter.variable_data();
        const auto state = inner_->state().find(parameter.unsafeGetTensorImpl());
        if (state != inner_->state().end()) {
          detail::cast_state_to_float_(*state->second, inner_->defaults());
        }
      }
      saved.push_back(std::move(tensors));
      if (saved.back().master.defined()) detail::replace_data(parameter, saved.back().master);
      // Cast to float32 before the product, against underflow. Sparse gradients are coalesced
      // first, as the inner optimizer does.
      const bool is_low = detail::is_low_precision(param.gradient);
      at::Tensor gradient = is_low ? param.gradient.to(at::kFloat) : param.gradient;
      const bool is_scaled = multipliers.first != 1.0 || multipliers.second != 1.0;
      if (gradient.is_sparse() && is_scaled) gradient = gradient.coalesce();
      if (multipliers.first != 1.0) gradient = gradient.mul(multipliers.first);
      if (multipliers.second != 1.0) gradient = gradient.mul(multipliers.second);
      parameter.mutable_grad() = gradient;
    }
    if (has_schedule()) detail::set_group_lrs(*inner_, lrs());
    inner_->step();
  } catch (...) {
    restore();  // keeps the updates before the exception, as without masters
    throw;
  }
  restore();
}

MEZZO_INLINE std::vector<at::Tensor> master_params(OptimizerRef optimizer) {
  optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.mixed_precision();
  std::vector<at::Tensor> masters;
  detail::for_each_parameter(optimizer.optimizer(), [&](const at::Tensor& parameter) {
    masters.push_back(mixed_precision != nullptr ? mixed_precision->master_param(parameter)
                                                 : parameter);
  });
  return masters;
}

MEZZO_INLINE void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  archive.write(detail::kMasterWeightsKey, c10::IValue(detail::kMasterWeightsFormat));
  archive.write(detail::kClassKey, c10::IValue(detail::archive_class_name(*inner_)));
  save_progress(archive);
  std::size_t param_index = 0;
  detail::for_each_parameter(*inner_, [&](const at::Tensor& parameter) {
    const auto entry = masters_.find(parameter.unsafeGetTensorImpl());
    const std::string key = detail::master_key(param_index++);
    if (entry == masters_.end()) return;
    archive.write(key, entry->second.state.master.detach(), /*is_buffer=*/true);
  });
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  inner_->save(inner);
  archive.write("optimizer", inner);
}

MEZZO_INLINE MasterWeights::ArchiveContents MasterWeights::read_archive(
    torch::serialize::InputArchive& archive) const {
  const detail::NoGradInferenceGuard no_grad;
  c10::IValue format, name;
  TORCH_CHECK(archive.try_read(detail::kMasterWeightsKey, format),
              "MasterWeights: the archive has no masters; load what "
              "torch::save(masters, path) wrote (torch::load(masters.optimizer(), path) reads the "
              "optimizer's archive)");
  TORCH_CHECK(
      format.isInt() && format.toInt() == detail::kMasterWeightsFormat,
      "MasterWeights: the archive has a format that this version of mezzo does not support; "
      "read it with the version that wrote it, or, if it is corrupt, load an earlier one");
  const std::string expected = detail::archive_class_name(*inner_);
  TORCH_CHECK(archive.try_read(detail::kClassKey, name) && name.isString() &&
                  name.toStringRef() == expected,
              "MasterWeights: the archive is that of masters of ",
              name.isString() ? name.toStringRef() : "no optimizer",
              ", and the inner optimizer is ", expected,
              "; load the archive of an optimizer of this class");
  ArchiveContents contents;
  std::size_t param_index = 0;
  detail::for_each_parameter(*inner_, [&](const at::Tensor& parameter) {
    c10::IValue value;
    if (!archive.try_read(detail::master_key(param_index++), value)) return;
    at::Tensor master = value.isTensor() ? value.toTensor() : at::Tensor();
    TORCH_CHECK(
        master.defined() && detail::is_low_precision(parameter) &&
            master.sizes() == parameter.sizes() && master.layout() == at::kStrided &&
            master.scalar_type() == at::kFloat,
        "MasterWeights: the archive has the master ", detail::describe(master), " for ",
        description().describe_param(parameter),
        "; it is another model's, or this model was cast: load the archive of this model, cast "
        "as it was when it was saved");
    if (master.is_inference()) master = master.clone();
    contents.masters[parameter.unsafeGetTensorImpl()] = {parameter, {.master = std::move(master)}};
  });
  contents.progress = detail::read_progress(archive, inner_->param_groups().size(), "an optimizer");
  if (!contents.progress.base_lrs.empty()) (void)detail::get_current_lrs(inner_->param_groups());
  TORCH_CHECK(
      archive.try_read("optimizer", contents.inner),
      "MasterWeights: the archive lacks the inner optimizer; it is corrupt: load an earlier one");
  return contents;
}

MEZZO_INLINE void MasterWeights::check_load(torch::serialize::InputArchive& archive) const {
  ArchiveContents contents = read_archive(archive);
  detail::check_load(contents.inner, *inner_);
}

MEZZO_INLINE void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const detail::NoGradInferenceGuard no_grad;
  ArchiveContents contents = read_archive(archive);
  detail::load_atomically(contents.inner, *inner_);
  masters_ = std::move(contents.masters);  // the next step compares them with the parameters
  load_progress(contents.progress);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
