#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/fused_options.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a line for each number that decides a step, so that ranks can compare theirs: the loss
/// scale, each group's options (the rate alone of an optimizer that is not mezzo's) and the number
/// of applied steps. `scale` is undefined where there is none. Waits where the numbers are on a
/// device.
inline std::string words_of_step(AnyOptimizer optimizer, const at::Tensor& scale) {
  std::string words;
  if (scale.defined()) words += "loss scale: " + words_of_option(scale.item<double>()) + '\n';
  std::size_t number = 0;
  for (const auto& group : optimizer.optimizer().param_groups()) {
    const std::string prefix = "group " + std::to_string(number++) + ' ';
    const auto* const mezzos = dynamic_cast<const HoldsExtraOptions*>(&group.options());
    words += mezzos != nullptr ? mezzos->words(prefix)
                               : prefix + "lr: " + words_of_option(group.options().get_lr()) + '\n';
  }
  if (optimizer.mezzos() != nullptr) {
    words += "applied steps: " + std::to_string(optimizer.mezzos()->applied_steps()) + '\n';
  }
  return words;
}

/// Hears of the steps that train a parameter. A post-accumulate hook of the parameter may be one,
/// as GradBuckets' is.
class StepWitness {
 public:
  virtual void note_step(AnyOptimizer optimizer, const at::Tensor& scale) = 0;

 protected:
  ~StepWitness() = default;
};

/// Tells the witness of the first parameter that requires grad, if it has one, of a step that is
/// about to be taken with the loss scale `scale`, which is undefined where there is none.
inline void tell_witness(AnyOptimizer optimizer, const at::Tensor& scale) {
  for (const auto& group : optimizer.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || !parameter.requires_grad()) continue;
      auto* const hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
      auto* const witness = dynamic_cast<StepWitness*>(hook);
      if (witness != nullptr && capture_on(parameter.device()) == 0) {
        witness->note_step(optimizer, scale);
      }
      return;
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
