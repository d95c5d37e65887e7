#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/optimizer_step_body.h>
#include <mezzo/kernels/step_use.h>
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

/// The loop over the elements of a span, a block at a time.
template <class Rule, class Weights, class Lanes>
class StepLoopBody {
  using Body = StepBody<Rule, Weights, Lanes>;
  using Places = typename Body::template Places<Lanes::kVectors>;
  using Value = typename Lanes::Value;
  static constexpr int kVectors = Lanes::kVectors;
  /// Even and odd elements have vectors of their own where all streams have 16 bits.
  static constexpr bool kEvenOdd =
      sizeof(typename Lanes::Stored) == 2 &&
      std::is_same_v<typename Weights::Moment, typename Weights::Parameter>;

 public:
  /// Steps the elements from `begin` on, in whole blocks. Returns the first that is left. `span`
  /// and `use` are copies, which no store can change.
  C10_ALWAYS_INLINE static int64_t run(StepSpan span, int64_t begin, const StepNumbers& numbers,
                                       StepUse use) {
    constexpr int64_t kBlock = kVectors * Lanes::kWidth;
    const Body step(numbers.as<typename Rule::Coefficients>(), use);
    const RandomKey key =
        random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(span.first) >> 32);
    typename Lanes::Bits lane_numbers[kVectors], seeds[kVectors];
    Lanes::template enumerate<kEvenOdd>(lane_numbers);
    Places places;
    places.has_low_half_or_copy = span.low_half_or_copy != nullptr;
    int64_t i = begin;
    for (; i + kBlock <= span.count; i += kBlock) {
      load_gradients(use, span.gradient, i, places.gradient);
      for_streams(span, i, places,
                  []<class Own>(Own, const auto* place, auto& bits) C10_ALWAYS_INLINE_ATTRIBUTE {
                    Own::template load_block<kEvenOdd>(place, bits);
                  });
      MEZZO_UNROLL_IN_REGISTERS
      for (int k = 0; k < kVectors; ++k) {  // i is a multiple of a block: ^ adds lane and number
        seeds[k] = lane_numbers[k] ^ (static_cast<uint32_t>(span.first + i) ^ key);
      }
      step(places, seeds);
      for_streams(span, i, places,
                  []<class Own>(Own, auto* place, const auto& bits) C10_ALWAYS_INLINE_ATTRIBUTE {
                    Own::template store_block<kEvenOdd>(bits, place);
                  });
    }
    return i;
  }

 private:
  template <class Visit>
  C10_ALWAYS_INLINE static void for_streams(const StepSpan& span, int64_t at, Places& places,
                                            const Visit& visit) {
    using Moments = typename Places::MomentLanes;
    visit(Lanes{}, static_cast<typename Lanes::Stored*>(span.parameter) + at, places.parameter);
    if constexpr (Rule::kMoments > 0) {
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        visit(Moments{}, static_cast<typename Moments::Stored*>(span.moments[k]) + at,
              places.moments[k]);
      }
    }
    if constexpr (Body::kIsSplit || Body::kMayCopy) {
      if (!Body::kIsSplit && !places.has_low_half_or_copy) return;
      visit(typename Places::Halves{}, static_cast<uint16_t*>(span.low_half_or_copy) + at,
            places.low_half_or_copy);
    }
  }

  /// Loads gradients in their own dtype, and clears them if `use.clears`.
  C10_ALWAYS_INLINE static void load_gradients(const StepUse& use, void* from, int64_t at,
                                               Value (&values)[kVectors]) {
    if constexpr (std::is_same_v<typename Lanes::Format::Value, double>) {
      if (use.gradient_dtype == at::kDouble) return load_as<double>(from, at, use.clears, values);
      load_as<float>(from, at, use.clears, values);
    } else {
      if (use.gradient_dtype == at::kFloat) return load_as<float>(from, at, use.clears, values);
      use.gradient_dtype == at::kHalf ? load_as<c10::Half>(from, at, use.clears, values)
                                      : load_as<c10::BFloat16>(from, at, use.clears, values);
    }
  }
  template <class Element>
  C10_ALWAYS_INLINE static void load_as(void* from, int64_t at, bool clears,
                                        Value (&values)[kVectors]) {
    using Own = typename Lanes::template Like<Element>;
    auto* const place = static_cast<typename Own::Stored*>(from) + at;
    typename Own::Bits bits[kVectors];
    Own::template load_block<kEvenOdd>(place, bits);
    MEZZO_UNROLL_IN_REGISTERS
    for (int i = 0; i < kVectors; ++i) {
      typename Own::Value value;
      Own::Format::widen(bits[i], value);
      Own::convert(value, values[i]);
      bits[i] = bits[i] & 0U;
    }
    if (clears) Own::template store_block<kEvenOdd>(bits, place);
  }
};

