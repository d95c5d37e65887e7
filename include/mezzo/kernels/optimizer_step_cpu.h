#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/simd.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/kernels/step_functor.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

// CPU kernels of the element-wise optimizers, and their parallel loop over chunks.
//
// A kernel reads gradient, parameter and moments once, in their stored dtypes, and writes parameter
// and moments once. There is one for each functor, weight format and instruction set.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Loop over a parameter's elements, kUnroll vectors at a time.
template <class Functor, class WeightFormat, class Vec>
class VectorizedStep {
  using Step = StepFunctor<Functor, WeightFormat, Vec>;
  using Elements = typename Step::template Elements<Vec::kUnroll>;
  using Value = typename Vec::Value;
  static constexpr int kUnroll = Vec::kUnroll;
  /// If all arrays are 16-bit, even and odd elements are loaded into separate vectors.
  static constexpr bool kDeinterleave =
      sizeof(typename Vec::Stored) == 2 &&
      std::is_same_v<typename WeightFormat::Moment, typename WeightFormat::Parameter>;

 public:
  /// Steps whole tiles of kUnroll vectors from element `begin` on. Returns the index of the first
  /// remaining element. `param` and `args` are copies, which stores cannot alias.
  C10_ALWAYS_INLINE static int64_t run(ParamArgs param, int64_t begin,
                                       const FunctorArgs& coefficients, StepArgs args) {
    constexpr int64_t kTileElements = kUnroll * Vec::kWidth;
    const ParamPointers& pointers = param.pointers;
    const Step step(coefficients.as<typename Functor::Coefficients>(), args.multipliers,
                    param.model_param_is_fp16);
    const RandomKey key = random_key(args.seed, args.step, param.param_index,
                                     static_cast<uint64_t>(pointers.first_index) >> 32);
    typename Vec::Bits tile_indices[kUnroll], seeds[kUnroll];
    Vec::template arange<kDeinterleave>(tile_indices);
    Elements elements;
    elements.has_low_bits_or_model_param = pointers.low_bits_or_model_param != nullptr;
    int64_t i = begin;
    for (; i + kTileElements <= pointers.numel; i += kTileElements) {
      load_gradients(param, i, args.zero_grad, elements.gradient);
      for_each_array(pointers, i, elements,
                     []<class ArrayVec>(ArrayVec, const auto* data, auto& bits)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
                           ArrayVec::template load_unrolled<kDeinterleave>(data, bits);
                         });
      MEZZO_UNROLL_IN_REGISTERS
      for (int k = 0; k < kUnroll;
           ++k) {  // first_index + i is a multiple of a tile: ^ adds the index
        seeds[k] = tile_indices[k] ^ (static_cast<uint32_t>(pointers.first_index + i) ^ key);
      }
      step(elements, seeds);
      for_each_array(pointers, i, elements,
                     []<class ArrayVec>(ArrayVec, auto* data, const auto& bits)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
                           ArrayVec::template store_unrolled<kDeinterleave>(bits, data);
                         });
    }
    return i;
  }

 private:
  /// Calls `visit(vec, data, bits)` for each array of the parameter but its gradient.
  template <class Visit>
  C10_ALWAYS_INLINE static void for_each_array(const ParamPointers& pointers, int64_t i,
                                               Elements& elements, const Visit& visit) {
    using MomentVec = typename Elements::MomentVec;
    visit(Vec{}, static_cast<typename Vec::Stored*>(pointers.parameter) + i, elements.parameter);
    if constexpr (Functor::kNumMoments > 0) {
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Functor::kNumMoments; ++k) {
        visit(MomentVec{}, static_cast<typename MomentVec::Stored*>(pointers.moments[k]) + i,
              elements.moments[k]);
      }
    }
    if constexpr (Step::kIsSplit || Step::kMayHaveModelParam) {
      if (!Step::kIsSplit && !elements.has_low_bits_or_model_param) return;
      visit(typename Elements::U16Vec{},
            static_cast<uint16_t*>(pointers.low_bits_or_model_param) + i,
            elements.low_bits_or_model_param);
    }
  }

  /// Loads gradients from their own dtype, and sets them to zero if `zero_grad`.
  C10_ALWAYS_INLINE static void load_gradients(const ParamArgs& param, int64_t i, bool zero_grad,
                                               Value (&values)[kUnroll]) {
    void* const data = param.pointers.gradient;
    const at::ScalarType dtype = param.gradient_dtype;
    if constexpr (std::is_same_v<typename Vec::Format::opmath_t, double>) {
      if (dtype == at::kDouble) return load_as<double>(data, i, zero_grad, values);
      load_as<float>(data, i, zero_grad, values);
    } else {
      if (dtype == at::kFloat) return load_as<float>(data, i, zero_grad, values);
      dtype == at::kHalf ? load_as<c10::Half>(data, i, zero_grad, values)
                         : load_as<c10::BFloat16>(data, i, zero_grad, values);
    }
  }
  template <class Element>
  C10_ALWAYS_INLINE static void load_as(void* data, int64_t i, bool zero_grad,
                                        Value (&values)[kUnroll]) {
    using GradVec = typename Vec::template Rebind<Element>;
    auto* const stored = static_cast<typename GradVec::Stored*>(data) + i;
    typename GradVec::Bits bits[kUnroll];
    GradVec::template load_unrolled<kDeinterleave>(stored, bits);
    MEZZO_UNROLL_IN_REGISTERS
    for (int k = 0; k < kUnroll; ++k) {
      typename GradVec::Value value;
      GradVec::Format::to_opmath(bits[k], value);
      GradVec::convert(value, values[k]);
      bits[k] = bits[k] & 0U;
    }
    if (zero_grad) GradVec::template store_unrolled<kDeinterleave>(bits, stored);
  }
};

