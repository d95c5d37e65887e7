#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/detail/sharded_weights.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

template <class OptimizerType>
ShardedOptimizer<OptimizerType>::ShardedOptimizer(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, Communicator communicator,
    const Options& defaults, const ShardedOptimizerOptions& options)
    : Optimizer(groups, std::make_unique<Options>(defaults)),
      communicator_(std::move(communicator)),
      buckets_(trained_parameters(),
               {.bucket_bytes = options.bucket_bytes, .parts = communicator_.size()}),
      weights_(detail::shared(buckets_), communicator_) {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    check_options(options_of(group));
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      known_.push_back({parameter, group, parameter.requires_grad()});
      if (parameter.requires_grad()) group_of_.push_back(group);
    }
  }
  inner_ = make_inner(defaults);
  exchange_ = std::make_shared<detail::ShardExchange>(*detail::shared(buckets_), communicator_);
  auto reduction = std::make_shared<detail::GradientReduction>(
      "ShardedOptimizer", *detail::shared(buckets_), communicator_, exchange_);
  buckets_.on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

/// Returns what is trained, alike on all ranks, with the dtype of gradients that the options ask
/// for.
template <class OptimizerType>
std::vector<at::Tensor> ShardedOptimizer<OptimizerType>::trained_parameters() const {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    if (!options_of(group).accumulate_in_float()) continue;
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      detail::accumulate_in_float(parameter);
    }
  }
  return detail::start_groups_alike(param_groups_, communicator_);
}

template <class OptimizerType>
ShardedOptimizer<OptimizerType>::~ShardedOptimizer() {
  buckets_.on_ready(nullptr);
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_options(const Options& options) {
  TORCH_CHECK(options.weight_storage() != optim::WeightStorage::stochastic,
              "ShardedOptimizer: WeightStorage::stochastic draws bits by an element's place in the "
              "whole parameter, of which a rank trains a part; use WeightStorage::master");
}

template <class OptimizerType>
auto ShardedOptimizer<OptimizerType>::options_of(std::size_t group) const -> Options {
  return detail::group_options<Options>(param_groups_, group, *defaults_, Traits::kName);
}

/// Its groups are the slices of this one's.
template <class OptimizerType>
auto ShardedOptimizer<OptimizerType>::make_inner(const Options& defaults) const
    -> std::unique_ptr<Inner> {
  std::vector<std::vector<at::Tensor>> slices(param_groups_.size());
  for (const detail::ShardSlice& slice : weights_.slices()) {
    slices[group_of_[slice.parameter]].push_back(slice.weights);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t group = 0; group < slices.size(); ++group) {
    groups.emplace_back(std::move(slices[group]), std::make_unique<Options>(options_of(group)));
  }
  return std::make_unique<Inner>(groups, defaults);
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_groups() const {
  std::size_t number = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const bool is_known = number < known_.size() && known_[number].group == group &&
                            known_[number].parameter.is_same(parameter);
      TORCH_CHECK(is_known,
                  "ShardedOptimizer: its groups have another parameter than they were made with, "
                  "in group ",
                  group, "; make a new ShardedOptimizer with all parameters");
      TORCH_CHECK(known_[number].is_trained || !parameter.requires_grad(),
                  "ShardedOptimizer: ", detail::parameter_words(number, parameter),
                  " was frozen when the optimizer was made and has no part in it; make a new "
                  "ShardedOptimizer once it requires grad");
      ++number;
    }
  }
  TORCH_CHECK(number == known_.size(), "ShardedOptimizer: its groups lack ", known_.size() - number,
              " of the parameters that they were made with; freeze them instead");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::mirror_groups() const {
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const Options options = options_of(group);
    check_options(options);
    static_cast<Options&>(inner_->param_groups()[group].options()) = options;
  }
  if (inner_->lr_factors() != lr_factors()) inner_->set_lr_factors(lr_factors());
  if (lr_factors().empty()) return;
  // A copy: whether a rank has gradients to step with or not, all count alike.
  if (applied_on_device().defined()) {
    inner_->applied_count().move_to(applied_on_device().clone());
  } else {
    inner_->applied_count().set(applied_steps());
  }
}

template <class OptimizerType>
bool ShardedOptimizer<OptimizerType>::has_gradient() const {
  const std::vector<at::Tensor>& parameters = weights_.parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.grad().defined(); });
}

/// Slices have the gradients that their parameters have.
template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::prepare() {
  check_groups();
  mirror_groups();
  buckets_.reattach_gradients();
  TORCH_CHECK(
      exchange_->has_summed() || !has_gradient(),
      "ShardedOptimizer: no backward pass has summed the gradients over the ranks since the "
      "last step; let no_sync() end before the last micro-batch");
  weights_.settle();
  for (const detail::ShardSlice& slice : weights_.slices()) {
    const bool has_one = weights_.parameters()[slice.parameter].grad().defined();
    slice.weights.mutable_grad() = has_one ? slice.gradients : at::Tensor();
  }
}

