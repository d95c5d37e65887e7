/// \file
/// Gradient clipping that knows the loss scale: torch's `clip_grad_norm_` and `clip_grad_value_`
/// for the gradients of an optimizer that a GradScaler looks after.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Scales the gradients of `optimizer`, taken as one vector, down to at most `max_norm`, in place;
/// returns the norm that they had. Gradients that still carry the loss scale in this iteration are
/// unscaled first (`scaler.unscale_(optimizer)`); those that do not are not unscaled again:
///
/// \code
///   scaler.scale(loss).backward();
///   auto norm = mezzo::clip_grad_norm_(scaler, optimizer, /*max_norm=*/1.0);
///   scaler.step(optimizer);
///   scaler.update();
/// \endcode
///
/// In fewer passes, without a norm before the step: `scaler.step(optimizer, {.max_norm = 1.0})`.
///
/// \param max_norm   at least 0; infinity only measures
/// \param norm_type  the p of the p-norm, positive; infinity is the largest magnitude
/// \param error_if_nonfinite  throws before it clips where the norm is inf or NaN, as it is in
///   every iteration whose loss overflowed. It has to wait for the device to know; otherwise there
///   is no host sync (but to coalesce sparse gradients), and a norm that is inf or NaN makes
///   gradients of 0 and NaN, which `scaler.step` skips.
/// \return a tensor without dimensions on the device of the first gradient: of double where a
///   gradient is double, else of float; 0 on the CPU where there is no gradient
///
/// Where the optimizer keeps float masters (MasterWeights, WeightStorage::master), the masters'
/// gradients are clipped, which `scaler.step` takes.
///
/// Gradients may lie on several devices and have several dtypes; undefined ones are left out and
/// sparse ones coalesced (`.grad` is replaced). Sums are in double, and a coefficient is not
/// rounded to half, both unlike torch's. A disabled scaler clips as if it were not there.
/// Source: torch.nn.utils.clip_grad_norm_; the coefficient is min(1, max_norm / (norm + 1e-6)).
/// \throws c10::Error as `unscale_` does, after `step`, or if max_norm or norm_type is out of range
at::Tensor clip_grad_norm_(GradScaler& scaler, AnyOptimizer optimizer, double max_norm,
                           double norm_type = 2.0, bool error_if_nonfinite = false);

/// Clamps every element of the gradients of `optimizer` to [-clip_value, clip_value], in place,
/// after unscaling where that has not been done. An inf is clamped like the rest, but unscaling saw
/// it: `scaler.step` skips. No host sync (but to coalesce sparse gradients). A disabled scaler
/// clips as if it were not there. Source: torch.nn.utils.clip_grad_value_.
/// \throws c10::Error as `unscale_` does, after `step`, or unless clip_value is positive
void clip_grad_value_(GradScaler& scaler, AnyOptimizer optimizer, double clip_value);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/scaling/detail/clip_grad_impl.h>  // IWYU pragma: export
