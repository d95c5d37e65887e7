/// \file
/// FiniteGradAccumulator: gradient accumulation that drops micro-batches with inf or NaN gradients.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/detail/gradient_stash.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Accumulates the gradients of one step's micro-batches in `.grad`, and drops micro-batches with
/// inf or NaN gradients. Construct one for each step; docs/optimizers.md has the loop. Not
/// thread-safe.
///
/// If all micro-batches have inf or NaN, `.grad` is that of the last one, and the scaler skips the
/// step. A sum that overflows, as one of float16 gradients can, stays inf for the scaler's check.
/// Gradients of zero count as accumulated: start with `zero_grad()`, which sets them to none. With
/// ranks that reduce gradients, `add` all micro-batches but the last under `no_sync()`, and call
/// `backward()` for the last one directly.
class FiniteGradAccumulator {
 public:
  /// \param parameters  every parameter that receives gradients
  /// \throws c10::Error for an undefined parameter
  explicit FiniteGradAccumulator(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      TORCH_CHECK(parameters_[i].defined(), "FiniteGradAccumulator: parameter ", i,
                  " is undefined; leave it out");
    }
  }

  /// Runs `backward`, and adds its gradients to the accumulated ones unless one is inf or NaN.
  /// Synchronizes with the host. Reads the new gradients once, and keeps both sets in memory.
  /// \param backward  computes the loss of the micro-batch and runs its backward pass
  /// \return whether the gradients were added
  /// \throws the exceptions of `backward`, and c10::Error for a gradient that cannot be added;
  ///   `.grad` is then unchanged
  bool add(const std::function<void()>& backward) {
    TORCH_CHECK(
        backward != nullptr,
        "FiniteGradAccumulator: backward is an empty function; pass one that calls backward()");
    detail::GradientStash stash(parameters_);
    backward();
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    const bool is_finite = !detail::any_nonfinite(gradients);
    const bool had_nonfinite =
        std::exchange(has_nonfinite_, false) && detail::any_nonfinite(stash.gradients());
    if (had_nonfinite || std::ranges::none_of(stash.gradients(), &at::Tensor::defined)) {
      stash.drop();
      has_nonfinite_ = !is_finite;
    } else if (is_finite) {
      stash.add_back();
    }
    return is_finite;  // if dropped, `stash` restores the accumulated gradients
  }

 private:
  std::vector<at::Tensor> parameters_;
  bool has_nonfinite_ = false;  // `.grad` is that of a micro-batch with inf or NaN
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
