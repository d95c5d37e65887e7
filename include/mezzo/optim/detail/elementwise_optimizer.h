#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/aten_step.h>
#include <mezzo/optim/detail/group_options.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/detail/rank_sum.h>
#include <mezzo/optim/detail/step_count.h>
#include <mezzo/optim/detail/step_participants.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
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
///   begins(options, state), whether what the state counts begins anew with the next step;
///   kAtenHasIt, and if so check_for_aten(options), which refuses what ATen cannot do, and
///   aten_step(options, lists, verdict); and cuda_step, with variant(options) (cuda_launch.h).
template <class Traits>
class ElementwiseOptimizer : public optim::FusedOptimizer {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  // Derived classes inherit the constructors: ones of their own, being no templates, would
  // instantiate all this in every unit that sees them.
  explicit ElementwiseOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                const Options& defaults = {})
      : FusedOptimizer(groups, std::make_unique<Options>(defaults)) {
    check_options(defaults);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      check_options(options_of(group));
    }
    look_at_parameters();
  }

  explicit ElementwiseOptimizer(std::vector<at::Tensor> parameters, const Options& defaults = {})
      : ElementwiseOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {
  }

  explicit ElementwiseOptimizer(GradBuckets& buckets, const Options& defaults = {})
      : ElementwiseOptimizer({torch::optim::OptimizerParamGroup(buckets.parameters())}, defaults) {
    buckets_ = buckets.share();
    dividing_reader_ = buckets_->dividing_reader();
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode enable_grad(true);
      loss = closure();
    }
    for (const auto& [parameter, state] : state_) {
      if (const auto* const own = dynamic_cast<const State*>(state.get())) {
        refuse_unscaled_master(own->master(), Traits::kName);
      }
    }
    fused_step({});
    return loss;
  }

  void fused_step(const optim::FusedStep& step) override {
    std::vector<Bystander> bystanders;
    auto all = participants_by_device(step.master_gradients, bystanders);
    const NoGraphGuard no_graph(trains_inference_tensors(all));
    const double rank_factor = rank_factor_of(all, step);
    bool is_counted = false;
    for (auto& [device, participants] : all) {
      if (device.is_cpu()) {
        step_cpu(participants, step, rank_factor);
      } else {
        is_counted = step_on_device(participants, step, rank_factor, all.size() == 1);
      }
    }
    if (!is_counted) count_applied(all, step);
    average(bystanders, step);
    if (step.master_gradients && step.options.zero_grad) clear_gradients_beside_masters();
    if (step.options.zero_grad) forget_rank_sums(own_parameters());
  }

  /// The step through ATen's fused kernels, which on the CPU too are there to be tested.
  void fused_step_with_aten(const optim::FusedStep& step) {
    std::vector<Bystander> bystanders;
    auto all = participants_by_device(step.master_gradients, bystanders);
    const NoGraphGuard no_graph(trains_inference_tensors(all));
    const double rank_factor = rank_factor_of(all, step);
    for (auto& [device, participants] : all) step_with_aten(participants, step, rank_factor);
    count_applied(all, step);
    average(bystanders, step);
  }

  GradientSummary summarize(const std::vector<at::Tensor>& gradients,
                            const at::Tensor& inv_scale) override;

  void enable_master_weights() override {
    const auto keep = [](torch::optim::OptimizerOptions& options) {
      auto* const own = dynamic_cast<Options*>(&options);  // libtorch's own follow the defaults
      if (own != nullptr && own->weight_storage() == optim::WeightStorage::plain) {
        own->weight_storage(optim::WeightStorage::master);
      }
    };
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      (void)options_of(group);  // of this kind, or it throws
    }
    keep(*defaults_);
    for (auto& group : param_groups_) keep(group.options());
  }
  bool keeps_master(std::size_t group, const at::Tensor& parameter) const override;
  at::Tensor master_param(std::size_t group, const at::Tensor& parameter) override;
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
    std::vector<std::pair<StepCount, int64_t>> counts;         // what they are after the step
    std::vector<c10::TensorImpl*> written;                     // raw, which autograd does not see
    const Options* options = nullptr;  // whose coefficients are those of the last task
    int64_t count = 0;
    Coefficients coefficients{};
    double lr_factor = 1.0;
  };

  static void check_options(const Options& options);
  Options options_of(std::size_t group) const;
  const State* state_of(const at::Tensor& parameter) const;

  // Who takes part, and with what: all is checked before anything is written
  // (elementwise_optimizer_parameters.h).
  void look_at_parameters();
  std::vector<at::Tensor> own_parameters() const;
  std::vector<DeviceParticipants<Traits>> participants_by_device(
      bool master_gradients, std::vector<Bystander>& bystanders);
  at::Tensor master_gradient(const at::Tensor& parameter) const;
  void clear_gradients_beside_masters();
  State& state_for(const at::Tensor& parameter);
  State* checked_state(const at::Tensor& parameter, const Options& options);
  void open_states(Many& all);
  static at::Tensor& fitting_moment(const One& one, int k, const at::Tensor& parameter);
  static double rank_factor_of(const std::vector<DeviceParticipants<Traits>>& all,
                               const optim::FusedStep& step);
  void follow_parameters();
  static const optim::DeviceVerdict* verdict_on(at::Device device, const optim::FusedStep& step);
  static bool shares_gradients(const Many& all);
  static void clear_gradients(const Many& all);
  at::Device counting_device(const std::vector<DeviceParticipants<Traits>>& all);
  void count_applied(const std::vector<DeviceParticipants<Traits>>& all,
                     const optim::FusedStep& step);

  // Averages of parameters that a step passes by (elementwise_optimizer_averages.h).
  bool is_averaged(const at::Tensor& parameter, const Options& options);
  static at::Tensor found_inf_on(at::Device device, const optim::FusedStep& step);
  void average(const std::vector<Bystander>& bystanders, const optim::FusedStep& step);

  static int64_t read_applied_steps(torch::serialize::InputArchive& archive,
                                    const Optimizer& read);  // elementwise_optimizer_archive.h

  // mezzo's kernels (elementwise_optimizer_step.h)
  static std::optional<double> gradient_factor(const optim::FusedStep& step, double rank_factor);
  void step_cpu(Many& all, const optim::FusedStep& step, double rank_factor);
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
  bool step_on_device(Many& all, const optim::FusedStep& step, double rank_factor, bool is_alone);
