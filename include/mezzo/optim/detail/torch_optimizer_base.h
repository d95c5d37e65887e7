#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/detail/serializable_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Base (CRTP) of LAMB, Muon and AdamW8bit, which a GradScaler treats as torch's optimizers.
/// Implements param groups, archives and closures. `Derived` has:
///
///     static constexpr const char *kName, *kOptionsName;
///     static void check_options(const Options&);
///     void update();
///
/// and may hide get_or_create_state, check_parameter, check_gradient, check_state and
/// check_extra_keys.
template <class Derived, class Options, class State>
class TorchOptimizerBase : public torch::optim::Optimizer, public optim::ArchiveChecker {
 public:
  /// \param defaults  options of groups without options
  explicit TorchOptimizerBase(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                              const Options& defaults = {})
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{},
                  std::make_unique<Options>(defaults)) {
    for (const auto& group : groups) add_param_group(group);
    check_has_parameters(!groups.empty(), Derived::kName);
  }
  /// Makes one group of `parameters`.
  explicit TorchOptimizerBase(std::vector<at::Tensor> parameters, const Options& defaults = {})
      : TorchOptimizerBase(make_single_group(std::move(parameters), Derived::kName), defaults) {}

  /// Adds a group. \throws c10::Error as the constructor, without adding it
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    try {
      restore_group_options<Options>(param_groups_.back(), group, *defaults_);
      check_parameters();
    } catch (...) {
      param_groups_.pop_back();
      throw;
    }
  }

  /// Calls `closure`, if given, steps, and returns the closure's loss.
  /// \throws c10::Error, before any write, for an unsupported gradient or an option out of range
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss = call_closure(closure);
    const c10::NoGradGuard no_grad;
    std::size_t num_params = 0;
    for (const auto& group : param_groups_) num_params += group.params().size();
    // A group may have been added through torch::optim::Optimizer.
    if (num_params != num_checked_params_) check_parameters();
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      check_group(group);
      for (const at::Tensor& parameter : param_groups_[group].params()) {
        if (!parameter.grad().defined()) continue;
        derived().check_gradient(parameter);
        const auto found = state_.find(parameter.unsafeGetTensorImpl());
        if (found == state_.end()) continue;
        const auto* const state = dynamic_cast<const State*>(found->second.get());
        TORCH_CHECK(
            state != nullptr, Derived::kName, ": the state of ",
            description().describe_param(parameter),
            " is another optimizer's; copy states only between optimizers of the same class");
        Derived::check_state(parameter, *state, description());
      }
    }
    derived().update();
    clear_autocast_cache();
    return loss;
  }

  /// Writes the class, the options and the state.
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
    archive.write(kClassKey, c10::IValue(std::string(Derived::kName)));
  }
  /// Reads what `save` wrote. Drops states that the archive lacks.
  /// \throws c10::Error, with the strong exception guarantee, for any other archive
  void load(torch::serialize::InputArchive& archive) override {
    assign_serialized<Options>(read_archive(archive), *this);
  }
  /// Throws what `load` would throw, and changes nothing.
  void check_load(torch::serialize::InputArchive& archive) const override {
    (void)read_archive(archive);
  }

 protected:
  OptimizerDescription description() const { return {Derived::kName, param_groups_}; }

  /// Returns the state of a parameter, created at its first step.
  State& get_or_create_state(const at::Tensor& parameter) {
    auto& state = state_[parameter.unsafeGetTensorImpl()];
    if (state == nullptr) state = std::make_unique<State>();
    return static_cast<State&>(*state);
  }

  /// Checks a parameter of a new group. No-op by default.
  static void check_parameter(const at::Tensor& /*parameter*/,
                              const OptimizerDescription& /*description*/) {}
  /// Checks the shapes of a state before a step.
  static void check_state(const at::Tensor& parameter, const State& state,
                          const OptimizerDescription& description) {
    if constexpr (requires { state.exp_avg_sq(); }) {
      check_state_shape(state.exp_avg(), "a moment", parameter, description);
      check_state_shape(state.exp_avg_sq(), "a moment", parameter, description);
    } else {
      check_state_shape(state.momentum_buffer(), "a moment", parameter, description);
    }
  }
  /// Checks keys of an archive other than groups and states. No-op by default.
  static void check_extra_keys(torch::serialize::InputArchive& /*archive*/) {}
  /// Checks a gradient before a step.
  void check_gradient(const at::Tensor& parameter) const {
    if (is_low_precision(parameter)) {
      warn_rounded_weights(parameter, description(), "a mezzo::MasterWeights around the optimizer");
    }
    TORCH_CHECK(parameter.grad().layout() == at::kStrided, Derived::kName,
                " does not support sparse gradients, and ", description().describe_param(parameter),
                " has one; make its Embedding with sparse(false)");
  }

 private:
  /// Returns the checked groups and states of an archive.
  SerializedOptimizer read_archive(torch::serialize::InputArchive& archive) const {
    const NoGradInferenceGuard no_grad;
    for (std::size_t group = 0; group < param_groups_.size(); ++group) check_group(group);
    SerializedOptimizer serialized = read_optimizer_archive<State, Options>(archive, description());
    for (std::size_t group = 0; group < serialized.param_groups().size(); ++group) {
      Derived::check_options(
          static_cast<const Options&>(serialized.param_groups()[group].options()));
      for (const at::Tensor& parameter : serialized.param_groups()[group].params()) {
        const auto found = serialized.state().find(parameter.unsafeGetTensorImpl());
        if (found == serialized.state().end()) continue;
        Derived::check_state(parameter, static_cast<const State&>(*found->second), description());
      }
    }
    Derived::check_extra_keys(archive);
    return serialized;
  }

  Derived& derived() { return static_cast<Derived&>(*this); }

  void check_group(std::size_t group) const {
    Derived::check_options(get_group_options<Options>(param_groups_[group], group, Derived::kName,
                                                      Derived::kOptionsName));
  }

  /// Checks all groups, and that no parameter appears twice.
  void check_parameters() {
    const std::vector<at::Tensor> all = description().parameters();
    for (std::size_t group = 0; group < param_groups_.size(); ++group) check_group(group);
    for (const at::Tensor& parameter : all) Derived::check_parameter(parameter, description());
    check_no_duplicates(all, description());
    num_checked_params_ = all.size();
  }

  std::size_t num_checked_params_ = 0;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
