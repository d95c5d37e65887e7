#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/gradient_element.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <cstdint>

// Rounds gradients to a 16-bit dtype before they are sent to other ranks, and widens them after.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Computes to[i] = from[i] * factor, rounded once (double: twice, through float).
template <class Element, class Sent, class Lanes>
struct NarrowKernel {
  template <class L>
  C10_ALWAYS_INLINE static int64_t lanes(const typename L::Stored* from,
                                         typename FloatFormat<Sent>::Stored* to, int64_t begin,
                                         int64_t count, double by) {
    using S = typename L::template Like<Sent>;
    typename L::Value factor;
    L::broadcast(static_cast<typename L::Format::Value>(by), factor);
    int64_t i = begin;
    for (; i + L::kWidth <= count; i += L::kWidth) {
      typename L::Bits bits;
      L::load(from + i, bits);
      typename L::Value value;
      L::Format::widen(bits, value);
      value = value * factor;
      typename S::Value narrow;
      S::convert(value, narrow);
      typename S::Bits sent;
      S::Format::narrow(narrow, sent);
      S::store(sent, to + i);
    }
    return i;
  }

  C10_ALWAYS_INLINE static void run(const void* from, void* to, int64_t count, double factor) {
    const auto* source = static_cast<const typename Lanes::Stored*>(from);
    auto* target = static_cast<typename FloatFormat<Sent>::Stored*>(to);
    const int64_t done = lanes<Lanes>(source, target, 0, count, factor);
    lanes<ScalarLanes<Element>>(source, target, done, count, factor);
  }
};

/// The factors of a pass with residuals: one on the values that are sent, and the loss scale, which
/// residuals do not carry.
struct ResidualFactors {
  double value;
  double scale;
  double inv_scale;
};

/// sent = value * factor + residual * scale, rounded to `to`. The rounding error becomes the new
/// residual. If the value is 0, 0 is sent and the residual stays. An inf or NaN leaves a residual
/// of 0.
template <class Element, class Sent, class Lanes>
struct NarrowWithResidualKernel {
  template <class L>
  C10_ALWAYS_INLINE static int64_t lanes(const typename L::Stored* from,
                                         typename L::Stored* residuals,
                                         typename FloatFormat<Sent>::Stored* to, int64_t begin,
                                         int64_t count, const ResidualFactors& by) {
    using S = typename L::template Like<Sent>;
    using Format = typename L::Format;
    constexpr auto kSign =
        static_cast<typename Format::Bits>(typename Format::Bits{1} << (sizeof(Element) * 8 - 1));
    typename L::Value factor, scale, inv_scale;
    L::broadcast(static_cast<typename Format::Value>(by.value), factor);
    L::broadcast(static_cast<typename Format::Value>(by.scale), scale);
    L::broadcast(static_cast<typename Format::Value>(by.inv_scale), inv_scale);
    int64_t i = begin;
    for (; i + L::kWidth <= count; i += L::kWidth) {
      typename L::Bits value_bits, residual_bits, bits, lost_bits;
      typename L::Value value, residual, wanted, kept, lost;
      L::load(from + i, value_bits);
      L::load(residuals + i, residual_bits);
      Format::widen(value_bits, value);
      Format::widen(residual_bits, residual);
      value = value * factor;
      L::fma(residual, scale, value, wanted);
      Format::narrow(wanted, bits);
      bits = (value_bits & ~kSign) == 0 ? value_bits : bits;
      Format::widen(bits, wanted);

      typename S::Value narrow;
      typename S::Bits sent;
      S::convert(wanted, narrow);
      S::Format::narrow(narrow, sent);
      S::store(sent, to + i);
      S::Format::widen(sent, narrow);
      L::convert(narrow, kept);

      lost = (wanted - kept) * inv_scale;
      Format::narrow(lost, lost_bits);
      lost_bits = (lost_bits & Format::kExponent) == Format::kExponent ? lost_bits & 0 : lost_bits;
      lost_bits = (value_bits & ~kSign) == 0 ? residual_bits : lost_bits;
      L::store(lost_bits, residuals + i);
    }
    return i;
  }

