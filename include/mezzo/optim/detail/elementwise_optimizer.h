#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/optim/detail/dense_memory.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/group_options.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/optimizer_traits.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/detail/step_count.h>
#include <mezzo/optim/detail/trained_once.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/optimizer_step_table.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A parameter with a gradient.
template <class Traits>
struct Participant {
  const at::Tensor* parameter;
  at::Tensor gradient;
  const typename Traits::Options* options;
  optim::WeightStorage storage;
  typename Traits::Loop run;
  typename Traits::State* state;  ///< null where nothing is remembered, or nothing yet
  uint64_t number;                ///< in the optimizer
  bool begins = false;            ///< what the state counts begins anew with this step
};

/// A parameter without a gradient, whose average follows it nevertheless.
struct Bystander {
  const at::Tensor* parameter;
  double ema_decay;  ///< 0 where the average that there was goes
  optim::WeightStorage storage;
};

template <class Traits>
struct DeviceParticipants {
  at::Device device;
  std::vector<Participant<Traits>> participants;
};

/// The steps of an optimizer whose update looks at one element of a parameter at a time. Traits say
/// what is AdamW's, SGD's ... own (optimizer_traits.h).
template <class Traits>
class ElementwiseOptimizer : public torch::optim::Optimizer, public optim::FusedOptimizer {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  // Derived classes inherit the constructors: ones of their own, being no templates, would
  // instantiate all this in every unit that sees them.
  explicit ElementwiseOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                const Options& defaults = {})
      : Optimizer(groups, std::make_unique<Options>(defaults)) {
    check_options(defaults);
    check_has_parameters(!groups.empty());
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      keep_given_options<Options>(param_groups_[group], groups[group]);
      check_options(options_of(group));
    }
    look_at_parameters();
  }

  explicit ElementwiseOptimizer(std::vector<at::Tensor> parameters, const Options& defaults = {})
      : ElementwiseOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {
    check_has_parameters(!param_groups_.front().params().empty());
  }

  /// libtorch's, with all of the group's options; called through `torch::optim::Optimizer&`, from
  /// libtorch 2.12 on, what mezzo adds to libtorch's options is taken from the defaults.
  /// \throws c10::Error, and has not added the group, if its options are out of range or those of
  ///   another optimizer
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    keep_given_options<Options>(param_groups_.back(), group);
    try {
      check_options(options_of(param_groups_.size() - 1));
    } catch (const c10::Error&) {
      param_groups_.pop_back();
      throw;
    }
  }

  torch::optim::Optimizer& optimizer() noexcept override { return *this; }

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
    apply({});
    return loss;
  }

  GradientReport report(const at::Tensor& inv_scale, bool of_masters = false) override;
  void apply(const GradientReport& report, const StepOptions& options = {}) override {
    apply_with(report, options, /*with_aten=*/false);
  }

  /// The step through ATen's fused kernels, which on the CPU too are there to be tested.
  void apply_with_aten(const GradientReport& report, const StepOptions& options = {}) {
    apply_with(report, options, /*with_aten=*/true);
  }

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
  OptimizerWords words() const noexcept { return {Traits::kName, param_groups_}; }

  using Constants = typename Traits::Constants;
  using Coefficients = typename Traits::Coefficients;
  using Task = StepTask<typename Traits::Loop, Coefficients>;
  using One = Participant<Traits>;
  using Many = std::vector<One>;

  /// Who takes part in a step, and with what: all is looked up and checked before anything is
  /// written. It serves one step, that of the report that it was made for, unless what it points to
  /// has been replaced meanwhile.
  struct Plan {
    std::uint64_t number = 0;        ///< of the report; 0: there is none
    std::vector<Options> options{};  ///< of the groups, as the step takes them
    std::vector<std::pair<const at::Tensor*, std::size_t>> groups{};  ///< where their lists lie
    std::size_t states = 0;                                           ///< how many there were
    std::vector<DeviceParticipants<Traits>> devices{};
    std::vector<Bystander> bystanders{};
    bool has_inference = false;  ///< a parameter is an inference tensor
    bool has_bare_half = false;  ///< see GradientReport

    void clear() noexcept {
      number = 0;
      options.clear();
      groups.clear();
      devices.clear();
      bystanders.clear();
      has_inference = has_bare_half = false;
    }
  };

  /// What a step on mezzo's kernels is made of.
  struct Prepared {
    std::vector<Task> tasks;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (what has gaps, its dense copy)
    std::vector<at::Tensor> gradients;                      // copies, kept alive
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
  static void check_has_parameters(bool has_parameters);
  Options options_of(std::size_t group) const;
  optim::WeightStorage storage_in(std::size_t group, const at::Tensor& parameter) const;
  const State* state_of(const at::Tensor& parameter) const;

  // Who takes part, and with what (elementwise_optimizer_plan.h).
  void look_at_parameters();
  void settle_parameters(bool are_others);
  std::vector<at::Tensor> own_parameters() const;
  std::vector<std::pair<const at::Tensor*, std::size_t>> parameter_lists() const;
  void make_plan(bool of_masters);
  bool is_planned(const GradientReport& report) const;
  void plan_parameter(const at::Tensor& parameter, std::uint64_t number, const Options& options,
                      bool of_masters);
  at::Tensor master_gradient(const at::Tensor& parameter) const;
  State& state_for(const at::Tensor& parameter);
  State* checked_state(const at::Tensor& parameter, const Options& options);
  void open_state(One& one);
  static at::Tensor& fitting_moment(const One& one, int k, const at::Tensor& parameter);
  static const DeviceGradientReport* report_on(at::Device device, const GradientReport& report);
  bool shares_gradients(const Many& all);
  static void clear_gradients(const Many& all);
  void apply_with(const GradientReport& report, const StepOptions& options, bool with_aten);
  void apply_plan(const GradientReport& report, const StepOptions& options, bool with_aten);
  at::Device counting_device() const;
  void count_applied(const GradientReport& report);

  // Averages of parameters that a step passes by.
  bool is_averaged(const at::Tensor& parameter, const Options& options);
  static at::Tensor found_inf_on(at::Device device, const GradientReport& report);
  void average(const GradientReport& report);

  static int64_t read_applied_steps(torch::serialize::InputArchive& archive,
                                    const Optimizer& read);  // elementwise_optimizer_state.h

  // mezzo's kernels (elementwise_optimizer_step.h)
  static std::optional<double> gradient_factor(const GradientReport& report, double max_norm);
  void step_cpu(Many& all, const GradientReport& report, const StepOptions& options);
  void prepare(One& one, const StepUse& use, Prepared& prepared);
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
  bool step_on_device(Many& all, const GradientReport& report, const StepOptions& options,
                      bool is_alone);
#ifdef MEZZO_WITH_CUDA
  void step_on_cuda(Many& all, const GradientReport& report, const StepOptions& options,
                    bool counts_applied);
  std::vector<StepRow> rows_of(const Many& all, bool clear,
                               std::vector<StepGroup<Constants>>& groups, Prepared& prepared);
  static std::vector<float*> place_counters(const Many& all, at::Device device,
                                            std::vector<StepRow>& rows);
#endif
  at::Tensor applied_on(at::Device device, bool counts_there);
  static void restart_counts(const Many& all);
  struct AtenCall;
  void check_for_aten(const One& one) const;
  static void make_calls(std::vector<AtenCall>& calls, const std::vector<at::Tensor>& counts,
                         const AtenVerdict& verdict);
  void step_with_aten(Many& all, const GradientReport& report, const StepOptions& options);
  void add_to_call(const One& one, bool copies_gradient, std::vector<AtenCall>& calls,
                   std::vector<StepCount>& counts,
                   std::vector<std::pair<at::Tensor, at::Tensor>>& copies);
  static void finish_with_aten(const Many& all, const AtenVerdict& verdict);

  Plan plan_;
  std::uint64_t last_plan_ = 0;
  SeenParameters seen_;
  SeenParameters seen_gradients_;  // that shared_gradients_ was found of
  bool shared_gradients_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/elementwise_optimizer_device.h>
#include <mezzo/optim/detail/elementwise_optimizer_plan.h>
#include <mezzo/optim/detail/elementwise_optimizer_state.h>
#include <mezzo/optim/detail/elementwise_optimizer_step.h>
