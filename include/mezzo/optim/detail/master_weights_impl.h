#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/param_slot.h>
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

inline void widen(std::initializer_list<at::Tensor*> tensors) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && is_low_precision(*tensor)) *tensor = tensor->to(at::kFloat);
  }
}

template <class State>
bool widen_adam_state(torch::optim::OptimizerParamState& state) {
  auto* const adam = dynamic_cast<State*>(&state);
  if (adam == nullptr) return false;
  widen({&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()});
  return true;
}

/// Makes the state of an optimizer of libtorch's float, where it is of 16 bits. Adagrad makes its
/// sum in the constructor, of the value in its defaults: where the sum still is that value,
/// rounded, it becomes the value itself.
inline void widen_state(torch::optim::OptimizerParamState& state,
                        const torch::optim::OptimizerOptions& defaults) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    widen({&sgd->momentum_buffer()});
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    at::Tensor& sum = adagrad->sum();
    const auto* const own = dynamic_cast<const torch::optim::AdagradOptions*>(&defaults);
    const bool is_new =
        own != nullptr && adagrad->step() == 0 && sum.defined() && is_low_precision(sum);
    const at::Tensor is_first =
        is_new ? sum.eq(at::full_like(sum, own->initial_accumulator_value())) : at::Tensor();
    widen({&sum});
    if (is_new) sum.masked_fill_(is_first, own->initial_accumulator_value());
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    widen({&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (!widen_adam_state<torch::optim::AdamParamState>(state)) {
    widen_adam_state<torch::optim::AdamWParamState>(state);
  }
}

/// Does what Tensor::set_data does, but keeps the hooks of the gradient, which another dtype ends.
inline void exchange(const at::Tensor& parameter, const at::Tensor& memory) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
}

inline void set_lrs(torch::optim::Optimizer& optimizer, const std::vector<double>& lrs) {
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

inline std::string master_key(std::size_t number) { return "masters/" + std::to_string(number); }

}  // namespace detail

MEZZO_INLINE MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer) : inner_(&optimizer) {
  TORCH_CHECK(dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
              "MasterWeights: torch::optim::LBFGS calls its closure several times in a step, each "
              "time with other weights, of which the model would have to know; train the model in "
              "float, or use an optimizer that takes a step from one gradient");
  TORCH_CHECK(AnyOptimizer(optimizer).mezzos() == nullptr,
              "MasterWeights is for optimizers that keep no masters, and this one is mezzo's: give "
              "its constructor {.weight_storage = WeightStorage::fp32_master} instead");
  meet_parameters();
}

MEZZO_INLINE at::Tensor MasterWeights::master_param(const at::Tensor& parameter) {
  if (!detail::is_low_precision(parameter)) return parameter;
  detail::refuse_average(parameter, words());
  detail::KeptWeights& weights = settled(parameter);
  weights.show(parameter);
  return weights.master;
}

/// Returns the master, in agreement with the parameter as it is now; made if there is none.
MEZZO_INLINE detail::KeptWeights& MasterWeights::settled(const at::Tensor& parameter) {
  const detail::NoGradInferenceGuard no_graph;
  Kept& kept = masters_[parameter.unsafeGetTensorImpl()];
  kept.parameter = parameter;
  detail::KeptWeights& weights = kept.weights;
  const bool is_resized = weights.master.defined() && weights.master.sizes() != parameter.sizes();
  if (is_resized) weights.master = at::Tensor();  // all of the parameter was written
  detail::settle_master(parameter, weights);
  detail::heal_master(parameter, weights);
  return weights;
}

/// Looks at the parameters when there are more or fewer than before. A parameter that is in no
/// group keeps its master, as it keeps its state, until nothing else holds it.
MEZZO_INLINE void MasterWeights::meet_parameters() {
  std::vector<at::Tensor> all = words().parameters();
  const std::size_t parameters = all.size();
  if (parameters == parameters_ && masters_.size() <= parameters) return;
  std::erase_if(all, [](const at::Tensor& one) { return !detail::is_low_precision(one); });
  detail::refuse_duplicates(all, words());
  parameters_ = parameters;
  all.clear();  // each holds its parameter
  for (auto kept = masters_.begin(); kept != masters_.end();) {
    if (kept->second.parameter.use_count() > 1) {
      ++kept;
      continue;
    }
    inner_->state().erase(kept->second.parameter.unsafeGetTensorImpl());
    kept = masters_.erase(kept);
  }
}

