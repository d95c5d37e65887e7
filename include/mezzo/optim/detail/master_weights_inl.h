#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ema_params.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/detail/gradients.h>
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
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- The inner optimizer for the time of a step ------------------------------------------------

// The state of libtorch's optimizers is what it was made like, and some of it is made like the
// parameter: Adagrad's sum by the constructor, all of it by steps that were taken without masters.
// An optimizer goes on in the state's dtype, and a running mean in 16 bits does not run.

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

/// Makes the state of an optimizer of libtorch's float, where it is of 16 bits. Adagrad makes its
/// sum in the constructor, of the value in its defaults: where the sum still is that value,
/// rounded, it becomes the value itself.
inline void cast_state_to_float_(torch::optim::OptimizerParamState& state,
                                 const torch::optim::OptimizerOptions& defaults) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    cast_to_float_({&sgd->momentum_buffer()});
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    at::Tensor& sum = adagrad->sum();
    const auto* const options = dynamic_cast<const torch::optim::AdagradOptions*>(&defaults);
    const bool is_new =
        options != nullptr && adagrad->step() == 0 && sum.defined() && is_low_precision(sum);
    const at::Tensor is_first =
        is_new ? sum.eq(at::full_like(sum, options->initial_accumulator_value())) : at::Tensor();
    cast_to_float_({&sum});
    if (is_new) sum.masked_fill_(is_first, options->initial_accumulator_value());
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    cast_to_float_({&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (!cast_adam_state_to_float_<torch::optim::AdamParamState>(state)) {
    cast_adam_state_to_float_<torch::optim::AdamWParamState>(state);
  }
}

/// Does what Tensor::set_data does, but keeps the hooks of the gradient, which another dtype ends.
inline void swap_tensor_data(const at::Tensor& parameter, const at::Tensor& memory) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
}

inline void set_group_lrs(torch::optim::Optimizer& optimizer, const std::vector<double>& lrs) {
  auto& groups = optimizer.param_groups();
  const std::size_t known = std::min(groups.size(), lrs.size());  // a step may add groups
  for (std::size_t i = 0; i < known; ++i) groups[i].options().set_lr(lrs[i]);
}

// --- Files -------------------------------------------------------------------------------------

// An archive holds, beside the inner optimizer's own under "optimizer", the masters that there are,
// by the number of their parameters, counted through all groups. A parameter without one begins its
// master from its own value, in a resumed run as here.

inline constexpr const char* kMasterWeightsKey = "mezzo_master_weights";  // the format's version
inline constexpr int64_t kMasterWeightsFormat = 1;

inline std::string master_key(std::size_t param_index) {
  return "masters/" + std::to_string(param_index);
}

}  // namespace detail

MEZZO_INLINE MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer) : inner_(&optimizer) {
  TORCH_CHECK(dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
              "MasterWeights: torch::optim::LBFGS calls its closure several times in a step, each "
              "time with other weights, of which the model would have to know; train the model in "
              "float, or use an optimizer that takes a step from one gradient");
  TORCH_CHECK(OptimizerRef(optimizer).mixed_precision() == nullptr,
              "MasterWeights is for optimizers that keep no masters, and this one is mezzo's: give "
              "its constructor {.weight_storage = WeightStorage::fp32_master} instead");
  check_parameters();
}

MEZZO_INLINE at::Tensor MasterWeights::master_param(const at::Tensor& parameter) {
  if (!detail::is_low_precision(parameter)) return parameter;
  detail::check_not_averaged(parameter, description());
  detail::MasterState& state = get_master_state(parameter);
  state.show(parameter);
  return state.master;
}

/// Returns the master, in agreement with the parameter as it is now; made if there is none.
MEZZO_INLINE detail::MasterState& MasterWeights::get_master_state(const at::Tensor& parameter) {
  const detail::NoGradInferenceGuard no_graph;
  MasterEntry& entry = masters_[parameter.unsafeGetTensorImpl()];
  entry.parameter = parameter;
  detail::MasterState& state = entry.state;
  const bool is_resized = state.master.defined() && state.master.sizes() != parameter.sizes();
  if (is_resized) state.master = at::Tensor();  // all of the parameter was written
  detail::prepare_master(parameter, state);
  detail::update_master_from_param(parameter, state);
  return state;
}

