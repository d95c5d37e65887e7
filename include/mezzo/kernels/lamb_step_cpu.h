#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/lamb_element.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/work_chunks.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

// The CPU's loops of LAMB's two passes, over stretches of a parameter. A stretch begins at a
// multiple of kStepPiece, so none crosses a multiple of 2^32 elements, and each has one random key.
// Norms are summed as gradients are (SquareSums): element i of a stretch belongs to sum i % 16, so
// every instruction set gives the same bits.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The streams of a stretch. Each step moves as many elements as there are lanes.
template <class Parameter, class Gradient, class Weights, class Lanes>
class LambWalk {
 public:
  using Body = LambBody<Parameter, Gradient, Weights, Lanes>;
  using Value = typename Body::Value;

  C10_ALWAYS_INLINE LambWalk(const StepSpan& span, const LambCoefficients& coefficients,
                             const StepUse& use)
      : body_(coefficients, use),
        base_{static_cast<decltype(Place::parameter)>(span.parameter),
              static_cast<decltype(Place::gradient)>(span.gradient),
              {static_cast<Moment*>(span.moments[0]), static_cast<Moment*>(span.moments[1])},
              static_cast<decltype(Place::low_half_or_copy)>(span.low_half_or_copy),
              span.low_half_or_copy != nullptr},
        first_(static_cast<uint32_t>(span.first)) {
    Lanes::enumerate(lane_numbers_);
    if constexpr (std::is_same_v<Weights, StochasticWeights>) {
      key_ = random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(span.first >> 32));
    }
  }

  C10_ALWAYS_INLINE void learn(int64_t i, Value& parameter, Value& update) const {
    Bits numbers;
    number(i, numbers);
    body_.learn(place(i), numbers, key_, parameter, update);
  }
  C10_ALWAYS_INLINE void move(int64_t i) const {
    Bits numbers;
    number(i, numbers);
    body_.move(place(i), numbers, key_);
  }

 private:
  using Place = typename Body::Place;
  using Bits = typename Lanes::Bits;
  using Moment = typename Place::MomentLanes::Stored;

  C10_ALWAYS_INLINE Place place(int64_t i) const {
    return {base_.parameter + i,
            base_.gradient + i,
            {base_.moments[0] + i, base_.moments[1] + i},
            base_.has_low_half_or_copy ? base_.low_half_or_copy + i : nullptr,
            base_.has_low_half_or_copy};
  }
  C10_ALWAYS_INLINE void number(int64_t i, Bits& numbers) const {
    numbers = lane_numbers_ + (first_ + static_cast<uint32_t>(i));
  }

  Body body_;
  Place base_;
  uint32_t first_;
  Bits lane_numbers_;
  RandomKey key_;
};

/// Running sums of both norms, sixteen each.
template <class Lanes>
struct LambSums {
  SquareSums<Lanes> parameters;
  SquareSums<Lanes> updates;

  /// Adds sixteen elements, from the i-th on.
  template <class Walk>
  C10_ALWAYS_INLINE void add_block(const Walk& walk, int64_t i) {
    add_loads(walk, i,
              std::make_index_sequence<static_cast<std::size_t>(kSquareSums / Lanes::kWidth)>{});
  }

 private:
  template <class Walk, std::size_t... kLoads>
  C10_ALWAYS_INLINE void add_loads(const Walk& walk, int64_t i, std::index_sequence<kLoads...>) {
    (add_load<kLoads>(walk, i + static_cast<int64_t>(kLoads) * Lanes::kWidth), ...);
  }
  template <std::size_t kLoad, class Walk>
  C10_ALWAYS_INLINE void add_load(const Walk& walk, int64_t i) {
    typename Lanes::Value parameter;
    typename Lanes::Value update;
    walk.learn(i, parameter, update);
    parameters.template add<kLoad>(parameter);
    updates.template add<kLoad>(update);
  }
};