MEZZO_INLINE StepPlan MasterWeights::plan() {
  const c10::NoGradGuard no_grad;
  meet_parameters();
  StepPlan plan = detail::plain_plan(*inner_, /*keeps_masters=*/true);
  for (const StepPlan::Row& row : plan.rows) {  // whose value would become the master
    if (row.storage == optim::WeightStorage::fp32_master) {
      detail::refuse_average(*row.parameter, words());
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
    applied_steps_.count().set(applied_steps() + 1);
  }
  for (auto& [parameter, kept] : masters_) kept.weights.end_step();
  if (options.zero_grad) detail::zero_gradients(*inner_);
}

/// Steps the inner optimizer with other gradients, with the rates of a schedule, and with masters
/// in the memory of parameters of 16 bits. In the end everything has what it had, and the masters
/// are rounded to their parameters.
MEZZO_INLINE void MasterWeights::step_inner(const StepPlan& plan,
                                            const detail::GradMultipliers& multipliers) {
  struct Lent {
    at::Tensor parameter, gradient, memory, master;
  };
  std::vector<Lent> lent;
  std::vector<double> shown;  // options of your own may have none
  if (has_schedule()) shown = detail::lrs_of(inner_->param_groups());
  const auto give_back = [&] {
    for (const Lent& one : lent) {
      if (one.master.defined()) detail::exchange(one.parameter, one.memory);
      one.parameter.mutable_grad() = one.gradient;
    }
    if (has_schedule()) detail::set_lrs(*inner_, shown);
    for (const Lent& one : lent) {  // what may throw
      if (one.master.defined()) one.parameter.detach().copy_(one.master);
    }
    detail::clear_autocast_cache();
  };
  try {
    for (const StepPlan::Row& row : plan.rows) {
      const at::Tensor& parameter = *row.parameter;
      Lent own{parameter, parameter.grad(), {}, {}};
      if (row.storage == optim::WeightStorage::fp32_master) {
        own.master = settled(parameter).master;
        own.memory = parameter.variable_data();
        const auto state = inner_->state().find(parameter.unsafeGetTensorImpl());
        if (state != inner_->state().end()) {
          detail::widen_state(*state->second, inner_->defaults());
        }
      }
      lent.push_back(std::move(own));
      if (lent.back().master.defined()) detail::exchange(parameter, lent.back().master);
      // In float before the product, so that nothing underflows on the way; the gradient itself
      // is never written. Entries of one place are added first, as the inner optimizer would.
      const bool is_low = detail::is_low_precision(row.gradient);
      at::Tensor wide = is_low ? row.gradient.to(at::kFloat) : row.gradient;
      const bool scales = multipliers.first != 1.0 || multipliers.second != 1.0;
      if (wide.is_sparse() && scales) wide = wide.coalesce();
      if (multipliers.first != 1.0) wide = wide.mul(multipliers.first);
      if (multipliers.second != 1.0) wide = wide.mul(multipliers.second);
      parameter.mutable_grad() = wide;
    }
    if (has_schedule()) detail::set_lrs(*inner_, lrs());
    inner_->step();
  } catch (...) {
    give_back();  // as without masters, what was trained before it threw is trained
    throw;
  }
  give_back();
}

MEZZO_INLINE std::vector<at::Tensor> master_params(AnyOptimizer optimizer) {
  optim::FusedOptimizer* const fused = optimizer.mezzos();
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
  archive.write(detail::kClassKey, c10::IValue(detail::class_in_files(*inner_)));
  save_progress(archive);
  std::size_t number = 0;
  detail::for_each_parameter(*inner_, [&](const at::Tensor& parameter) {
    const auto kept = masters_.find(parameter.unsafeGetTensorImpl());
    const std::string key = detail::master_key(number++);
    if (kept == masters_.end()) return;
    archive.write(key, kept->second.weights.master.detach(), /*is_buffer=*/true);
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
  const std::string own = detail::class_in_files(*inner_);
  TORCH_CHECK(
      archive.try_read(detail::kClassKey, name) && name.isString() && name.toStringRef() == own,
      "MasterWeights: the archive is that of the masters of ",
      name.isString() ? name.toStringRef() : "no optimizer", ", and this one steps ", own,
      "; load the file of an optimizer of this class");
  ArchiveContents read;
  std::size_t number = 0;
  detail::for_each_parameter(*inner_, [&](const at::Tensor& parameter) {
    c10::IValue value;
    if (!archive.try_read(detail::master_key(number++), value)) return;
    at::Tensor master = value.isTensor() ? value.toTensor() : at::Tensor();
    TORCH_CHECK(master.defined() && detail::is_low_precision(parameter) &&
                    master.sizes() == parameter.sizes() && master.layout() == at::kStrided &&
                    master.scalar_type() == at::kFloat,
                "MasterWeights: the archive has the master ", detail::describe(master), " for ",
                words().parameter(parameter),
                "; it is another model's, or this one was cast: load the file of this model, cast "
                "as it was then");
    if (master.is_inference()) master = master.clone();
    read.masters[parameter.unsafeGetTensorImpl()] = {parameter, {.master = std::move(master)}};
  });
  read.progress = read_progress(archive, inner_->param_groups().size());
  if (!read.progress.base_lrs.empty()) (void)detail::lrs_of(inner_->param_groups());
  TORCH_CHECK(
      archive.try_read("optimizer", read.inner),
      "MasterWeights: the archive lacks the inner optimizer; it is damaged: load an earlier one");
  return read;
}

MEZZO_INLINE void MasterWeights::check_load(torch::serialize::InputArchive& archive) const {
  ArchiveContents all = read_archive(archive);
  detail::check_load(all.inner, *inner_);
}

MEZZO_INLINE void MasterWeights::load(torch::serialize::InputArchive& archive) {
  const detail::NoGradInferenceGuard no_graph;
  ArchiveContents all = read_archive(archive);
  detail::load_whole(all.inner, *inner_);
  masters_ = std::move(all.masters);  // the next step compares them with the parameters
  load_progress(all.progress);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