#ifdef MEZZO_WITH_CUDA
  void step_on_cuda(Many& all, const optim::FusedStep& step, double rank_factor,
                    bool counts_applied);
  std::vector<StepRow> rows_of(const Many& all, bool clear,
                               std::vector<StepGroup<Constants>>& groups, Prepared& prepared);
  static std::vector<float*> place_counters(const Many& all, at::Device device,
                                            std::vector<StepRow>& rows);
#endif
  at::Tensor applied_on(at::Device device, bool counts_there);
  static void restart_counts(const Many& all);
  struct AtenCall;
  static void check_for_aten(const One& one);
  static void make_calls(std::vector<AtenCall>& calls, const std::vector<at::Tensor>& counts,
                         const AtenVerdict& verdict);
  void step_with_aten(Many& all, const optim::FusedStep& step, double rank_factor);
  void add_to_call(const One& one, bool copies_gradient, std::vector<AtenCall>& calls,
                   std::vector<StepCount>& counts,
                   std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  static void finish_with_aten(const Many& all, const AtenVerdict& verdict);

  std::shared_ptr<BucketedGradients> buckets_;  // null where the optimizer stands on parameters
  std::shared_ptr<void> dividing_reader_;       // while it reads all that lies in the buckets
  std::vector<Options> step_options_;           // of the groups, as the step that runs takes them
  SeenParameters seen_;
  int64_t parameters_version_ = 0;    // one higher whenever they are others
  int64_t bucketed_version_ = 0;      // of those that were last put into the buckets
  bool buckets_hold_others_ = false;  // which are not, or no more, this optimizer's
};

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

/// Of gradients that are sums over ranks. A verdict's inv_scale has it in it.
template <class Traits>
double ElementwiseOptimizer<Traits>::rank_factor_of(
    const std::vector<DeviceParticipants<Traits>>& all, const optim::FusedStep& step) {
  if (!step.verdicts.empty()) return 1.0;
  std::vector<at::Tensor> parameters;
  for (const DeviceParticipants<Traits>& on_device : all) {
    for (const One& one : on_device.participants) parameters.push_back(*one.parameter);
  }
  return rank_sum_factor(parameters);
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
  for (const One& one : all) clear_gradient(one.gradient);
}

/// The device that decides whether steps are applied counts them. Of several, one speaks for all:
/// they step together or not at all.
template <class Traits>
at::Device ElementwiseOptimizer<Traits>::counting_device(
    const std::vector<DeviceParticipants<Traits>>& all) {
  const at::Tensor& count = applied_on_device();
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/elementwise_optimizer_archive.h>
#include <mezzo/optim/detail/elementwise_optimizer_averages.h>
#include <mezzo/optim/detail/elementwise_optimizer_device.h>
#include <mezzo/optim/detail/elementwise_optimizer_parameters.h>
#include <mezzo/optim/detail/elementwise_optimizer_step.h>