/// Steps the elements after the last whole tile. Not inlined: compiled once for all instruction
/// sets, whose results are bitwise identical.
template <class Functor, class WeightFormat>
C10_NOINLINE void step_tail(const ParamArgs& param, int64_t begin, const FunctorArgs& coefficients,
                            const StepArgs& args) {
  VectorizedStep<Functor, WeightFormat, ScalarVec<typename WeightFormat::Parameter>>::run(
      param, begin, coefficients, args);
}

/// Steps elements that share a RandomKey: their indices differ only in the lower 32 bits.
template <class Parameter, class Functor, class WeightFormat, class Vec>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const ParamArgs& param, const FunctorArgs& coefficients,
                                    const StepArgs& args) {
    int64_t begin = 0;
    if constexpr (Vec::kWidth != 1) {
      begin = VectorizedStep<Functor, WeightFormat, Vec>::run(param, begin, coefficients, args);
    }
    if (begin < param.pointers.numel) {
      step_tail<Functor, WeightFormat>(param, begin, coefficients, args);
    }
  }
};

/// Returns the kernel of an element-wise functor; null for a dtype without one.
template <class Functor>
StepKernelFn get_step_kernel(optim::WeightStorage storage, at::ScalarType dtype, CpuIsa isa) {
  StepKernelFn kernel = nullptr;
  for_each_weight_format([&]<class WeightFormat>() {
    if (!matches_format<WeightFormat>(storage, dtype)) return;
    kernel = kernel_for_isa<OptimizerStepKernel, typename WeightFormat::Parameter, Functor,
                            WeightFormat>(isa);
  });
  return kernel;
}

/// Arguments of parameters of one group, storage, dtype and step count.
struct CpuGroupArgs {
  StepKernelFn kernel;
  FunctorArgs coefficients;
  std::uint64_t step = 1;  ///< 1 in the first step
};

/// The smallest chunk of a step: large enough to hide the cost of scheduling it.
inline constexpr int64_t kMinChunkElements = 16384;

/// Returns the number of elements per chunk of a step of `elements`. Larger chunks are faster,
/// since the hardware prefetches each array, but each thread should have several.
inline int64_t step_chunk_elements(int64_t elements) {
  int64_t chunk = kMinChunkElements;
  while (chunk < 8 * kMinChunkElements && 8 * chunk * at::get_num_threads() <= elements) chunk *= 2;
  return chunk;
}

/// Returns `param` restricted to elements [begin, begin + numel).
inline ParamArgs narrow_param(ParamArgs param, int64_t begin, int64_t numel) {
  ParamPointers& pointers = param.pointers;
  pointers.numel = numel;
  if (begin == 0) return param;
  const auto advance = [begin](void*& pointer, at::ScalarType dtype) {
    if (pointer == nullptr) return;
    pointer = static_cast<char*>(pointer) + begin * static_cast<int64_t>(c10::elementSize(dtype));
  };
  const bool is_split = param.storage == optim::WeightStorage::split_master;
  advance(pointers.parameter, param.parameter_dtype);
  advance(pointers.gradient, param.gradient_dtype);
  for (void*& moment : pointers.moments) {
    advance(moment, is_split ? at::kFloat : param.parameter_dtype);
  }
  advance(pointers.low_bits_or_model_param, at::kShort);
  pointers.first_index += begin;
  return param;
}

/// Steps all parameters in one pass over their memory, on libtorch's threads.
/// \param params  a range of ParamArgs, whose `group` is an index of `groups`
/// \param args    multipliers, zero_grad and seed of all parameters
template <class Params>
void run_step_cpu(const Params& params, const std::vector<CpuGroupArgs>& groups,
                  const StepArgs& args) {
  int64_t elements = 0;
  for (const ParamArgs& param : params) elements += param.pointers.numel;
  const int64_t size = step_chunk_elements(elements);
  WorkChunks chunks(size, size);
  for (std::size_t i = 0; i < params.size(); ++i) chunks.add(i, params[i].pointers.numel);
  chunks.for_each([&](std::size_t, const WorkChunks::Chunk& chunk) {
    const ParamArgs& param = params[chunk.tensor_index];
    const CpuGroupArgs& group = groups[param.group];
    StepArgs group_args = args;
    group_args.step = group.step;
    group.kernel(narrow_param(param, chunk.begin, chunk.numel), group.coefficients, group_args);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL_IN_REGISTERS
