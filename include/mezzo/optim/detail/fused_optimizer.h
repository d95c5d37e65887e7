#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/detail/serializable_options.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Base of an optimizer's traits, which add
///   kName, kOptionsName;
///   read_hyperparams(options, hyper_params), which checks and converts the options of a group;
///   aten_step(hyper_params, lists, amp_args), the step with ATen's fused kernel, unless
///     read_hyperparams sets hyper_params.aten_unsupported_reason.
template <class OptionsT, class StateT, class FunctorT, class ExtraMomentFunctorT = FunctorT>
struct OptimizerTraits {
  using Options = OptionsT;
  using State = StateT;
  using Functor = FunctorT;
  using ExtraMomentFunctor = ExtraMomentFunctorT;

  /// Whether archives of torch's optimizer of this name hold `step`.
  static constexpr bool kTorchStateHasStep = true;
};

/// A fused optimizer with torch's interface: constructors, options and archives. Adds the update
/// functor of `Traits` to FusedOptimizerBase.
template <class Traits>
class FusedOptimizer : public FusedOptimizerBase, public optim::ArchiveChecker {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  // Derived classes inherit the constructors. Their own, not being templates, would instantiate
  // this class in every translation unit.
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const Options& defaults = {},
                          const optim::WeightStorageOptions& storage_options = {})
      : FusedOptimizerBase(groups, std::make_unique<Options>(defaults), storage_options,
                           Traits::kName, Traits::Functor::kOptimizerKind) {
    (void)make_hyperparams(defaults);
    check_has_parameters(!groups.empty(), Traits::kName);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      restore_group_options<Options>(param_groups_[group], groups[group], *defaults_);
      (void)read_group_hyperparams(group);
    }
    check_parameters();
  }

  explicit FusedOptimizer(std::vector<at::Tensor> parameters, const Options& defaults = {},
                          const optim::WeightStorageOptions& storage_options = {})
      : FusedOptimizer(make_single_group(std::move(parameters), Traits::kName), defaults,
                       storage_options) {}

  /// Adds a group.
  /// \throws c10::Error, without adding it, if its options are out of range or another optimizer's
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    restore_group_options<Options>(param_groups_.back(), group, *defaults_);
    try {
      (void)read_group_hyperparams(param_groups_.size() - 1);
    } catch (const c10::Error&) {
      param_groups_.pop_back();
      throw;
    }
  }

  /// Reads what `save` or torch's optimizer of this name wrote. Drops states that the archive
  /// lacks.
  /// \throws c10::Error, with the strong exception guarantee, for any other archive
  void load(torch::serialize::InputArchive& archive) override;
  /// Throws what `load` would throw, and changes nothing.
  void check_load(torch::serialize::InputArchive& archive) const override {
    (void)read_archive(archive);
  }

 protected:
  GroupHyperParams read_group_hyperparams(std::size_t group) const override {
    return make_hyperparams(get_group_options<Options>(param_groups_[group], group, Traits::kName,
                                                       Traits::kOptionsName));
  }
  FunctorArgs make_functor_args(const GroupHyperParams& hyper_params, int64_t step) const override {
    return hyper_params.functor_args.as<typename Traits::Functor::HyperParams>().coefficients(
        hyper_params.lr, step);
  }
  std::unique_ptr<torch::optim::OptimizerParamState> make_param_state() const override {
    return std::make_unique<State>();
  }
  FusedParamStateBase* as_fused_state(torch::optim::OptimizerParamState& state) const override {
    if (typeid(state) == typeid(State))
      return &static_cast<State&>(state);  // the common case, faster
    return dynamic_cast<State*>(&state);
  }
  StepKernelFn select_step_kernel(const GroupHyperParams& hyper_params,
                                  optim::WeightStorage storage,
                                  at::ScalarType dtype) const override {
    return hyper_params.has_extra_moment
               ? get_step_kernel<typename Traits::ExtraMomentFunctor>(storage, dtype, best_isa())
               : get_step_kernel<typename Traits::Functor>(storage, dtype, best_isa());
  }
  void aten_step([[maybe_unused]] const GroupHyperParams& hyper_params,
                 [[maybe_unused]] const AtenTensorLists& lists,
                 [[maybe_unused]] const AtenAmpArgs& amp_args) const override {
    if constexpr (requires { Traits::aten_step(hyper_params, lists, amp_args); }) {
      Traits::aten_step(hyper_params, lists, amp_args);
    }
  }

 private:
  /// The checked contents of an archive.
  struct ArchiveContents {
    SerializedOptimizer optimizer;
    StepProgress progress;
    optim::WeightStorageOptions storage_options;
  };
  ArchiveContents read_archive(torch::serialize::InputArchive& archive) const;

  static GroupHyperParams make_hyperparams(const Options& options) {
    GroupHyperParams hyper_params;
    Traits::read_hyperparams(options, hyper_params);
    hyper_params.num_moments =
        static_cast<int>(hyper_params.has_extra_moment ? Traits::ExtraMomentFunctor::kNumMoments
                                                       : Traits::Functor::kNumMoments);
    return hyper_params;
  }
};

template <class Traits>
typename FusedOptimizer<Traits>::ArchiveContents FusedOptimizer<Traits>::read_archive(
    torch::serialize::InputArchive& archive) const {
  const NoGradInferenceGuard no_grad;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    (void)read_group_hyperparams(group);  // throws for options of another class
  }
  ArchiveContents contents{read_optimizer_archive<State, Options>(archive, description()),
                           read_progress(archive, param_groups_.size(), "an optimizer"),
                           read_storage_options(archive)};
  for (const auto& group : contents.optimizer.param_groups()) {
    (void)make_hyperparams(static_cast<const Options&>(group.options()));
  }
  if (Traits::kTorchStateHasStep && !contents.progress.applied_steps) {
    contents.progress.applied_steps = 0;  // the highest step of any parameter
    for (const auto& [parameter, state] : contents.optimizer.state()) {
      const int64_t step = static_cast<State&>(*state).step();
      contents.progress.applied_steps = std::max(*contents.progress.applied_steps, step);
    }
  }
  return contents;
}

template <class Traits>
void FusedOptimizer<Traits>::load(torch::serialize::InputArchive& archive) {
  const NoGradInferenceGuard no_grad;
  ArchiveContents contents = read_archive(archive);
  storage_options_ = contents.storage_options;
  assign_serialized<Options>(std::move(contents.optimizer), *this);
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found != state_.end() && found->second != nullptr) {
        (void)bind_state(*found->second, parameter);
      }
    }
  }
  load_progress(contents.progress);
  if (!contents.progress.applied_steps) {
    TORCH_WARN(Traits::kName, ": the archive of torch::optim::", Traits::kName,
               " has no step count; load the schedule's archive, or call set_applied_steps(n)");
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