/// Looks at the parameters when there are more or fewer than before. A parameter that is in no
/// group keeps its master, as it keeps its state, until nothing else holds it.
MEZZO_INLINE void MasterWeights::check_parameters() {
  std::vector<at::Tensor> all = description().parameters();
  const std::size_t parameters = all.size();
  if (parameters == num_checked_params_ && masters_.size() <= parameters) return;
  std::erase_if(all,
                [](const at::Tensor& parameter) { return !detail::is_low_precision(parameter); });
  detail::check_no_duplicates(all, description());
  num_checked_params_ = parameters;
  all.clear();  // each holds its parameter
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
  StepPlan plan = detail::make_torch_plan(*inner_, /*keeps_masters=*/true);
  for (const StepPlan::Param& param : plan.params) {  // whose value would become the master
    if (param.storage == optim::WeightStorage::fp32_master) {
      detail::check_not_averaged(*param.parameter, description());
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
    applied_steps_.step_count().set(applied_steps() + 1);
  }
  for (auto& [parameter, entry] : masters_) entry.state.end_step();
  if (options.zero_grad) detail::zero_gradients(*inner_);
}

/// Steps the inner optimizer with other gradients, with the rates of a schedule, and with masters
/// in the memory of parameters of 16 bits. In the end everything has what it had, and the masters
/// are rounded to their parameters.
MEZZO_INLINE void MasterWeights::step_inner(const StepPlan& plan,
                                            const detail::GradMultipliers& multipliers) {
  struct SavedTensors {
    at::Tensor parameter, gradient, memory, master;
  };
  std::vector<SavedTensors> saved;
  std::vector<double> lrs_before;  // options of your own may have none
  if (has_schedule()) lrs_before = detail::get_current_lrs(inner_->param_groups());
  const auto restore = [&] {
    for (const SavedTensors& tensors : saved) {
      if (tensors.master.defined()) detail::swap_tensor_data(tensors.parameter, tensors.memory);
      tensors.parameter.mutable_grad() = tensors.gradient;
    }
    if (has_schedule()) detail::set_group_lrs(*inner_, lrs_before);
    for (const SavedTensors& tensors : saved) {  // what may throw
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
        tensors.memory = parameter.variable_data();
        const auto state = inner_->state().find(parameter.unsafeGetTensorImpl());
        if (state != inner_->state().end()) {
          detail::cast_state_to_float_(*state->second, inner_->defaults());
        }
      }
      saved.push_back(std::move(tensors));
      if (saved.back().master.defined()) detail::swap_tensor_data(parameter, saved.back().master);
      // In float before the product, so that nothing underflows on the way; the gradient itself
      // is never written. Entries of one place are added first, as the inner optimizer would.
      const bool is_low = detail::is_low_precision(param.gradient);
      at::Tensor wide = is_low ? param.gradient.to(at::kFloat) : param.gradient;
      const bool scales = multipliers.first != 1.0 || multipliers.second != 1.0;
      if (wide.is_sparse() && scales) wide = wide.coalesce();
      if (multipliers.first != 1.0) wide = wide.mul(multipliers.first);
      if (multipliers.second != 1.0) wide = wide.mul(multipliers.second);
      parameter.mutable_grad() = wide;
    }
    if (has_schedule()) detail::set_group_lrs(*inner_, lrs());
    inner_->step();
  } catch (...) {
    restore();  // as without masters, what was trained before it threw is trained
    throw;
  }
  restore();
}

MEZZO_INLINE std::vector<at::Tensor> master_params(OptimizerRef optimizer) {
  optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  std::vector<at::Tensor> all;
  detail::for_each_parameter(optimizer.optimizer(), [&](const at::Tensor& parameter) {
    all.push_back(fused != nullptr ? fused->master_param(parameter) : parameter);
  });
  return all;
}

// --- Its own files -----------------------------------------------------------------------------

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
  const detail::NoGradInferenceGuard no_graph;
  c10::IValue format, name;
  TORCH_CHECK(
      archive.try_read(detail::kMasterWeightsKey, format),
      "MasterWeights: the archive holds no masters; load what "
      "torch::save(masters, path) wrote (torch::load(masters.optimizer(), path) reads the file of "
      "the optimizer alone)");
  TORCH_CHECK(format.isInt() && format.toInt() == detail::kMasterWeightsFormat,
              "MasterWeights: the archive has a format that this version of mezzo does not know; "
              "read it with the version that wrote it, or, if it is damaged, load an earlier one");
  const std::string expected = detail::archive_class_name(*inner_);
  TORCH_CHECK(archive.try_read(detail::kClassKey, name) && name.isString() &&
                  name.toStringRef() == expected,
              "MasterWeights: the archive is that of the masters of ",
              name.isString() ? name.toStringRef() : "no optimizer", ", and this one steps ",
              expected, "; load the file of an optimizer of this class");
  ArchiveContents read;
  std::size_t param_index = 0;
  detail::for_each_parameter(*inner_, [&](const at::Tensor& parameter) {
    c10::IValue value;
    if (!archive.try_read(detail::master_key(param_index++), value)) return;
    at::Tensor master = value.isTensor() ? value.toTensor() : at::Tensor();
    TORCH_CHECK(master.defined() && detail::is_low_precision(parameter) &&
                    master.sizes() == parameter.sizes() && master.layout() == at::kStrided &&
                    master.scalar_type() == at::kFloat,
                "MasterWeights: the archive has the master ", detail::describe(master), " for ",
                description().describe(parameter),
                "; it is another model's, or this one was cast: load the file of this model, cast "
                "as it was then");
    if (master.is_inference()) master = master.clone();
    read.masters[parameter.unsafeGetTensorImpl()] = {parameter, {.master = std::move(master)}};
  });
  read.progress = read_progress(archive, inner_->param_groups().size());
  if (!read.progress.base_lrs.empty()) (void)detail::get_current_lrs(inner_->param_groups());
  TORCH_CHECK(
      archive.try_read("optimizer", read.inner),
      "MasterWeights: the archive lacks the inner optimizer; it is damaged: load an earlier one");
  return read;
}

MEZZO_INLINE void MasterWeights::check_load(torch::serialize::InputArchive& archive) const {
  ArchiveContents contents = read_archive(archive);
  detail::check_load(contents.inner, *inner_);
}

MEZZO_INLINE void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const detail::NoGradInferenceGuard no_graph;
  ArchiveContents contents = read_archive(archive);
  detail::load_atomically(contents.inner, *inner_);
  masters_ = std::move(contents.masters);  // the next step compares them with the parameters
  load_progress(contents.progress);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
