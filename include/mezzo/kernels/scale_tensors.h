#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/macros/Macros.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A loss scale's state on a device, as tensors of one element.
struct ScaleTensors {
  at::Tensor scale;            ///< float
  at::Tensor inverse;          ///< float: inverse_scale(scale), written whenever that is
  at::Tensor growth_tracker;   ///< int32
  at::Tensor hysteresis_left;  ///< int32
};

/// 1 / scale, rounded once: by way of double, whose 53 bits are enough for the second rounding to
/// change nothing (they are at least 2 * 24 + 2), and whose division no compiler's flag makes an
/// approximate one. The same bits as torch.amp's, and as at::reciprocal's.
C10_HOST_DEVICE inline float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
