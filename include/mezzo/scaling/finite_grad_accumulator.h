/// \file
/// Gradient accumulation that drops micro-batches whose gradients are inf or NaN.
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

/// Accumulates the gradients of one step's micro-batches in `.grad`, without micro-batches whose
/// gradients are inf or NaN; docs/optimizers.md has the loop. Make one for each step. Not
/// thread-safe.
///
/// If all micro-batches are bad, the gradients of the last one stay, and the step's own check finds
/// them. Gradients of zero count as accumulated, so begin with `zero_grad()`, which leaves none. A
/// sum that overflows, as one of half gradients can, stays inf for the step's check. If ranks
/// reduce gradients, `add` the micro-batches before the last, under `no_sync()`, and call
/// `backward()` of the last one as usual.
class FiniteGradAccumulator {
 public:
  /// \param parameters  every parameter that a backward pass may reach
  /// \throws c10::Error for an undefined parameter
  explicit FiniteGradAccumulator(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      TORCH_CHECK(parameters_[i].defined(), "FiniteGradAccumulator: parameter ", i,
                  " is undefined; leave it out");
    }
  }

  /// Adds the gradients of one micro-batch to those accumulated, or drops them if one of them is
  /// inf or NaN. Waits for a GPU. Costs one read of the new gradients, and memory for the
  /// accumulated.
  /// \param backward  computes the loss of the micro-batch and runs its backward pass
  /// \return whether the micro-batch was added, and not dropped
  /// \throws whatever `backward` throws, and c10::Error for a gradient that cannot be added.
  ///   Gradients are then what they were before the call.
  bool add(const std::function<void()>& backward) {
    TORCH_CHECK(
        backward != nullptr,
        "FiniteGradAccumulator: backward is an empty function; pass one that calls backward()");
    detail::GradientStash before(parameters_);
    backward();
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    const bool is_finite = !detail::any_nonfinite(gradients);
    const bool had_bad =
        std::exchange(has_bad_, false) && detail::any_nonfinite(before.gradients());
    if (had_bad || std::ranges::none_of(before.gradients(), &at::Tensor::defined)) {
      before.drop();
      has_bad_ = !is_finite;
    } else if (is_finite) {
      before.add_back();
    }
    return is_finite;  // where the micro-batch is dropped, `before` puts back what was there
  }

 private:
  std::vector<at::Tensor> parameters_;
  bool has_bad_ = false;  // `.grad` has what a bad micro-batch left
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