/// Whatever was summed before, it is not the whole of what is there afterwards.
template <class OptimizerType>
GradBuckets::NoSync ShardedOptimizer<OptimizerType>::no_sync() {
  exchange_->set_has_summed(false);
  return buckets_.no_sync();
}

/// Returns the first device that has a gradient. Alike on all ranks, for a parameter that has a
/// gradient on one rank has one on all.
template <class OptimizerType>
std::optional<at::Device> ShardedOptimizer<OptimizerType>::device_of_gradients() const {
  for (const at::Tensor& parameter : weights_.parameters()) {
    if (parameter.grad().defined()) return parameter.device();
  }
  return std::nullopt;
}

template <class OptimizerType>
StepPlan ShardedOptimizer<OptimizerType>::plan() {
  const c10::NoGradGuard no_grad;
  prepare();
  StepPlan plan = inner_->plan();
  plan.has_rows_elsewhere = has_gradient();
  for (const Known& known : known_) {  // on all ranks, whose slices of it they may be
    const at::Tensor& gradient = known.parameter.grad();
    const bool is_half = gradient.defined() && gradient.scalar_type() == at::kHalf;
    plan.has_bare_half |= is_half && !keeps_master(known.group, known.parameter);
  }
  return plan;
}

template <class OptimizerType>
Verdict ShardedOptimizer<OptimizerType>::read(const StepPlan& plan, const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  const std::optional<at::Device> device = device_of_gradients();
  const at::Tensor inverse = inv_scale.mul(1. / communicator_.size());
  const Verdict own = inner_->read(plan, inverse).on(device.value_or(inv_scale.device()));
  return device ? detail::agreed(own, communicator_) : own;
}

/// Returns what makes a step take the average of gradients, which are sums.
template <class OptimizerType>
Verdict ShardedOptimizer<OptimizerType>::average_of_sums() const {
  const std::optional<at::Device> device = device_of_gradients();
  if (communicator_.size() == 1 || !device) return {};
  const auto number = at::TensorOptions().device(*device).dtype(at::kFloat);
  return {.inv_scale = at::full({}, 1. / communicator_.size(), number),
          .found_inf = at::zeros({}, number)};
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::apply(StepPlan plan, const Verdict& verdict,
                                            const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK(!publishes(),
              "ShardedOptimizer: it writes no copies of weights for a WeightCache, of which it "
              "makes a part alone; call stop_publishing(), and regions cast as ever");
  if (!exchange_->has_summed()) prepare();  // which throws for a plan used up
  const Verdict own = verdict.defined() ? verdict : average_of_sums();
  inner_->apply(std::move(plan), own, options);
  weights_.gather();
  count_applied(own);
  exchange_->set_has_summed(false);
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::count_applied(const Verdict& verdict) {
  const at::Tensor& count = applied_on_device();
  const at::Device device =
      count.defined() ? count.device() : device_of_gradients().value_or(at::Device(at::kCPU));
  detail::count_step(applied_count(), device, verdict.on(device).found_inf);
}

template <class OptimizerType>
ShardedOptimizerBytes ShardedOptimizer<OptimizerType>::bytes() const {
  ShardedOptimizerBytes bytes{.weights = weights_.bytes()};
  for (const GradBucket& bucket : buckets_.buckets()) {
    bytes.gradients += static_cast<int64_t>(bucket.flat.nbytes());
  }
  for (const auto& [slice, kept] : inner_->state()) {
    State& state = static_cast<State&>(*kept);
    for (const at::Tensor* tensor : detail::kept_tensors(state)) {
      if (tensor->defined()) bytes.state += static_cast<int64_t>(tensor->nbytes());
    }
    if (state.lower_half().defined()) {
      bytes.state += static_cast<int64_t>(state.lower_half().nbytes());
    }
  }
  return bytes;
}

template <class OptimizerType>
bool ShardedOptimizer<OptimizerType>::keeps_master(std::size_t group,
                                                   const at::Tensor& parameter) const {
  const optim::WeightStorage wanted = options_of(group).weight_storage();
  return detail::storage_of(parameter, wanted, {Traits::kName, param_groups_}) ==
         optim::WeightStorage::master;
}

template <class OptimizerType>
at::Tensor ShardedOptimizer<OptimizerType>::master_param(std::size_t /*group*/,
                                                         const at::Tensor& /*parameter*/) {
  TORCH_CHECK(false,
              "ShardedOptimizer: a rank trains a part of each parameter, and has no master of a "
              "whole one; clip with scaler.step(optimizer, {.max_norm = ...})");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::enable_master_weights() {
  TORCH_CHECK(false,
              "ShardedOptimizer: weights are cast first, and then sharded; make the optimizer from "
              "the cast model, with weight_storage(WeightStorage::master) in its options");
}

template <class OptimizerType>
void ShardedOptimizer<OptimizerType>::check_unscale() const {
  TORCH_CHECK(
      false,
      "ShardedOptimizer: gradients cannot be unscaled or clipped where they lie, for a rank "
      "has the sums of its part alone, and would clip by the norm of that; use "
      "scaler.step(optimizer, {.max_norm = ...}), which unscales and clips all alike");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
