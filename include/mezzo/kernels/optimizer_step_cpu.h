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

// The CPU's loops of the optimizers, and the work of a step, cut into pieces for libtorch's
// threads.
//
// A loop reads gradient, parameter and moments once, in the dtypes that they are stored in, and
// writes parameter and moments once. It exists for each rule, each way of keeping weights and each
// instruction set.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The loop over the elements of a range, a block at a time.
template <class Functor, class WeightFormat, class Vec>
class VectorizedStep {
  using Body = StepFunctor<Functor, WeightFormat, Vec>;
  using Elements = typename Body::template Elements<Vec::kUnroll>;
  using Value = typename Vec::Value;
  static constexpr int kUnroll = Vec::kUnroll;
  /// Even and odd elements have vectors of their own where all streams have 16 bits.
  static constexpr bool kDeinterleave =
      sizeof(typename Vec::Stored) == 2 &&
      std::is_same_v<typename WeightFormat::Moment, typename WeightFormat::Parameter>;

 public:
  /// Steps the elements from `begin` on, in whole blocks. Returns the first that is left.
  /// `pointers` and `use` are copies, which no store can change.
  C10_ALWAYS_INLINE static int64_t run(ParamPointers pointers, int64_t begin,
                                       const FunctorArgs& numbers, StepArgs use) {
    constexpr int64_t kBlock = kUnroll * Vec::kWidth;
    const Body step(numbers.as<typename Functor::Coefficients>(), use);
    const RandomKey key = random_key(use.seed, use.step, use.param_index,
                                     static_cast<uint64_t>(pointers.first) >> 32);
    typename Vec::Bits lane_numbers[kUnroll], seeds[kUnroll];
    Vec::template arange<kDeinterleave>(lane_numbers);
    Elements elements;
    elements.has_low_bits_or_model_param = pointers.low_bits_or_model_param != nullptr;
    int64_t i = begin;
    for (; i + kBlock <= pointers.numel; i += kBlock) {
      load_gradients(use, pointers.gradient, i, elements.gradient);
      for_each_array(pointers, i, elements,
                     []<class Own>(Own, const auto* element, auto& bits)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
                           Own::template load_unrolled<kDeinterleave>(element, bits);
                         });
      MEZZO_UNROLL_IN_REGISTERS
      for (int k = 0; k < kUnroll; ++k) {  // i is a multiple of a block: ^ adds lane and number
        seeds[k] = lane_numbers[k] ^ (static_cast<uint32_t>(pointers.first + i) ^ key);
      }
      step(elements, seeds);
      for_each_array(pointers, i, elements,
                     []<class Own>(Own, auto* element, const auto& bits)
                         C10_ALWAYS_INLINE_ATTRIBUTE {
                           Own::template store_unrolled<kDeinterleave>(bits, element);
                         });
    }
    return i;
  }

 private:
  template <class Visit>
  C10_ALWAYS_INLINE static void for_each_array(const ParamPointers& pointers, int64_t at,
                                               Elements& elements, const Visit& visit) {
    using Moments = typename Elements::MomentVec;
    visit(Vec{}, static_cast<typename Vec::Stored*>(pointers.parameter) + at, elements.parameter);
    if constexpr (Functor::kNumMoments > 0) {
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Functor::kNumMoments; ++k) {
        visit(Moments{}, static_cast<typename Moments::Stored*>(pointers.moments[k]) + at,
              elements.moments[k]);
      }
    }
    if constexpr (Body::kIsSplit || Body::kMayHaveModelParam) {
      if (!Body::kIsSplit && !elements.has_low_bits_or_model_param) return;
      visit(typename Elements::U16Vec{},
            static_cast<uint16_t*>(pointers.low_bits_or_model_param) + at,
            elements.low_bits_or_model_param);
    }
  }

  /// Loads gradients in their own dtype, and clears them if `use.zeroes_grad`.
  C10_ALWAYS_INLINE static void load_gradients(const StepArgs& use, void* from, int64_t at,
                                               Value (&values)[kUnroll]) {
    if constexpr (std::is_same_v<typename Vec::Format::opmath_t, double>) {
      if (use.gradient_dtype == at::kDouble)
        return load_as<double>(from, at, use.zeroes_grad, values);
      load_as<float>(from, at, use.zeroes_grad, values);
    } else {
      if (use.gradient_dtype == at::kFloat)
        return load_as<float>(from, at, use.zeroes_grad, values);
      use.gradient_dtype == at::kHalf ? load_as<c10::Half>(from, at, use.zeroes_grad, values)
                                      : load_as<c10::BFloat16>(from, at, use.zeroes_grad, values);
    }
  }
  template <class Element>
  C10_ALWAYS_INLINE static void load_as(void* from, int64_t at, bool zeroes_grad,
                                        Value (&values)[kUnroll]) {
    using Own = typename Vec::template Rebind<Element>;
    auto* const element = static_cast<typename Own::Stored*>(from) + at;
    typename Own::Bits bits[kUnroll];
    Own::template load_unrolled<kDeinterleave>(element, bits);
    MEZZO_UNROLL_IN_REGISTERS
    for (int i = 0; i < kUnroll; ++i) {
      typename Own::Value value;
      Own::Format::to_opmath(bits[i], value);
      Own::convert(value, values[i]);
      bits[i] = bits[i] & 0U;
    }
    if (zeroes_grad) Own::template store_unrolled<kDeinterleave>(bits, element);
  }
};