  C10_ALWAYS_INLINE static void run(const void* from, void* residuals, void* to, int64_t count,
                                    const ResidualFactors* factors) {
    const auto* source = static_cast<const typename Lanes::Stored*>(from);
    auto* left = static_cast<typename Lanes::Stored*>(residuals);
    auto* target = static_cast<typename FloatFormat<Sent>::Stored*>(to);
    const int64_t done = lanes<Lanes>(source, left, target, 0, count, *factors);
    lanes<ScalarLanes<Element>>(source, left, target, done, count, *factors);
  }
};

/// Computes to[i] = from[i] * factor, and returns whether a product is inf or NaN.
template <class Element, class Sent, class Lanes>
struct WidenKernel {
  template <class L>
  C10_ALWAYS_INLINE static int64_t lanes(const typename FloatFormat<Sent>::Stored* from,
                                         typename L::Stored* to, int64_t begin, int64_t count,
                                         double by, bool& found) {
    using S = typename L::template Like<Sent>;
    typename L::Value factor;
    L::broadcast(static_cast<typename L::Format::Value>(by), factor);
    typename L::Flags nonfinite{};
    int64_t i = begin;
    for (; i + L::kWidth <= count; i += L::kWidth) {
      typename S::Bits received;
      S::load(from + i, received);
      typename S::Value narrow;
      S::Format::widen(received, narrow);
      typename L::Value value;
      L::convert(narrow, value);
      value = value * factor;
      typename L::Bits bits;
      L::Format::narrow(value, bits);
      CheckElement<typename L::Format>{}(bits, nonfinite);
      L::store(bits, to + i);
    }
    found |= L::any(nonfinite);
    return i;
  }

  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double factor) {
    const auto* source = static_cast<const typename FloatFormat<Sent>::Stored*>(from);
    auto* target = static_cast<typename Lanes::Stored*>(to);
    bool found = false;
    const int64_t done = lanes<Lanes>(source, target, 0, count, factor, found);
    lanes<ScalarLanes<Element>>(source, target, done, count, factor, found);
    return found;
  }
};

/// The loops for one pair of dtypes and one instruction set.
struct CompressLoops {
  void (*narrow)(const void* from, void* to, int64_t count, double factor);
  void (*narrow_with_residual)(const void* from, void* residuals, void* to, int64_t count,
                               const ResidualFactors* factors);
  bool (*widen)(const void* from, void* to, int64_t count, double factor);
};

template <class Element, class Sent>
CompressLoops compress_loops(CpuIsa isa) {
  return {cpu_kernel<NarrowKernel, Element, Sent>(isa),
          cpu_kernel<NarrowWithResidualKernel, Element, Sent>(isa),
          cpu_kernel<WidenKernel, Element, Sent>(isa)};
}

/// Returns the loops for `dtype` (float or double) sent as bfloat16 or half.
inline CompressLoops compress_loops(at::ScalarType dtype, at::ScalarType sent, CpuIsa isa) {
  TORCH_INTERNAL_ASSERT((dtype == at::kFloat || dtype == at::kDouble) && is_low_precision(sent));
  const bool brain = sent == at::kBFloat16;
  if (dtype == at::kFloat) {
    return brain ? compress_loops<float, c10::BFloat16>(isa)
                 : compress_loops<float, c10::Half>(isa);
  }
  return brain ? compress_loops<double, c10::BFloat16>(isa)
               : compress_loops<double, c10::Half>(isa);
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_COMPRESSIONS(EXTERN)                                   \
  EXTERN template CompressLoops compress_loops<float, c10::Half>(CpuIsa);     \
  EXTERN template CompressLoops compress_loops<float, c10::BFloat16>(CpuIsa); \
  EXTERN template CompressLoops compress_loops<double, c10::Half>(CpuIsa);    \
  EXTERN template CompressLoops compress_loops<double, c10::BFloat16>(CpuIsa);

#ifdef MEZZO_LEFT_TO_LIBRARY
MEZZO_COMPILED_COMPRESSIONS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
