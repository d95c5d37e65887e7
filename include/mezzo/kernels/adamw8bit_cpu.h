#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adamw8bit_step.h>
#include <mezzo/kernels/block8.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/work_chunks.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// AdamW8bit's loop on the CPU. The floats of a block stay in the first-level cache.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Conversions of blocks, of many lanes or of the one that takes what they leave: each begins at
/// element i, and returns the first that it has not taken.
template <class Lanes, bool kIsSigned>
struct Block8Loops {
  using Codes = typename Lanes::template Like<Block8Code>;
  using Value = typename Lanes::Value;
  using Bits = typename Lanes::Bits;

  C10_ALWAYS_INLINE static int64_t widen(const uint8_t* codes, float scale, float* to, int64_t i,
                                         int64_t count) {
    Value scales;
    Lanes::broadcast(scale, scales);
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Bits code;
      Codes::load(codes + i, code);
      Value value;
      widen_block8<kIsSigned, Lanes>(kBlock8Map<kIsSigned>, code, scales, value);
      std::memcpy(to + i, &value, sizeof(value));
    }
    return i;
  }

  C10_ALWAYS_INLINE static int64_t narrow(const float* from, float inverse, uint8_t* codes,
                                          int64_t i, int64_t count) {
    Value inverses;
    Lanes::broadcast(inverse, inverses);
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Value value;
      std::memcpy(&value, from + i, sizeof(value));
      Bits code;
      narrow_block8<kIsSigned, Lanes>(kBlock8Map<kIsSigned>, value, inverses, code);
      Codes::store(code, codes + i);
    }
    return i;
  }

  /// Raises `bits` to those of the largest magnitude: a NaN's are larger than any other's.
  C10_ALWAYS_INLINE static int64_t find_largest(const float* from, int64_t i, int64_t count,
                                                uint32_t& bits) {
    Bits largest{};
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Bits own;
      std::memcpy(&own, from + i, sizeof(own));
      own = own & 0x7FFFFFFFU;
      largest = own > largest ? own : largest;
    }
    uint32_t each[Lanes::kWidth];
    std::memcpy(each, &largest, sizeof(each));
    for (const uint32_t one : each) bits = std::max(bits, one);
    return i;
  }
};

/// One block of a moment, to floats and back. `Lanes` are of floats.
template <class Lanes, bool kIsSigned>
struct Block8Converter {
  using Many = Block8Loops<Lanes, kIsSigned>;
  using One = Block8Loops<ScalarLanes<float>, kIsSigned>;

  C10_ALWAYS_INLINE static void widen(const uint8_t* codes, float scale, float* to, int64_t count) {
    One::widen(codes, scale, to, Many::widen(codes, scale, to, 0, count), count);
  }
  C10_ALWAYS_INLINE static void narrow(const float* from, uint8_t* codes, float& scale,
                                       int64_t count) {
    uint32_t bits = 0;
    One::find_largest(from, Many::find_largest(from, 0, count, bits), count, bits);
    reinterpret_bits(bits, scale);
    const float inverse = inverse_of_scale(scale);
    One::narrow(from, inverse, codes, Many::narrow(from, inverse, codes, 0, count), count);
  }
};

/// Steps elements [begin, end) of a parameter; `begin` is that of a block.
template <class Parameter, class Gradient, class Lanes>
struct AdamW8bitKernel {
  C10_ALWAYS_INLINE static void run(const AdamW8bitStep& step, int64_t begin, int64_t end) {
    using Rule = AdamRule<false>;
    using Weights = AdamW8bitWeights<Parameter>;
    using Floats = typename Lanes::template Like<float>;
    using StoredGradient = typename FloatFormat<Gradient>::Stored;
    const StepUse& use = step.use;
    alignas(64) float moments[2][kBlock8];
    for (int64_t first = begin; first < end; first += kBlock8) {
      const int64_t count = std::min(kBlock8, end - first);
      const int64_t block = first / kBlock8;
      StepSpan part{static_cast<typename Lanes::Stored*>(step.span.parameter) + first,
                    static_cast<StoredGradient*>(step.span.gradient) + first,
                    {moments[0], moments[1]},
                    count,
                    nullptr,
                    first};
      auto* const codes = reinterpret_cast<uint8_t* const*>(step.span.moments);
      const bool has_codes = step.scales[0] != nullptr;
      if (has_codes) {
        Block8Converter<Floats, true>::widen(codes[0] + first, step.scales[0][block], moments[0],
                                             count);
        Block8Converter<Floats, false>::widen(codes[1] + first, step.scales[1][block], moments[1],
                                              count);
      } else {
        for (int k = 0; k < 2; ++k) {
          part.moments[k] = static_cast<float*>(step.span.moments[k]) + first;
        }
      }
      const RandomKey key = random_key(use.seed, use.step, use.parameter,
                                       static_cast<uint64_t>(first) >> 32);  // one a block
      const int64_t rest = step_lanes<Parameter, Gradient, Rule, Weights, Lanes>(
          part, 0, count, step.coefficients, use, key);
      step_lanes<Parameter, Gradient, Rule, Weights, ScalarLanes<Parameter>>(
          part, rest, count, step.coefficients, use, key);
      if (has_codes) {
        Block8Converter<Floats, true>::narrow(moments[0], codes[0] + first, step.scales[0][block],
                                              count);
        Block8Converter<Floats, false>::narrow(moments[1], codes[1] + first, step.scales[1][block],
                                               count);
      }
    }
  }
};

/// Takes the steps on libtorch's threads. Bits do not depend on their number.
inline void step_adamw8bit_cpu(const std::vector<AdamW8bitStep>& steps, CpuIsa isa = best_isa()) {
  int64_t elements = 0;
  for (const AdamW8bitStep& step : steps) elements += step.span.count;
  const int64_t size = step_piece(elements);
  WorkChunks pieces(size, size);
  for (std::size_t i = 0; i < steps.size(); ++i) pieces.add(i, steps[i].span.count);
  pieces.for_each([&](std::size_t, const WorkChunks::Chunk& piece) {
    const AdamW8bitStep& step = steps[piece.item];
    const auto run = step.parameter_dtype == at::kFloat
                         ? cpu_kernel<AdamW8bitKernel, float, float>(isa)
                     : step.gradient_dtype == at::kFloat
                         ? cpu_kernel<AdamW8bitKernel, c10::BFloat16, float>(isa)
                         : cpu_kernel<AdamW8bitKernel, c10::BFloat16, c10::BFloat16>(isa);
    run(step, piece.begin, piece.begin + piece.count);
  });
}
static_assert(kStepPiece % kBlock8 == 0, "a piece begins with a block");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
