#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/fused_options.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <limits>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a line for each option of mezzo's classes and libtorch's: `prefix`, its name and its
/// value. The rate alone for options of another class.
inline std::string words_of_options(const torch::optim::OptimizerOptions& options,
                                    const std::string& prefix) {
  const auto* const mezzos = dynamic_cast<const HoldsExtraOptions*>(&options);
  if (mezzos != nullptr) return mezzos->words(prefix);
  std::string words;
  const auto add = [&](const char* name, const auto& value) {
    words += prefix + name + ": " + words_of_option(value) + '\n';
  };
  const auto add_adam = [&](const auto& adam) {
    add("betas", adam.betas());
    add("eps", adam.eps());
    add("weight_decay", adam.weight_decay());
    add("amsgrad", adam.amsgrad());
  };
  add("lr", options.get_lr());
  if (const auto* const adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    add_adam(*adam);
  } else if (const auto* const adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    add_adam(*adamw);
  } else if (const auto* const sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    add("momentum", sgd->momentum());
    add("dampening", sgd->dampening());
    add("weight_decay", sgd->weight_decay());
    add("nesterov", sgd->nesterov());
  } else if (const auto* const rms = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    add("alpha", rms->alpha());
    add("eps", rms->eps());
    add("weight_decay", rms->weight_decay());
    add("momentum", rms->momentum());
    add("centered", rms->centered());
  } else if (const auto* const ada = dynamic_cast<const torch::optim::AdagradOptions*>(&options)) {
    add("lr_decay", ada->lr_decay());
    add("weight_decay", ada->weight_decay());
    add("eps", ada->eps());
  }
  return words;
}

/// The `max_norm` of a step that does not clip.
inline constexpr double kNoMaxNorm = std::numeric_limits<double>::infinity();

/// Returns a line for each number that decides a step, so that ranks can compare theirs: the loss
/// scale, the largest norm if the step clips, each group's options (words_of_options) and the
/// number of applied steps. `scale` is undefined where there is none. Waits where the numbers are
/// on a device.
inline std::string words_of_step(AnyOptimizer optimizer, const at::Tensor& scale,
                                 double max_norm = kNoMaxNorm) {
  std::string words;
  if (scale.defined()) words += "loss scale: " + words_of_option(scale.item<double>()) + '\n';
  if (!is_positive_infinity(max_norm)) words += "max_norm: " + words_of_option(max_norm) + '\n';
  std::size_t number = 0;
  for (const auto& group : optimizer.optimizer().param_groups()) {
    words += words_of_options(group.options(), "group " + std::to_string(number++) + ' ');
  }
  if (optimizer.mezzos() != nullptr) {
    words += "applied steps: " + std::to_string(optimizer.mezzos()->applied_steps()) + '\n';
  }
  return words;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
