#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/optimizer_step_body.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/work_chunks.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

// The CPU's loop of every optimizer whose update looks at one element at a time: reads gradient,
// parameter and moments once, and writes parameter and moments once; and the work of a step, cut
// into pieces for libtorch's threads.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Parameter, class Gradient, class Rule, class Weights, class Lanes>
C10_ALWAYS_INLINE int64_t step_lanes(const StepSpan& span, int64_t begin, int64_t end,
                                     const typename Rule::Coefficients& coefficients,
                                     const StepUse& use, const RandomKey& key) {
  using Body = StepBody<Parameter, Gradient, Rule, Weights, Lanes>;
  using Streams = typename Body::Place;
  using Bits = typename Lanes::Bits;

  const Body step(coefficients, use);
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
  for (; i + Lanes::kWidth <= end; i += Lanes::kWidth) {
    Streams place = base;
    place.parameter += i;
    place.gradient += i;
    for (unsigned k = 0; k != Rule::kMoments; ++k) place.moments[k] += i;
    if (base.has_low_half_or_copy) place.low_half_or_copy += i;
    const Bits numbers = lane_numbers + static_cast<uint32_t>(span.first + i);
    step(place, numbers, key);
  }
  return i;
}

template <class Parameter, class Gradient, class Rule, class Weights, class Lanes>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span,
                                    const typename Rule::Coefficients& coefficients,
                                    const StepUse& use) {
    using Plain = ScalarLanes<Parameter>;
    constexpr bool kIsStochastic = std::is_same_v<Weights, StochasticWeights>;
    int64_t begin = 0;
    while (begin < span.count) {
      int64_t end = span.count;
      RandomKey key;
      if constexpr (kIsStochastic) {  // one key for 2^32 elements
        const int64_t block = (span.first + begin) >> 32;
        end = std::min(end, ((block + 1) << 32) - span.first);
        key = random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(block));
      }
      begin = step_lanes<Parameter, Gradient, Rule, Weights, Lanes>(span, begin, end, coefficients,
                                                                    use, key);
      begin = step_lanes<Parameter, Gradient, Rule, Weights, Plain>(span, begin, end, coefficients,
                                                                    use, key);
    }
  }
};

template <class Coefficients>
using StepFunction = void (*)(const StepSpan&, const Coefficients&, const StepUse&);

/// `make` of a parameter's types: its dtype, all of whose streams have it; its gradient's, which is
/// the same or a narrower one; and how it is kept. `kept` is the dtype of what is trained, float
/// where that is a master. Null where there is no loop.
template <class Make>
auto for_step_types(optim::WeightStorage storage, at::ScalarType kept, at::ScalarType gradient,
                    const Make& make)
    -> decltype(make.template operator()<float, float, PlainWeights<float>>()) {
  using c10::BFloat16;
  using c10::Half;
  using optim::WeightStorage;
  const auto plain = [&]<class Parameter, class Gradient>(Parameter, Gradient) {
    return make.template operator()<Parameter, Gradient, PlainWeights<Parameter>>();
  };
  if (storage == WeightStorage::split_master || storage == WeightStorage::stochastic) {
    if (gradient != at::kBFloat16) return {};
    return storage == WeightStorage::split_master
               ? make.template operator()<BFloat16, BFloat16, SplitWeights>()
               : make.template operator()<BFloat16, BFloat16, StochasticWeights>();
  }
  if (kept == at::kFloat) {
    if (gradient == at::kFloat) return plain(float{}, float{});
    if (gradient == at::kBFloat16) return plain(float{}, BFloat16{});
    if (gradient == at::kHalf) return plain(float{}, Half{});
  }
  if (kept == at::kDouble) {
    if (gradient == at::kDouble) return plain(double{}, double{});
    if (gradient == at::kFloat) return plain(double{}, float{});
  }
  if (kept == at::kBFloat16 && gradient == at::kBFloat16) return plain(BFloat16{}, BFloat16{});
  if (kept == at::kHalf && gradient == at::kHalf) return plain(Half{}, Half{});
  return {};
}

/// A Rule's loop for a parameter's types; null where there is none.
template <class Rule>
StepFunction<typename Rule::Coefficients> step_function(optim::WeightStorage storage,
                                                        at::ScalarType kept,
                                                        at::ScalarType gradient, CpuIsa isa) {
  return for_step_types(
      storage, kept, gradient, [isa]<class Parameter, class Gradient, class Weights>() {
        return cpu_kernel<OptimizerStepKernel, Parameter, Gradient, Rule, Weights>(isa);
      });
}

/// Bytes of an element of each stream that has one of its own.
struct StepElementSizes {
  int64_t parameter;
  int64_t gradient;
  int64_t moment;
};

/// One parameter's part of a step. Loop is called with the other three.
template <class Loop, class Coefficients>
struct StepTask {
  Loop run;
  StepSpan span;
  StepElementSizes sizes;
  Coefficients coefficients;
  StepUse use;
};

/// What one thread takes at a time: 16 bytes an element and more, so that this much lies in a
/// second-level cache, and few enough pieces that taking them costs nothing.
inline constexpr int64_t kStepPiece = 16384;

inline StepSpan part_of(const StepSpan& span, int64_t begin, int64_t count,
                        const StepElementSizes& sizes) {
  const auto advanced = [begin](void* pointer, int64_t bytes) -> void* {
    return pointer == nullptr ? nullptr : static_cast<char*>(pointer) + begin * bytes;
  };
  StepSpan part{advanced(span.parameter, sizes.parameter),
                advanced(span.gradient, sizes.gradient),
                {},
                count,
                advanced(span.low_half_or_copy, int64_t{sizeof(uint16_t)}),
                span.first + begin};
  for (int k = 0; k < kMaxMoments; ++k) part.moments[k] = advanced(span.moments[k], sizes.moment);
  return part;
}

/// All tasks of a step, in one pass over their memory. Small ones share a batch.
template <class Coefficients>
void run_step_cpu(const std::vector<StepTask<StepFunction<Coefficients>, Coefficients>>& tasks) {
  WorkChunks pieces(kStepPiece, kStepPiece);
  for (std::size_t i = 0; i < tasks.size(); ++i) pieces.add(i, tasks[i].span.count);
  pieces.for_each([&](std::size_t i) {
    const auto& task = tasks[pieces[i].item];
    task.run(part_of(task.span, pieces[i].begin, pieces[i].count, task.sizes), task.coefficients,
             task.use);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
