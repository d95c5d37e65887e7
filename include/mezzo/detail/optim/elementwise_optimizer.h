#pragma once

#include <mezzo/detail/kernels/optimizer_step_cpu.h>
#include <mezzo/detail/kernels/step_use.h>
#include <mezzo/detail/optim/aten_step.h>
#include <mezzo/detail/optim/kept_weights.h>
#include <mezzo/detail/optim/step_count.h>
#include <mezzo/detail/optim/step_participants.h>
#include <mezzo/grad_buckets.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/detail/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The steps of an optimizer whose update looks at one element of a parameter at a time.
///
/// Traits say what is AdamW's, SGD's ... own:
///   kName; Options and State, as libtorch's serialization wants them; Constants and Coefficients,
///   the numbers of a group and of one step (adam_element.h);
///   check(options), constants(options); Loop, and loop(options, storage, kept dtype, gradient
///   dtype, isa), the CPU's;
///   moments(options), how many there are, and moment(state, k), the k-th; has_state(options),
///   whether anything is remembered of a parameter;
///   aten_step(options, lists, verdict); and cuda_step, with variant(options) (cuda_launch.h).
template <class Traits>
class ElementwiseOptimizer : public optim::FusedOptimizer {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  ElementwiseOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const Options& defaults)
      : FusedOptimizer(groups, std::make_unique<Options>(defaults)) {
    check_options(defaults);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      check_options(options_of(group));
    }
    look_for_duplicates();
  }

  ElementwiseOptimizer(GradBuckets& buckets, const Options& defaults)
      : ElementwiseOptimizer({torch::optim::OptimizerParamGroup(buckets.parameters())}, defaults) {
    buckets_ = buckets.share();
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode enable_grad(true);
      loss = closure();
    }
    fused_step({});
    return loss;
  }

  void fused_step(const optim::FusedStep& step) override {
    const c10::NoGradGuard no_grad;
    auto all = participants_by_device();
    bool is_counted = false;
    for (auto& [device, participants] : all) {
      if (device.is_cpu()) {
        step_cpu(participants, step);
      } else {
        is_counted = step_on_device(participants, step, all.size() == 1);
      }
    }
    if (!is_counted) count_applied(all, step);
  }

  /// The step through ATen's fused kernels, which on the CPU too are there to be tested.
  void fused_step_with_aten(const optim::FusedStep& step) {
    const c10::NoGradGuard no_grad;
    auto all = participants_by_device();
    for (auto& [device, participants] : all) step_with_aten(participants, step);
    count_applied(all, step);
  }

  GradientSummary summarize(const std::vector<at::Tensor>& gradients,
                            const at::Tensor& inv_scale) override;

  bool keeps_averages() const override;
  at::Tensor average_of(const at::Tensor& parameter) const override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  using Constants = typename Traits::Constants;
  using Coefficients = typename Traits::Coefficients;
  using Task = StepTask<typename Traits::Loop, Coefficients>;
  using One = Participant<Traits>;
  using Many = std::vector<One>;

  /// What a step on mezzo's kernels is made of.
  struct Prepared {
    std::vector<Task> tasks;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (what has gaps, its dense copy)
    std::vector<at::Tensor> gradients;                      // kept alive; some are copies
    std::vector<at::Tensor> uncleared;                      // those that were copied, if to clear
    std::vector<std::pair<at::Tensor, at::Tensor>> published;  // (weight, its low-precision copy)
    std::vector<std::pair<StepCount*, int64_t>> counts;        // what they are after the step
    std::vector<c10::TensorImpl*> written;                     // raw, which autograd does not see
    const Options* options = nullptr;  // whose coefficients are those of the last task
    int64_t count = 0;
    Coefficients coefficients{};
    double lr_factor = 1.0;
  };

  static void check_options(const Options& options);
  const Options& options_of(std::size_t group) const;
  void look_for_duplicates();
  std::vector<at::Tensor> parameters_outside_of(const std::vector<at::Tensor>& known) const;

  // All is checked before anything is written.
  std::vector<DeviceParticipants<Traits>> participants_by_device();
  void open_states(Many& all);
  static at::Tensor& fitting_moment(const One& one, int k, const at::Tensor& parameter);
  static const optim::DeviceVerdict* verdict_on(at::Device device, const optim::FusedStep& step);
  static bool shares_gradients(const Many& all);
  static void clear_gradients(const Many& all);
  at::Device counting_device(const std::vector<DeviceParticipants<Traits>>& all);
  void count_applied(const std::vector<DeviceParticipants<Traits>>& all,
                     const optim::FusedStep& step);

  // mezzo's kernels (elementwise_optimizer_step.h)
  static std::optional<double> gradient_factor(const optim::FusedStep& step);
  void step_cpu(Many& all, const optim::FusedStep& step);
  void prepare(const One& one, const StepUse& use, Prepared& prepared);
  static void use_of(const One& one, StepUse& use);
  static StepElementSizes element_sizes(const One& one);
  void set_coefficients(const One& one, int64_t count, Prepared& prepared);
  static void settle(const One& one);
  StepSpan span_of(const One& one, bool clear, Prepared& prepared);
  void place_weights(const One& one, const at::Tensor& parameter, StepSpan& span,
                     Prepared& prepared);
  void finish(const Many& all, bool clear_all, const Prepared& prepared);

  // Other devices (elementwise_optimizer_device.h)
  // With the only device there is, may count the step as applied on the way; says whether it did.
  bool step_on_device(Many& all, const optim::FusedStep& step, bool is_alone);
  void step_on_cuda(Many& all, const optim::FusedStep& step, bool counts_applied);
  at::Tensor applied_on(at::Device device, bool counts_there);
  struct AtenCall;
  void step_with_aten(Many& all, const optim::FusedStep& step);
  void add_to_call(const One& one, bool copies_gradient, std::vector<AtenCall>& calls,
                   std::vector<StepCount*>& counts,
                   std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  static void finish_with_aten(const Many& all, const AtenVerdict& verdict);

  std::shared_ptr<BucketedGradients> buckets_;  // null where the optimizer stands on parameters
  std::size_t bucketed_parameters_ = 0;         // how many there were when all were last in buckets
  std::size_t checked_parameters_ = 0;          // how many there were when they were last compared
};

