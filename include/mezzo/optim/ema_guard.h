/// \file
/// EmaGuard: evaluates a model with averaged weights.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ema_params.h>
#include <mezzo/optim/ema.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Replaces the parameters by their averages for a scope.
///
/// The constructor gives the parameters new storage with the averages, rounded to their dtypes, and
/// removes their gradients. The destructor restores storage and gradients, so training continues
/// bitwise identically, also with masters. Needs memory for one copy of the weights.
///
/// Only evaluate within the scope: writes to the parameters, and gradients, are lost at its end.
/// Within it, saving or loading a checkpoint (mezzo/checkpoint/checkpoint.h), Ema::update and a
/// nested EmaGuard throw for these parameters. Buffers keep their training values: for batch norm
/// statistics of the averaged weights, run some batches in training mode and restore the buffers
/// afterwards. Existing views of the parameters and captured CUDA graphs keep using the training
/// weights. No other thread may use the parameters during construction and destruction.
class [[nodiscard]] EmaGuard {
 public:
  /// \throws c10::Error, with the strong exception guarantee, if the shapes of a parameter and its
  ///   average differ, or an EmaGuard of the parameter is alive
  explicit EmaGuard(const Ema& ema) {
    const c10::NoGradGuard no_grad;
    ema.check_parameters();
    std::vector<at::Tensor> rounded;
    for (std::size_t i = 0; i < ema.parameters().size(); ++i) {
      const at::Tensor& parameter = ema.parameters()[i];
      rounded.push_back(at::empty_like(parameter, parameter.options().requires_grad(false)));
      rounded.back().copy_(ema.averages()[i]);
      saved_.push_back({parameter, parameter.variable_data(), parameter.grad()});
    }
    detail::averaged_parameters().withLock([&](auto& all) {
      for (const SavedTensors& tensors : saved_)
        all.insert(tensors.parameter.unsafeGetTensorImpl());
    });
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      saved_[i].parameter.mutable_grad() = at::Tensor();
      saved_[i].parameter.set_data(rounded[i]);  // keeps version and hooks
    }
    detail::clear_autocast_cache();
  }
  /// Does not throw: set_data fails only for another kind of tensor.
  ~EmaGuard() {
    const c10::NoGradGuard no_grad;
    for (const SavedTensors& tensors : saved_) {
      tensors.parameter.mutable_grad() = at::Tensor();
      tensors.parameter.set_data(tensors.data);
      tensors.parameter.mutable_grad() = tensors.gradient;
    }
    detail::averaged_parameters().withLock([&](auto& all) {
      for (const SavedTensors& tensors : saved_) all.erase(tensors.parameter.unsafeGetTensorImpl());
    });
    detail::clear_autocast_cache();
  }
  EmaGuard(const EmaGuard&) = delete;
  EmaGuard& operator=(const EmaGuard&) = delete;

 private:
  /// A parameter and its training value.
  struct SavedTensors {
    at::Tensor parameter, data, gradient;
  };
  std::vector<SavedTensors> saved_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