/// Steps the elements that are left of whole blocks. Not inlined: compiled once for all
/// instruction sets, which give the same bits.
template <class Rule, class Weights>
C10_NOINLINE void step_rest(const StepSpan& span, int64_t begin, const StepNumbers& numbers,
                            const StepUse& use) {
  StepLoopBody<Rule, Weights, ScalarLanes<typename Weights::Parameter>>::run(span, begin, numbers,
                                                                             use);
}

/// Steps a span whose elements have one random key: their numbers are equal but for the lower 32
/// bits.
template <class Parameter, class Rule, class Weights, class Lanes>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span, const StepNumbers& numbers,
                                    const StepUse& use) {
    int64_t begin = 0;
    if constexpr (Lanes::kWidth != 1) {
      begin = StepLoopBody<Rule, Weights, Lanes>::run(span, begin, numbers, use);
    }
    if (begin < span.count) step_rest<Rule, Weights>(span, begin, numbers, use);
  }
};

/// Returns the loop of a rule that looks at one element at a time; null for dtypes that have none.
template <class Rule>
StepLoop step_loop(optim::WeightStorage storage, at::ScalarType kept, CpuIsa isa) {
  StepLoop loop = nullptr;
  for_each_weights([&]<class Weights>() {
    if (!keeps_as<Weights>(storage, kept)) return;
    loop = cpu_kernel<OptimizerStepKernel, typename Weights::Parameter, Rule, Weights>(isa);
  });
  return loop;
}

/// What rows share that are stepped alike on the CPU: those of one group, storage, dtype and number
/// of steps.
struct StepCall {
  StepLoop loop;
  StepNumbers coefficients;
  std::uint64_t step = 1;  ///< number of this step of the parameters, from 1
};

/// The fewest elements that a thread takes at a time: so many that taking them costs nothing.
inline constexpr int64_t kStepPiece = 16384;

/// Returns how many elements of a step a thread takes at a time. A longer piece is faster, since
/// the processor fetches ahead in each of its streams; but each thread should have several pieces.
inline int64_t step_piece(int64_t elements) {
  int64_t piece = kStepPiece;
  while (piece < 8 * kStepPiece && 8 * piece * at::get_num_threads() <= elements) piece *= 2;
  return piece;
}

/// Returns elements [begin, begin + count) of a row.
inline StepSpan part_of(const StepRow& row, int64_t begin, int64_t count) {
  StepSpan part = row.span;
  part.count = count;
  if (begin == 0) return part;
  const auto advance = [begin](void*& pointer, at::ScalarType dtype) {
    if (pointer == nullptr) return;
    pointer = static_cast<char*>(pointer) + begin * static_cast<int64_t>(c10::elementSize(dtype));
  };
  const bool is_split = row.storage == optim::WeightStorage::split_master;
  advance(part.parameter, row.parameter_dtype);
  advance(part.gradient, row.gradient_dtype);
  for (void*& moment : part.moments) advance(moment, is_split ? at::kFloat : row.parameter_dtype);
  advance(part.low_half_or_copy, at::kShort);
  part.first += begin;
  return part;
}

/// Takes the step of all rows in one pass over their memory; small ones share a batch.
/// \param rows    a vector or span of StepRow, whose `group` is a number among `calls`
/// \param use     what all rows share: multipliers and seed
/// \param clears  whether gradients are set to zero
template <class Rows>
void run_step_cpu(const Rows& rows, const std::vector<StepCall>& calls, const StepUse& use,
                  bool clears) {
  int64_t elements = 0;
  for (const StepRow& row : rows) elements += row.span.count;
  const int64_t size = step_piece(elements);
  WorkChunks pieces(size, size);
  for (std::size_t i = 0; i < rows.size(); ++i) pieces.add(i, rows[i].span.count);
  pieces.for_each([&](std::size_t, const WorkChunks::Chunk& piece) {
    const StepRow& row = rows[piece.item];
    StepUse own = use;
    own.gradient_dtype = row.gradient_dtype;
    own.clears = clears;
    own.copies_half = row.copies_half;
    own.step = calls[row.group].step;
    own.parameter = row.number;
    const StepCall& call = calls[row.group];
    call.loop(part_of(row, piece.begin, piece.count), call.coefficients, own);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL_IN_REGISTERS
