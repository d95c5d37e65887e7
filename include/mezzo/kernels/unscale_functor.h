#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Multiplies stored gradients by inv_scale and checks the rounded products, which may overflow
/// where the gradients are finite.
template <class Format, class ValueVec>
struct UnscaleFunctor {
  ValueVec inv_scale;

  template <class BitsVec, class Mask>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(BitsVec& bits, Mask& nonfinite) const {
    ValueVec value;
    Format::to_opmath(bits, value);
    value = value * inv_scale;
    Format::from_opmath(value, bits);
    nonfinite = nonfinite | ((bits & Format::kExponent) == Format::kExponent);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