C10_ALWAYS_INLINE double sum_of_sums(double (&sums)[kSquareSums]) {
  for (int64_t step = kSquareSums / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

/// The first pass: writes moments, and sums the norms.
template <class Parameter, class Weights, class Lanes>
struct LambMomentsKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span, const StepNumbers& numbers,
                                    const StepUse& use, LambNorms& norms) {
    using Gradient = StepValue<Parameter>;
    const auto coefficients = numbers.as<LambCoefficients>();
    const LambWalk<Parameter, Gradient, Weights, Lanes> many(span, coefficients, use);
    LambSums<Lanes> sums;
    int64_t i = 0;
    for (; i + kSquareSums <= span.count; i += kSquareSums) sums.add_block(many, i);
    double parameters[kSquareSums];
    double updates[kSquareSums];
    unpack(sums.parameters, parameters);
    unpack(sums.updates, updates);
    const LambWalk<Parameter, Gradient, Weights, ScalarLanes<Parameter>> one(span, coefficients,
                                                                             use);
    for (int64_t sum = 0; i < span.count; ++i, ++sum) {
      typename ScalarLanes<Parameter>::Value parameter;
      typename ScalarLanes<Parameter>::Value update;
      one.learn(i, parameter, update);
      add_square(parameter, parameters[sum]);
      add_square(update, updates[sum]);
    }
    norms.parameter = sum_of_sums(parameters);
    norms.update = sum_of_sums(updates);
  }
};

/// The second pass: writes the parameter. It does not read the gradient.
template <class Parameter, class Weights, class Lanes>
struct LambParameterKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span, const StepNumbers& numbers,
                                    const StepUse& use) {
    using Gradient = StepValue<Parameter>;
    const auto coefficients = numbers.as<LambCoefficients>();
    const LambWalk<Parameter, Gradient, Weights, Lanes> many(span, coefficients, use);
    int64_t i = 0;
    for (; i + Lanes::kWidth <= span.count; i += Lanes::kWidth) many.move(i);
    const LambWalk<Parameter, Gradient, Weights, ScalarLanes<Parameter>> one(span, coefficients,
                                                                             use);
    for (; i < span.count; ++i) one.move(i);
  }
};

/// Returns LAMB's loops. A template, so that a unit which does not call it instantiates none.
template <std::same_as<optim::WeightStorage> Storage>
StepLoop lamb_loop(Storage storage, at::ScalarType kept, CpuIsa isa) {
  return for_kept_weights(storage, kept, [isa]<class Parameter, class Weights>() -> StepLoop {
    return {cpu_kernel<LambParameterKernel, Parameter, Weights>(isa),
            cpu_kernel<LambMomentsKernel, Parameter, Weights>(isa)};
  });
}

/// Returns whether a task takes one pass: it is one piece, which stays in the cache, or has no
/// trust ratio. A staged task takes two: its pieces come in parts.
inline bool needs_one_pass(const StepTask& task) {
  const bool adapts = task.coefficients.as<LambCoefficients>().adapts;
  return !task.is_staged && (!adapts || task.span.count <= kStepPiece);
}

inline void move_piece(const StepTask& task, const StepSpan& part, const LambNorms& norms) {
  auto coefficients = task.coefficients.as<LambCoefficients>();
  coefficients.adapt(norms);
  task.loop.step(part, coefficients, task.use);
}

/// Runs LAMB's tasks, in one pass over their memory if possible and otherwise in two. Each task is
/// cut at every kStepPiece of its own elements and its norms are summed piece by piece, so they do
/// not depend on other tasks or the number of threads.
inline void run_lamb_cpu(const std::vector<StepTask>& tasks) {
  WorkChunks pieces(kStepPiece, kStepPiece);
  WorkChunks left(kStepPiece, kStepPiece);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    pieces.add(i, tasks[i].span.count);
    if (!needs_one_pass(tasks[i])) left.add(i, tasks[i].span.count);
  }
  std::vector<LambNorms> of_piece(pieces.size());
  pieces.for_each([&](std::size_t i, const WorkChunks::Chunk& piece) {
    const StepTask& task = tasks[piece.item];
    for_widened<kStepPiece, StepPass::learn>(
        task, piece.begin, piece.count, [&](const StepSpan& part) {
          LambNorms of_part;
          task.loop.learn(part, task.coefficients, task.use, of_part);
          of_piece[i].merge(of_part);
          if (needs_one_pass(task)) move_piece(task, part, of_piece[i]);
        });
  });
  std::vector<LambNorms> of_task(tasks.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    for (int64_t begin = 0; begin < tasks[i].span.count; begin += kStepPiece) {
      of_task[i].merge(of_piece[next++]);
    }
  }
  left.for_each([&](std::size_t, const WorkChunks::Chunk& piece) {
    const StepTask& task = tasks[piece.item];
    for_widened<kStepPiece, StepPass::move>(
        task, piece.begin, piece.count,
        [&](const StepSpan& part) { move_piece(task, part, of_task[piece.item]); });
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
