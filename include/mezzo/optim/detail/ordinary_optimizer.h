#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_words.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An ordinary `torch::optim::Optimizer`, LAMB or AdamW8bit: groups with options of Adam's names,
/// and a step that checks everything before it writes anything.
template <class Options, bool kIsLibtorchs>
class OrdinaryOptimizer : public torch::optim::Optimizer {
 public:
  /// Adds a group. \throws c10::Error as the constructor does, and has not added it
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Optimizer::add_param_group(group);
    try {
      keep_given_options<Options>(param_groups_.back(), group, kIsLibtorchs);
      check_group(param_groups_.size() - 1);
      refuse_duplicates(words().parameters(), words());
    } catch (...) {
      param_groups_.pop_back();
      throw;
    }
  }

  /// Calls `closure`, if there is one, takes a step, and returns what the closure returned.
  /// \throws c10::Error, before anything is written, for an option out of range, or a gradient or
  ///   state that a step cannot take
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss = loss_of(closure);
    const c10::NoGradGuard no_grad;
    for (std::size_t group = 0; group < param_groups_.size(); ++group) {
      check_group(group);
      for (const at::Tensor& parameter : param_groups_[group].params()) {
        if (parameter.grad().defined()) check_gradient(parameter);
      }
    }
    take_step();
    return loss;
  }

 protected:
  OrdinaryOptimizer(const char* name, const Options& defaults)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{},
                  std::make_unique<Options>(defaults)),
        name_(name) {}

  /// The rest of a constructor, which may call the virtual functions.
  void add_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    bool has_parameters = false;
    for (const auto& group : groups) {
      add_param_group(group);
      has_parameters = has_parameters || !group.params().empty();
    }
    check_has_parameters(has_parameters, name_);
  }

  OptimizerWords words() const { return {name_, param_groups_}; }
  const Options& options_of(std::size_t group, const char* kind) const {
    const Options& options = options_as<Options>(param_groups_[group], group, name_, kind);
    check_numbers(
        name_,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
    return options;
  }

  /// Checks the options of a group.
  virtual void check_group(std::size_t group) const = 0;
  /// Checks the gradient of a parameter, and its state, which a file may have brought.
  virtual void check_gradient(const at::Tensor& parameter) = 0;
  virtual void take_step() = 0;

 private:
  const char* name_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
