/// \file
/// What one read of an optimizer's gradients found: whoever owns the gradients makes it, once a
/// step, and the step takes it.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The gradients of an optimizer that lie on one device. The numbers are tensors of one element
/// there, and are those of the gradients times `inv_scale`.
struct DeviceGradientReport {
  at::Tensor inv_scale{};       ///< float: a step multiplies gradients by it before all else
  at::Tensor found_inf{};       ///< float: unless 0, a step leaves everything as it is
  at::Tensor sum_of_squares{};  ///< double; where it is undefined, nothing is clipped
  at::Tensor max_abs{};         ///< double; NaN if there is a NaN
  std::vector<at::Tensor> gradients{};  ///< dense, and the values of sparse ones
};

/// One entry for each device that has a gradient; none: gradients are taken as they are, and the
/// step is not skipped. What the devices say of `found_inf` and `sum_of_squares` is a device's own
/// until somebody adds it up (GradScaler does); a step takes each device's word for all.
struct GradientReport {
  std::vector<DeviceGradientReport> devices{};
  /// Gradients were unscaled onto float masters: of parameters that keep one the master's gradient
  /// is read and stepped with, and the parameter's own is not.
  bool of_masters = false;
  /// There is a gradient of half whose parameter keeps no master, so that it would underflow.
  bool has_bare_half = false;
  /// The optimizer's own number of what it prepared when it made this report; 0: nothing.
  std::uint64_t plan = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
