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

// The CPU kernel of AdamW8bit. The dequantized values of a block stay in the L1 cache.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Converts one block of a moment. `Vec` is of float, and its width divides a block.
template <class Vec, bool kIsSigned>
struct BlockQuantizer {
  using QValVec = typename Vec::template Rebind<QuantizedByte>;
  using Value = typename Vec::Value;
  using Bits = typename Vec::Bits;

  C10_ALWAYS_INLINE static void dequantize(const uint8_t* qvals, float absmax, float* values,
                                           int64_t count) {
    uint8_t padded_qvals[kQuantBlockSize] = {};
    std::memcpy(padded_qvals, qvals, static_cast<std::size_t>(count));
    alignas(64) float padded_values[kQuantBlockSize];
    Value absmax_vec;
    Vec::broadcast(absmax, absmax_vec);
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Bits qval;
      QValVec::load(padded_qvals + i, qval);
      Value value;
      dequantize_block<kIsSigned, Vec>(kDynamicMaps.get<kIsSigned>(), qval, absmax_vec, value);
      std::memcpy(padded_values + i, &value, sizeof(value));
    }
    std::memcpy(values, padded_values, static_cast<std::size_t>(count) * sizeof(float));
  }

  C10_ALWAYS_INLINE static void quantize(const float* values, uint8_t* qvals, float& absmax,
                                         int64_t count) {
    alignas(64) float padded_values[kQuantBlockSize] = {};
    std::memcpy(padded_values, values, static_cast<std::size_t>(count) * sizeof(float));
    Bits max_bits{};  // of magnitudes, NaN above inf
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Bits bits;
      std::memcpy(&bits, padded_values + i, sizeof(bits));
      bits = bits & 0x7FFFFFFFU;
      max_bits = bits > max_bits ? bits : max_bits;
    }
    uint32_t lane_max[Vec::kWidth];
    std::memcpy(lane_max, &max_bits, sizeof(lane_max));
    reinterpret_bits(*std::max_element(lane_max, lane_max + Vec::kWidth), absmax);
    Value inverse_absmax;
    Vec::broadcast(invert_absmax(absmax), inverse_absmax);
    uint8_t padded_qvals[kQuantBlockSize];
    for (int64_t i = 0; i < kQuantBlockSize; i += Vec::kWidth) {
      Value value;
      std::memcpy(&value, padded_values + i, sizeof(value));
      Bits qval;
      quantize_block<kIsSigned, Vec>(kDynamicMaps.get<kIsSigned>(), value, inverse_absmax, qval);
      QValVec::store(qval, padded_qvals + i);
    }
    std::memcpy(qvals, padded_qvals, static_cast<std::size_t>(count));
  }
};

/// Steps elements [begin, end) of a parameter; `begin` is a multiple of kQuantBlockSize.
template <class Parameter, class Vec>
struct AdamW8bitKernel {
  C10_ALWAYS_INLINE static void run(const AdamW8bitParamArgs& args, int64_t begin, int64_t end) {
    using Step =
        OptimizerStepKernel<Parameter, AdamFunctor<false>, AdamW8bitWeightFormat<Parameter>, Vec>;
    using FloatVec = typename Vec::template Rebind<float>;
    using FirstMoment = BlockQuantizer<FloatVec, true>;
    using SecondMoment = BlockQuantizer<FloatVec, false>;
    const ParamPointers& pointers = args.param.pointers;
    const auto gradient_bytes = static_cast<int64_t>(c10::elementSize(args.param.gradient_dtype));
    auto* const qvals = reinterpret_cast<uint8_t* const*>(pointers.moments);
    auto* const float_moments = reinterpret_cast<float* const*>(pointers.moments);
    const bool is_quantized = args.absmax[0] != nullptr;
    alignas(64) float moments[2][kQuantBlockSize];
    for (int64_t first = begin; first < end; first += kQuantBlockSize) {
      const int64_t count = std::min(kQuantBlockSize, end - first);
      const int64_t block = first / kQuantBlockSize;
      ParamArgs param = args.param;
      param.pointers = {static_cast<typename Vec::Stored*>(pointers.parameter) + first,
                        static_cast<char*>(pointers.gradient) + first * gradient_bytes,
                        {moments[0], moments[1]},
                        count,
                        nullptr,
                        first};
      if (is_quantized) {
        FirstMoment::dequantize(qvals[0] + first, args.absmax[0][block], moments[0], count);
        SecondMoment::dequantize(qvals[1] + first, args.absmax[1][block], moments[1], count);
      } else {
        for (int k = 0; k < 2; ++k) param.pointers.moments[k] = float_moments[k] + first;
      }
      Step::run(param, args.coefficients, args.step_args);
      if (is_quantized) {
        FirstMoment::quantize(moments[0], qvals[0] + first, args.absmax[0][block], count);
        SecondMoment::quantize(moments[1], qvals[1] + first, args.absmax[1][block], count);
      }
    }
  }
};

/// Steps all parameters on libtorch's threads. Results do not depend on the number of threads.
inline void step_adamw8bit_cpu(const std::vector<AdamW8bitParamArgs>& params,
                               CpuIsa isa = best_isa()) {
  int64_t elements = 0;
  for (const AdamW8bitParamArgs& args : params) elements += args.num_elements();
  const int64_t size = step_chunk_elements(elements);
  WorkChunks chunks(size, size);
  for (std::size_t i = 0; i < params.size(); ++i) chunks.add(i, params[i].num_elements());
  chunks.for_each([&](std::size_t, const WorkChunks::Chunk& chunk) {
    const AdamW8bitParamArgs& args = params[chunk.tensor_index];
    const auto kernel = args.param.parameter_dtype == at::kFloat
                            ? kernel_for_isa<AdamW8bitKernel, float>(isa)
                            : kernel_for_isa<AdamW8bitKernel, c10::BFloat16>(isa);
    kernel(args, chunk.begin, chunk.begin + chunk.numel);
  });
}
static_assert(kMinChunkElements % kQuantBlockSize == 0, "a chunk begins with a block");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
