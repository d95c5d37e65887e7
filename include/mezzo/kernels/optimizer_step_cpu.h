#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_kernel.h>
#include <mezzo/kernels/parallel_spans.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Bytes of an element of each stream that has one of its own.
struct StepElementSizes {
  int64_t parameter;
  int64_t gradient;
  int64_t moment;
  int64_t average;
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

/// Where a piece of work begins; it ends where the next one begins.
struct StepPiece {
  std::size_t task;
  int64_t offset;
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
                advanced(span.average, sizes.average),
                span.first + begin};
  for (int k = 0; k < kMaxMoments; ++k) part.moments[k] = advanced(span.moments[k], sizes.moment);
  return part;
}

/// Cuts tasks into pieces of `kStepPiece` elements; small tasks share one.
template <class Task>
std::vector<StepPiece> step_pieces(const std::vector<Task>& tasks) {
  std::vector<StepPiece> pieces;
  int64_t room = 0;
  for (std::size_t task = 0; task < tasks.size(); ++task) {
    for (int64_t begin = 0; begin < tasks[task].span.count;) {
      if (room == 0) {
        pieces.push_back({task, begin});
        room = kStepPiece;
      }
      const int64_t count = std::min(room, tasks[task].span.count - begin);
      begin += count;
      room -= count;
    }
  }
  return pieces;
}

/// Calls `work(i)` once for each i below `count` on libtorch's threads, each of which takes the
/// next as soon as it is free: cores are not equally fast.
template <class Work>
void parallel_dynamic(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  std::vector<int> workers(
      static_cast<std::size_t>(std::min<int64_t>(count, at::get_num_threads())));
  parallel_for_each(workers, [&](int&) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  });
}

/// Calls `work(task number, the part of its span)` for all of `tasks`, piece by piece.
template <class Task, class Work>
void for_each_part(const std::vector<Task>& tasks, const Work& work) {
  const std::vector<StepPiece> pieces = step_pieces(tasks);
  parallel_dynamic(static_cast<int64_t>(pieces.size()), [&](int64_t index) {
    int64_t left = kStepPiece;
    const StepPiece& piece = pieces[static_cast<std::size_t>(index)];
    int64_t begin = piece.offset;
    for (std::size_t i = piece.task; left > 0 && i < tasks.size(); ++i) {
      const Task& task = tasks[i];
      const int64_t count = std::min(left, task.span.count - begin);
      work(i, part_of(task.span, begin, count, task.sizes));
      left -= count;
      begin = 0;
    }
  });
}

/// All tasks of a step, in one pass over their memory.
template <class Coefficients>
void run_step_cpu(const std::vector<StepTask<StepFunction<Coefficients>, Coefficients>>& tasks) {
  for_each_part(tasks, [&](std::size_t i, const StepSpan& part) {
    tasks[i].run(part, tasks[i].coefficients, tasks[i].use);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
