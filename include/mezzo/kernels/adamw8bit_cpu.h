#pragma once

#include <mezzo/base/version.h>
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

/// One block of a moment, to floats and back. `Lanes` are of floats, and divide a block.
template <class Lanes, bool kIsSigned>
struct Block8Converter {
  using Codes = typename Lanes::template Like<Block8Code>;
  using Value = typename Lanes::Value;
  using Bits = typename Lanes::Bits;

  C10_ALWAYS_INLINE static void widen(const uint8_t* codes, float scale, float* to, int64_t count) {
    uint8_t whole[kBlock8] = {};
    std::memcpy(whole, codes, static_cast<std::size_t>(count));
    alignas(64) float values[kBlock8];
    Value scales;
    Lanes::broadcast(scale, scales);
    for (int64_t i = 0; i < kBlock8; i += Lanes::kWidth) {
      Bits code;
      Codes::load(whole + i, code);
      Value value;
      widen_block8<kIsSigned, Lanes>(kBlock8Maps.of<kIsSigned>(), code, scales, value);
      std::memcpy(values + i, &value, sizeof(value));
    }
    std::memcpy(to, values, static_cast<std::size_t>(count) * sizeof(float));
  }

  C10_ALWAYS_INLINE static void narrow(const float* from, uint8_t* codes, float& scale,
                                       int64_t count) {
    alignas(64) float values[kBlock8] = {};
    std::memcpy(values, from, static_cast<std::size_t>(count) * sizeof(float));
    Bits largest{};  // a NaN's are larger than any other's
    for (int64_t i = 0; i < kBlock8; i += Lanes::kWidth) {
      Bits own;
      std::memcpy(&own, values + i, sizeof(own));
      own = own & 0x7FFFFFFFU;
      largest = own > largest ? own : largest;
    }
    uint32_t each[Lanes::kWidth];
    std::memcpy(each, &largest, sizeof(each));
    reinterpret_bits(*std::max_element(each, each + Lanes::kWidth), scale);
    Value inverses;
    Lanes::broadcast(inverse_of_scale(scale), inverses);
    uint8_t whole[kBlock8];
    for (int64_t i = 0; i < kBlock8; i += Lanes::kWidth) {
      Value value;
      std::memcpy(&value, values + i, sizeof(value));
      Bits code;
      narrow_block8<kIsSigned, Lanes>(kBlock8Maps.of<kIsSigned>(), value, inverses, code);
      Codes::store(code, whole + i);
    }
    std::memcpy(codes, whole, static_cast<std::size_t>(count));
  }
};

/// Steps elements [begin, end) of a parameter; `begin` is that of a block.
template <class Parameter, class Lanes>
struct AdamW8bitKernel {
  C10_ALWAYS_INLINE static void run(const AdamW8bitStep& step, int64_t begin, int64_t end) {
    using Step =
        OptimizerStepKernel<Parameter, AdamRule<false>, AdamW8bitWeights<Parameter>, Lanes>;
    using Floats = typename Lanes::template Like<float>;
    using First = Block8Converter<Floats, true>;
    using Second = Block8Converter<Floats, false>;
    const auto gradient_size = static_cast<int64_t>(c10::elementSize(step.use.gradient_dtype));
    auto* const codes = reinterpret_cast<uint8_t* const*>(step.span.moments);
    auto* const floats = reinterpret_cast<float* const*>(step.span.moments);
    const bool has_codes = step.scales[0] != nullptr;
    alignas(64) float moments[2][kBlock8];
    for (int64_t first = begin; first < end; first += kBlock8) {
      const int64_t count = std::min(kBlock8, end - first);
      const int64_t block = first / kBlock8;
      StepSpan part{static_cast<typename Lanes::Stored*>(step.span.parameter) + first,
                    static_cast<char*>(step.span.gradient) + first * gradient_size,
                    {moments[0], moments[1]},
                    count,
                    nullptr,
                    first};
      if (has_codes) {
        First::widen(codes[0] + first, step.scales[0][block], moments[0], count);
        Second::widen(codes[1] + first, step.scales[1][block], moments[1], count);
      } else {
        for (int k = 0; k < 2; ++k) part.moments[k] = floats[k] + first;
      }
      Step::run(part, step.coefficients, step.use);
      if (has_codes) {
        First::narrow(moments[0], codes[0] + first, step.scales[0][block], count);
        Second::narrow(moments[1], codes[1] + first, step.scales[1][block], count);
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
                         ? cpu_kernel<AdamW8bitKernel, float>(isa)
                         : cpu_kernel<AdamW8bitKernel, c10::BFloat16>(isa);
    run(step, piece.begin, piece.begin + piece.count);
  });
}
static_assert(kStepPiece % kBlock8 == 0, "a piece begins with a block");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