template <class Traits>
void ElementwiseOptimizer<Traits>::check_options(const Options& options) {
  Traits::check(options);
  TORCH_CHECK(options.ema_decay() >= 0 && options.ema_decay() < 1, Traits::kName, ": ema_decay is ",
              options.ema_decay(), "; it should be at least 0, which is none, and less than 1");
}

template <class Traits>
auto ElementwiseOptimizer<Traits>::options_of(std::size_t group) const -> const Options& {
  const auto* options = dynamic_cast<const Options*>(&param_groups_[group].options());
  TORCH_CHECK(options != nullptr, Traits::kName, ": the options of parameter group ", group,
              " are not mezzo::optim::", Traits::kName, "Options; make the group with those");
  return *options;
}

/// Looks again when there are more parameters.
template <class Traits>
void ElementwiseOptimizer<Traits>::look_for_duplicates() {
  std::size_t number = 0;
  for (const auto& group : param_groups_) number += group.params().size();
  if (number == checked_parameters_) return;
  refuse_duplicates(param_groups_, Traits::kName);
  checked_parameters_ = number;
}

template <class Traits>
auto ElementwiseOptimizer<Traits>::participants_by_device()
    -> std::vector<DeviceParticipants<Traits>> {
  look_for_duplicates();
  std::vector<DeviceParticipants<Traits>> all;
  uint64_t number = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const Options& options = options_of(group);
    check_options(options);
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const uint64_t own_number = number++;
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      const auto storage = storage_of(parameter, options.weight_storage(), Traits::kName);
      const auto run = checked_loop<Traits>(options, storage, parameter, gradient);
      const at::Device device = parameter.device();
      if (all.empty() || all.back().device != device) select_device(all, device);
      all.back().participants.push_back(
          {&parameter, gradient, &options, storage, run, nullptr, own_number});
    }
  }
  return all;
}

