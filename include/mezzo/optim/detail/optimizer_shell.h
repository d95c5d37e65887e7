#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/step_engine.h>

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

/// The common part of an optimizer's traits. `Own` derives from it and adds
///   kName, kOptions;
///   read(options, numbers), which checks options and takes the rule's numbers of a group;
///   aten_step(numbers, lists, amp_args), unless read sets numbers.missing_in_aten.
/// Options are of libtorch's class where it has one.
template <class OptionsT, class StateT, class FunctorT, class ExtraMomentFunctorT = FunctorT>
struct OptimizerTraits {
  using Options = OptionsT;
  using State = StateT;
  using Functor = FunctorT;
  using ExtraMomentFunctor = ExtraMomentFunctorT;

  /// Whether the files of libtorch's optimizer of this name hold counts of steps.
  static constexpr bool kLibtorchCounts = true;
};

/// The parts of an optimizer that libtorch's users see, constructors, options and files, and its
/// rule as StepEngine calls it.
template <class Traits>
class OptimizerShell : public StepEngine, public optim::ArchiveChecker {
 public:
  using Options = typename Traits::Options;
  using State = typename Traits::State;

  // Derived classes inherit the constructors: constructors of their own, being no templates, would
  // instantiate this class in every unit that sees them.
  explicit OptimizerShell(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const Options& defaults = {},
                          const optim::WeightStorageOptions& weights = {})
      : StepEngine(groups, std::make_unique<Options>(defaults), weights, Traits::kName,
                   Traits::Functor::kOptimizerKind) {
    (void)numbers_of(defaults);
    check_has_parameters(!groups.empty(), Traits::kName);
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      keep_given_options<Options>(param_groups_[group], groups[group], *defaults_);
      (void)group_numbers(group);
    }
    meet_parameters();
  }

  explicit OptimizerShell(std::vector<at::Tensor> parameters, const Options& defaults = {},
                          const optim::WeightStorageOptions& weights = {})
      : OptimizerShell(one_group(std::move(parameters), Traits::kName), defaults, weights) {}

  /// Adds a group.
  /// \throws c10::Error, and has not added the group, if its options are out of range or those of
  ///   another optimizer
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    keep_given_options<Options>(param_groups_.back(), group, *defaults_);
    try {
      (void)group_numbers(param_groups_.size() - 1);
    } catch (const c10::Error&) {
      param_groups_.pop_back();
      throw;
    }
  }

  /// Reads all of a file or nothing. States that the file lacks are dropped.
  /// \throws c10::Error for any other file
  void load(torch::serialize::InputArchive& archive) override;
  /// Throws what `load` would throw, and changes nothing.
  void check_load(torch::serialize::InputArchive& archive) const override {
    (void)read_archive(archive);
  }

 protected:
  GroupNumbers group_numbers(std::size_t group) const override {
    return numbers_of(
        options_as<Options>(param_groups_[group], group, Traits::kName, Traits::kOptions));
  }
  FunctorArgs coefficients(const GroupNumbers& numbers, int64_t step) const override {
    return numbers.functor_args.as<typename Traits::Functor::HyperParams>().coefficients(numbers.lr,
                                                                                         step);
  }
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() const override {
    return std::make_unique<State>();
  }
  ParamSlot* slot_in(torch::optim::OptimizerParamState& state) const override {
    if (typeid(state) == typeid(State)) return &static_cast<State&>(state);  // a hot path
    return dynamic_cast<State*>(&state);
  }
  StepKernelFn loop_for(const GroupNumbers& numbers, optim::WeightStorage storage,
                        at::ScalarType dtype) const override {
    return numbers.has_extra_moment
               ? get_step_kernel<typename Traits::ExtraMomentFunctor>(storage, dtype, best_isa())
               : get_step_kernel<typename Traits::Functor>(storage, dtype, best_isa());
  }
  void aten_step([[maybe_unused]] const GroupNumbers& numbers,
                 [[maybe_unused]] const AtenLists& lists,
                 [[maybe_unused]] const AtenVerdict& amp_args) const override {
    if constexpr (requires { Traits::aten_step(numbers, lists, amp_args); }) {
      Traits::aten_step(numbers, lists, amp_args);
    }
  }

 private:
  /// What an archive holds, checked.
  struct ArchiveContents {
    FiledOptimizer filed;
    Progress progress;
    optim::WeightStorageOptions weights;
  };
  ArchiveContents read_archive(torch::serialize::InputArchive& archive) const;

  static GroupNumbers numbers_of(const Options& options) {
    GroupNumbers numbers;
    Traits::read(options, numbers);
    using Functor = typename Traits::Functor;
    using Variant = typename Traits::ExtraMomentFunctor;
    numbers.moments =
        static_cast<int>(numbers.has_extra_moment ? Variant::kNumMoments : Functor::kNumMoments);
    return numbers;
  }
};

template <class Traits>
typename OptimizerShell<Traits>::ArchiveContents OptimizerShell<Traits>::read_archive(
    torch::serialize::InputArchive& archive) const {
  const NoGradInferenceGuard no_graph;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    (void)group_numbers(group);  // of this class, or it throws
  }
  ArchiveContents read{read_optimizer_archive<State, Options>(archive, words()),
                       read_progress(archive, param_groups_.size()), filed_weights(archive)};
  for (const auto& group : read.filed.param_groups()) {
    (void)numbers_of(static_cast<const Options&>(group.options()));
  }
  if (Traits::kLibtorchCounts && !read.progress.applied_steps) {
    read.progress.applied_steps = 0;  // the highest count of any parameter
    for (const auto& [parameter, state] : read.filed.state()) {
      const int64_t own = static_cast<State&>(*state).step();
      read.progress.applied_steps = std::max(*read.progress.applied_steps, own);
    }
  }
  return read;
}

template <class Traits>
void OptimizerShell<Traits>::load(torch::serialize::InputArchive& archive) {
  const NoGradInferenceGuard no_graph;
  ArchiveContents all = read_archive(archive);
  weights_ = all.weights;
  take_archive<Options>(std::move(all.filed), *this);
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found != state_.end() && found->second != nullptr) {
        (void)checked_slot(*found->second, parameter);
      }
    }
  }
  load_progress(all.progress);
  if (!all.progress.applied_steps) {
    TORCH_WARN(Traits::kName, ": the file of torch::optim::", Traits::kName,
               " holds no number of steps; load the schedule's own file, or call "
               "set_applied_steps(n)");
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
