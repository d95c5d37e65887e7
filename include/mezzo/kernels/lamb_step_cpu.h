#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/lamb_kernel.h>
#include <mezzo/kernels/optimizer_step_cpu.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using LambTask = StepTask<LambLoop, LambCoefficients>;

/// Tasks cut every kStepPiece of their own elements, so that a norm, summed piece by piece, is the
/// same number whatever the other tasks and the number of threads. (step_pieces cuts where the
/// tasks before leave off.)
class LambPieces {
 public:
  struct Piece {
    std::size_t task;
    int64_t begin;
    int64_t count;
  };

  /// Of those tasks for which `takes_part` says so.
  template <class TakesPart>
  LambPieces(const std::vector<LambTask>& tasks, const TakesPart& takes_part) {
    int64_t room = 0;
    for (std::size_t task = 0; task < tasks.size(); ++task) {
      if (!takes_part(tasks[task])) continue;
      const int64_t total = tasks[task].span.count;
      for (int64_t begin = 0; begin < total; begin += kStepPiece) {
        const int64_t count = std::min(kStepPiece, total - begin);
        if (room <= 0) {
          first_of_batch_.push_back(pieces_.size());
          room = kStepPiece;
        }
        pieces_.push_back({task, begin, count});
        room -= count + kPieceCost;
      }
    }
    first_of_batch_.push_back(pieces_.size());
  }

  std::size_t size() const noexcept { return pieces_.size(); }
  const Piece& operator[](std::size_t i) const { return pieces_[i]; }

  /// Calls `work(i)` once for every piece on libtorch's threads, which take batches of small ones.
  template <class Work>
  void for_each(const Work& work) const {
    parallel_dynamic(static_cast<int64_t>(first_of_batch_.size()) - 1, [&](int64_t index) {
      const auto batch = static_cast<std::size_t>(index);
      for (std::size_t i = first_of_batch_[batch]; i < first_of_batch_[batch + 1]; ++i) work(i);
    });
  }

 private:
  static constexpr int64_t kPieceCost = 128;  // two calls, in elements

  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_of_batch_;  // and the number of all pieces
};

/// Whether a task is one piece, which is moved while it lies in the cache, or wants no norm.
inline bool needs_one_pass(const LambTask& task) {
  return !task.coefficients.adapts || task.span.count <= kStepPiece;
}

inline void move_piece(const LambTask& task, const StepSpan& part, const LambNorms& norms) {
  LambCoefficients coefficients = task.coefficients;
  coefficients.adapt(norms);
  task.run.move(part, coefficients, task.use);
}

/// All tasks of a step: in one pass over their memory where that will do, in two elsewhere.
inline void run_step_cpu(const std::vector<LambTask>& tasks) {
  const auto part_of_piece = [&](const LambPieces::Piece& piece) {
    const LambTask& task = tasks[piece.task];
    return part_of(task.span, piece.begin, piece.count, task.sizes);
  };
  const LambPieces pieces(tasks, [](const LambTask&) { return true; });
  std::vector<LambNorms> of_piece(pieces.size());
  pieces.for_each([&](std::size_t i) {
    const LambTask& task = tasks[pieces[i].task];
    const StepSpan part = part_of_piece(pieces[i]);
    task.run.learn(part, task.coefficients, task.use, of_piece[i]);
    if (needs_one_pass(task)) move_piece(task, part, of_piece[i]);
  });
  std::vector<LambNorms> of_task(tasks.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) of_task[pieces[i].task].merge(of_piece[i]);
  const LambPieces left(tasks, [](const LambTask& task) { return !needs_one_pass(task); });
  left.for_each([&](std::size_t i) {
    const std::size_t task = left[i].task;
    move_piece(tasks[task], part_of_piece(left[i]), of_task[task]);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