/// For a step that will not be skipped, as far as the host knows.
template <class Traits>
void ElementwiseOptimizer<Traits>::open_states(Many& all) {
  for (One& one : all) {
    if (!keeps_state<Traits>(*one.options, one.storage)) continue;
    auto& slot = state_[one.parameter->unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>();
    one.state = static_cast<State*>(slot.get());
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
  check_shape_of(moment, "a moment", parameter, Traits::kName);
  moment = in_layout_of(parameter, moment.to(parameter.device(), dtype));
  return moment;
}

template <class Traits>
const optim::DeviceVerdict* ElementwiseOptimizer<Traits>::verdict_on(at::Device device,
                                                                     const optim::FusedStep& step) {
  for (const optim::DeviceVerdict& verdict : step.verdicts) {
    if (verdict.inv_scale.device() == device) return &verdict;
  }
  TORCH_CHECK(step.verdicts.empty(), Traits::kName, ": the step has no verdict for ", device,
              ", where there are gradients");
  return nullptr;
}

/// Then no gradient may be cleared before all are read.
template <class Traits>
bool ElementwiseOptimizer<Traits>::shares_gradients(const Many& all) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(all.size());
  for (const One& one : all) gradients.push_back(one.gradient);
  return may_overlap(gradients);
}

template <class Traits>
void ElementwiseOptimizer<Traits>::clear_gradients(const Many& all) {
  for (const One& one : all) one.gradient.zero_();
}

/// The device that decides whether steps are applied counts them. Of several, one speaks for all:
/// they step together or not at all.
template <class Traits>
at::Device ElementwiseOptimizer<Traits>::counting_device(
    const std::vector<DeviceParticipants<Traits>>& all) {
  const at::Tensor& count = applied_count().on_device();
  for (const DeviceParticipants<Traits>& one : all) {
    if (count.defined() && one.device == count.device()) return one.device;
  }
  return all.front().device;
}

template <class Traits>
void ElementwiseOptimizer<Traits>::count_applied(const std::vector<DeviceParticipants<Traits>>& all,
                                                 const optim::FusedStep& step) {
  if (all.empty()) return;
  const at::Device device = counting_device(all);
  const optim::DeviceVerdict* const verdict = verdict_on(device, step);
  count_step(applied_count(), device, verdict == nullptr ? at::Tensor() : verdict->found_inf);
}

template <class Traits>
GradientSummary ElementwiseOptimizer<Traits>::summarize(const std::vector<at::Tensor>& gradients,
                                                        const at::Tensor& inv_scale) {
  if (buckets_ == nullptr) return FusedOptimizer::summarize(gradients, inv_scale);
  look_for_duplicates();
  if (bucketed_parameters_ != checked_parameters_) {
    buckets_->add_parameters(parameters_outside_of(buckets_->parameters()));
    bucketed_parameters_ = checked_parameters_;
  }
  return buckets_->summarize(inv_scale);
}

/// Those of groups that were added later, first of all.
template <class Traits>
std::vector<at::Tensor> ElementwiseOptimizer<Traits>::parameters_outside_of(
    const std::vector<at::Tensor>& known) const {
  std::unordered_set<const c10::TensorImpl*> inside;
  for (const at::Tensor& parameter : known) inside.insert(parameter.unsafeGetTensorImpl());
  std::vector<at::Tensor> outside;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (inside.count(parameter.unsafeGetTensorImpl()) == 0) outside.push_back(parameter);
    }
  }
  return outside;
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
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? at::Tensor() : static_cast<const State&>(*found->second).ema();
}

template <class Traits>
void ElementwiseOptimizer<Traits>::save(torch::serialize::OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  std::vector<State*> lent;  // a file has the whole of split weights, as if they were not split
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      State& state = static_cast<State&>(*found->second);
      if (!state.lower_half().defined() || state.master().defined()) continue;
      state.master(trained_value(parameter, state));
      lent.push_back(&state);
    }
  }
  torch::optim::serialize<State, Options>(archive, *this);
  for (State* state : lent) state->master(at::Tensor());
  archive.write("applied_steps", c10::IValue(applied_steps()));
}

template <class Traits>
void ElementwiseOptimizer<Traits>::load(torch::serialize::InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version), Traits::kName,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; save "
              "it with torch::save(optimizer, path)");
  std::vector<Options> before;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    before.push_back(options_of(group));
  }
  torch::optim::serialize<State, Options>(archive, *this);
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    static_cast<Options&>(param_groups_[group].options()).keep_unread(before[group]);
  }
  int64_t applied = 0;
  c10::IValue saved;
  if (archive.try_read("applied_steps", saved)) {
    applied = saved.toInt();
  } else {  // libtorch's file: a parameter that had a gradient in each step knows
    for (const auto& [parameter, state] : state_) {
      applied = std::max(applied, static_cast<const State&>(*state).step());
    }
  }
  applied_count().set(applied);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/detail/optim/elementwise_optimizer_device.h>
#include <mezzo/detail/optim/elementwise_optimizer_step.h>