/// Steps the elements that are left of whole blocks. Not inlined: compiled once for all
/// instruction sets, which give the same bits.
template <class Functor, class WeightFormat>
C10_NOINLINE void step_tail(const ParamPointers& pointers, int64_t begin,
                            const FunctorArgs& numbers, const StepArgs& use) {
  VectorizedStep<Functor, WeightFormat, ScalarVec<typename WeightFormat::Parameter>>::run(
      pointers, begin, numbers, use);
}

/// Steps a range whose elements have one random key: their numbers are equal but for the lower 32
/// bits.
template <class Parameter, class Functor, class WeightFormat, class Vec>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const ParamPointers& pointers, const FunctorArgs& numbers,
                                    const StepArgs& use) {
    int64_t begin = 0;
    if constexpr (Vec::kWidth != 1) {
      begin = VectorizedStep<Functor, WeightFormat, Vec>::run(pointers, begin, numbers, use);
    }
    if (begin < pointers.numel) step_tail<Functor, WeightFormat>(pointers, begin, numbers, use);
  }
};

/// Returns the loop of a rule that looks at one element at a time; null for dtypes that have none.
template <class Functor>
StepKernelFn get_step_kernel(optim::WeightStorage storage, at::ScalarType dtype, CpuIsa isa) {
  StepKernelFn loop = nullptr;
  for_each_weight_format([&]<class WeightFormat>() {
    if (!matches_format<WeightFormat>(storage, dtype)) return;
    loop = kernel_for_isa<OptimizerStepKernel, typename WeightFormat::Parameter, Functor,
                          WeightFormat>(isa);
  });
  return loop;
}

/// What rows share that are stepped alike on the CPU: those of one group, storage, dtype and number
/// of steps.
struct CpuGroupArgs {
  StepKernelFn loop;
  FunctorArgs coefficients;
  std::uint64_t step = 1;  ///< number of this step of the parameters, from 1
};

/// The fewest elements that a thread takes at a time: so many that taking them costs nothing.
inline constexpr int64_t kMinChunkElements = 16384;

/// Returns how many elements of a step a thread takes at a time. A longer piece is faster, since
/// the processor fetches ahead in each of its streams; but each thread should have several pieces.
inline int64_t step_chunk_elements(int64_t elements) {
  int64_t piece = kMinChunkElements;
  while (piece < 8 * kMinChunkElements && 8 * piece * at::get_num_threads() <= elements) piece *= 2;
  return piece;
}

/// Returns elements [begin, begin + count) of a row.
inline ParamPointers chunk_pointers(const ParamArgs& row, int64_t begin, int64_t count) {
  ParamPointers part = row.pointers;
  part.numel = count;
  if (begin == 0) return part;
  const auto advance = [begin](void*& pointer, at::ScalarType dtype) {
    if (pointer == nullptr) return;
    pointer = static_cast<char*>(pointer) + begin * static_cast<int64_t>(c10::elementSize(dtype));
  };
  const bool is_split = row.storage == optim::WeightStorage::split_master;
  advance(part.parameter, row.parameter_dtype);
  advance(part.gradient, row.gradient_dtype);
  for (void*& moment : part.moments) advance(moment, is_split ? at::kFloat : row.parameter_dtype);
  advance(part.low_bits_or_model_param, at::kShort);
  part.first += begin;
  return part;
}

/// Takes the step of all rows in one pass over their memory; small ones share a batch.
/// \param rows    a range of ParamArgs, whose `group` is a number among `calls`
/// \param use     what all rows share: multipliers and seed
/// \param zeroes_grad  whether gradients are set to zero
template <class Rows>
void run_step_cpu(const Rows& rows, const std::vector<CpuGroupArgs>& calls, const StepArgs& use,
                  bool zeroes_grad) {
  int64_t elements = 0;
  for (const ParamArgs& row : rows) elements += row.pointers.numel;
  const int64_t size = step_chunk_elements(elements);
  WorkChunks pieces(size, size);
  for (std::size_t i = 0; i < rows.size(); ++i) pieces.add(i, rows[i].pointers.numel);
  pieces.for_each([&](std::size_t, const WorkChunks::Chunk& piece) {
    const ParamArgs& row = rows[piece.tensor_index];
    StepArgs own = use;
    own.gradient_dtype = row.gradient_dtype;
    own.zeroes_grad = zeroes_grad;
    own.model_param_is_fp16 = row.model_param_is_fp16;
    own.step = calls[row.group].step;
    own.param_index = row.param_index;
    const CpuGroupArgs& call = calls[row.group];
    call.loop(chunk_pointers(row, piece.begin, piece.count), call.coefficients, own);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL_IN_REGISTERS
