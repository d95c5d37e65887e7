#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sets bits in `nonfinite` where a stored value is inf or NaN.
template <class Format>
struct CheckElement {
  template <class BitLanes, class Flags>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(const BitLanes& bits, Flags& nonfinite) const {
    nonfinite = nonfinite | ((bits & Format::kExponent) == Format::kExponent);
  }
};

/// gradient = gradient * inv_scale, and a look at what will be stored rather than at what came in:
/// only that sees a product, or its rounding to half, that overflows where the factors do not.
/// The body of the CPU kernel, of the CUDA kernel and of the tests' reference.
template <class Format, class ValueLanes>
struct UnscaleElement {
  ValueLanes inv_scale;

  template <class BitLanes, class Flags>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(BitLanes& bits, Flags& nonfinite) const {
    ValueLanes value;
    Format::widen(bits, value);
    value = value * inv_scale;
    Format::narrow(value, bits);
    CheckElement<Format>{}(bits, nonfinite);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
