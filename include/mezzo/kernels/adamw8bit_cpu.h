#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/blockwise_quant.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/simd.h>
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

/// One block of a moment, to floats and back. `Vec` are of floats, and divide a block.
template <class Vec, bool kIsSigned>
struct BlockQuantizer {
  using Codes = typename Vec::template Rebind<QuantizedByte>;
  using Value = typename Vec::Value;
  using Bits = typename Vec::Bits;

  C10_ALWAYS_INLINE static void dequantize(const uint8_t* codes, float scale, float* to,
                                           int64_t count) {
    uint8_t whole[kQuantBlockSize] = {};
    std::memcpy(whole, codes, static_cast<std::size_t>(count));
    alignas(64) float values[kQuantBlockSize];
    Value scales;
    Vec::broadcast(scale, scales);
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Bits code;
      Codes::load(whole + i, code);
      Value value;
      dequantize_block<kIsSigned, Vec>(kDynamicMaps.of<kIsSigned>(), code, scales, value);
      std::memcpy(values + i, &value, sizeof(value));
    }
    std::memcpy(to, values, static_cast<std::size_t>(count) * sizeof(float));
  }

  C10_ALWAYS_INLINE static void quantize(const float* from, uint8_t* codes, float& scale,
                                         int64_t count) {
    alignas(64) float values[kQuantBlockSize] = {};
    std::memcpy(values, from, static_cast<std::size_t>(count) * sizeof(float));
    Bits largest{};  // a NaN's are larger than any other's
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Bits own;
      std::memcpy(&own, values + i, sizeof(own));
      own = own & 0x7FFFFFFFU;
      largest = own > largest ? own : largest;
    }
    uint32_t each[Vec::kWidth];
    std::memcpy(each, &largest, sizeof(each));
    reinterpret_bits(*std::max_element(each, each + Vec::kWidth), scale);
    Value inverses;
    Vec::broadcast(invert_absmax(scale), inverses);
    uint8_t whole[kQuantBlockSize];
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Value value;
      std::memcpy(&value, values + i, sizeof(value));
      Bits code;
      quantize_block<kIsSigned, Vec>(kDynamicMaps.of<kIsSigned>(), value, inverses, code);
      Codes::store(code, whole + i);
    }
    std::memcpy(codes, whole, static_cast<std::size_t>(count));
  }
};

/// Steps elements [begin, end) of a parameter; `begin` is that of a block.
template <class Parameter, class Vec>
struct AdamW8bitKernel {
  C10_ALWAYS_INLINE static void run(const AdamW8bitParamArgs& step, int64_t begin, int64_t end) {
    using Step =
        OptimizerStepKernel<Parameter, AdamFunctor<false>, AdamW8bitWeightFormat<Parameter>, Vec>;
    using Floats = typename Vec::template Rebind<float>;
    using First = BlockQuantizer<Floats, true>;
    using Second = BlockQuantizer<Floats, false>;
    const auto gradient_size = static_cast<int64_t>(c10::elementSize(step.use.gradient_dtype));
    auto* const codes = reinterpret_cast<uint8_t* const*>(step.pointers.moments);
    auto* const floats = reinterpret_cast<float* const*>(step.pointers.moments);
    const bool has_codes = step.scales[0] != nullptr;
    alignas(64) float moments[2][kQuantBlockSize];
    for (int64_t first = begin; first < end; first += kQuantBlockSize) {
      const int64_t count = std::min(kQuantBlockSize, end - first);
      const int64_t block = first / kQuantBlockSize;
      ParamPointers part{static_cast<typename Vec::Stored*>(step.pointers.parameter) + first,
                         static_cast<char*>(step.pointers.gradient) + first * gradient_size,
                         {moments[0], moments[1]},
                         count,
                         nullptr,
                         first};
      if (has_codes) {
        First::dequantize(codes[0] + first, step.scales[0][block], moments[0], count);
        Second::dequantize(codes[1] + first, step.scales[1][block], moments[1], count);
      } else {
        for (int k = 0; k < 2; ++k) part.moments[k] = floats[k] + first;
      }
      Step::run(part, step.coefficients, step.use);
      if (has_codes) {
        First::quantize(moments[0], codes[0] + first, step.scales[0][block], count);
        Second::quantize(moments[1], codes[1] + first, step.scales[1][block], count);
      }
    }
  }
};

/// Takes the steps on libtorch's threads. Bits do not depend on their number.
inline void step_adamw8bit_cpu(const std::vector<AdamW8bitParamArgs>& steps,
                               CpuIsa isa = best_isa()) {
  int64_t elements = 0;
  for (const AdamW8bitParamArgs& step : steps) elements += step.pointers.numel;
  const int64_t size = step_chunk_elements(elements);
  WorkChunks pieces(size, size);
  for (std::size_t i = 0; i < steps.size(); ++i) pieces.add(i, steps[i].pointers.numel);
  pieces.for_each([&](std::size_t, const WorkChunks::Chunk& piece) {
    const AdamW8bitParamArgs& step = steps[piece.tensor_index];
    const auto run = step.parameter_dtype == at::kFloat
                         ? kernel_for_isa<AdamW8bitKernel, float>(isa)
                         : kernel_for_isa<AdamW8bitKernel, c10::BFloat16>(isa);
    run(step, piece.begin, piece.begin + piece.count);
  });
}
static_assert(kMinChunkElements % kQuantBlockSize == 0, "a piece begins with a block");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
