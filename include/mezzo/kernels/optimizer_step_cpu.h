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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// The CPU's loops of the optimizers, and the work of a step, cut into pieces for libtorch's
// threads.
//
// A loop reads gradient, parameter and moments of a stretch once and writes parameter and moments
// once. It exists for each rule, each way of keeping weights and each instruction set, and reads
// gradients in the dtype that it computes in. What is kept in another format is widened a stretch
// at a time, into memory that stays in the cache, and rounded from there.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Steps the elements from `begin` on, in whole vectors. Returns the first that is left.
template <class Rule, class Weights, class Lanes>
C10_ALWAYS_INLINE int64_t step_lanes(const StepSpan& span, int64_t begin,
                                     const StepNumbers& numbers, const StepUse& use) {
  using Body = StepBody<Rule, Weights, Lanes>;
  using Streams = typename Body::Place;
  using Bits = typename Lanes::Bits;

  const Body step(numbers.as<typename Rule::Coefficients>(), use);
  const RandomKey key =
      random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(span.first) >> 32);
  Streams base{static_cast<decltype(Streams::parameter)>(span.parameter),
               static_cast<decltype(Streams::gradient)>(span.gradient),
               {},
               static_cast<decltype(Streams::low_half_or_copy)>(span.low_half_or_copy),
               span.low_half_or_copy != nullptr};
  for (unsigned k = 0; k != Rule::kMoments; ++k) {
    base.moments[k] =
        static_cast<std::remove_reference_t<decltype(base.moments[k])>>(span.moments[k]);
  }
  Bits lane_numbers;
  Lanes::enumerate(lane_numbers);
  int64_t i = begin;
  for (; i + Lanes::kWidth <= span.count; i += Lanes::kWidth) {
    Streams place = base;
    place.parameter += i;
    place.gradient += i;
    for (unsigned k = 0; k != Rule::kMoments; ++k) place.moments[k] += i;
    if (base.has_low_half_or_copy) place.low_half_or_copy += i;
    const Bits own_numbers = lane_numbers + static_cast<uint32_t>(span.first + i);
    step(place, own_numbers, key);
  }
  return i;
}

/// Steps the elements that are left of whole vectors. Not inlined: compiled once for all
/// instruction sets, which give the same bits.
template <class Rule, class Weights>
C10_NOINLINE void step_rest(const StepSpan& span, int64_t begin, const StepNumbers& numbers,
                            const StepUse& use) {
  step_lanes<Rule, Weights, ScalarLanes<typename Weights::Parameter>>(span, begin, numbers, use);
}

/// Steps a span whose elements have one random key: their numbers are equal but for the lower 32
/// bits.
template <class Parameter, class Rule, class Weights, class Lanes>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span, const StepNumbers& numbers,
                                    const StepUse& use) {
    int64_t begin = 0;
    if constexpr (Lanes::kWidth != 1) {
      begin = step_lanes<Rule, Weights, Lanes>(span, begin, numbers, use);
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

/// Elements of 16 bits as floats.
template <class Element, class Lanes>
struct ToFloatKernel {
  C10_ALWAYS_INLINE static void run(const void* from, void* to, int64_t count) {
    const auto* const source = static_cast<const typename Lanes::Format::Stored*>(from);
    auto* const target = static_cast<float*>(to);
    int64_t i = 0;
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      typename Lanes::Bits bits;
      Lanes::load(source + i, bits);
      typename Lanes::Value value;
      Lanes::Format::widen(bits, value);
      std::memcpy(target + i, &value, sizeof(value));
    }
    for (; i < count; ++i) {
      typename Lanes::Format::Bits bits;
      ScalarLanes<Element>::load(source + i, bits);
      Lanes::Format::widen(bits, target[i]);
    }
  }
};

/// Writes `count` gradients of dtype `from` at `source` to `target`, as `to`, which holds them
/// exactly: floats, or doubles for floats.
inline void widen_gradients(at::ScalarType from, const void* source, void* target, int64_t count) {
  if (from == at::kFloat) {
    for (int64_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, static_cast<const std::byte*>(source) + i * int64_t{sizeof(float)},
                  sizeof(value));
      static_cast<double*>(target)[i] = value;
    }
  } else if (from == at::kBFloat16) {
    cpu_kernel<ToFloatKernel, c10::BFloat16>(best_isa())(source, target, count);
  } else {
    cpu_kernel<ToFloatKernel, c10::Half>(best_isa())(source, target, count);
  }
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

/// How many elements a loop takes at a time: so many that calls cost nothing, and so few that their
/// gradients stay in the first-level cache, where they are widened before and cleared afterwards.
/// No stretch has two random keys, for 2^32 is a multiple of it.
inline constexpr int64_t kStepStretch = 2048;

/// Steps elements of a row, at most kStepStretch of them.
inline void step_stretch(const StepRow& row, const StepCall& call, const StepUse& use, bool clears,
                         StepSpan part) {
  void* const gradient = part.gradient;
  alignas(64) std::byte widened[kStepStretch * sizeof(double)];
  if (row.gradient_dtype != (row.parameter_dtype == at::kDouble ? at::kDouble : at::kFloat)) {
    widen_gradients(row.gradient_dtype, gradient, widened, part.count);
    part.gradient = widened;
  }
  call.loop(part, call.coefficients, use);
  if (!clears) return;
  std::memset(gradient, 0,
              static_cast<std::size_t>(part.count) * c10::elementSize(row.gradient_dtype));
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
    own.copies_half = row.copies_half;
    own.step = calls[row.group].step;
    own.parameter = row.number;
    for (int64_t done = 0; done < piece.count; done += kStepStretch) {
      step_stretch(row, calls[row.group], own, clears,
                   part_of(row, piece.begin + done, std::min(kStepStretch, piece.count - done)));
    }
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
