/// \file
/// GradientAccumulation: accumulation windows for trainers that are called back with a batch.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Position of a micro-batch in its accumulation window, the micro-batches of one step.
class MicroBatchPosition {
 public:
  /// \param index  from 0 to count - 1
  MicroBatchPosition(std::int64_t index, std::int64_t count) : index_(index), count_(count) {}

  /// Returns the position of this micro-batch in its window, from 0.
  std::int64_t index() const noexcept { return index_; }
  /// Returns the number of micro-batches in the window.
  std::int64_t count() const noexcept { return count_; }
  /// Returns whether this is the last micro-batch of the window, after which the optimizer steps.
  bool is_last() const noexcept { return index_ >= 0 && index_ + 1 == count_; }
  /// Returns loss / count(): the sum over the window is then the mean of its losses.
  /// \throws c10::Error before the first GradientAccumulation::next
  at::Tensor normalize_loss(const at::Tensor& loss) const {
    TORCH_CHECK(index_ >= 0,
                "GradientAccumulation: no micro-batch has begun; call next() at the beginning of "
                "each micro-batch");
    return count_ == 1 ? loss : loss / count_;
  }

 protected:
  std::int64_t index_;  ///< see index(); -1 before a window
  std::int64_t count_;  ///< see count()
};

/// Counts the micro-batches of a trainer that is called back with each batch; a loop over a loader
/// uses micro_batches. docs/guide.md has the callback:
///
///     accumulation.next();
///     scaler.scale(accumulation.normalize_loss(loss)).backward();
///     if (accumulation.is_last()) ...                   // step, update, zero_grad
///
/// With `batches_per_epoch` a window ends with the epoch, and the losses of a smaller last window
/// are divided by its size. Without it, windows continue in the next epoch. In a
/// DistributedDataParallel run forward and backward under `no_sync()` unless `is_last()`.
class GradientAccumulation : public MicroBatchPosition {
 public:
  /// \param batches_per_epoch  0 if unknown
  /// \throws c10::Error unless gradient_accumulation_steps is positive, and for a negative
  ///   batches_per_epoch
  explicit GradientAccumulation(std::int64_t gradient_accumulation_steps,
                                std::int64_t batches_per_epoch = 0)
      : MicroBatchPosition(-1, 0),
        gradient_accumulation_steps_(gradient_accumulation_steps),
        batches_per_epoch_(batches_per_epoch) {
    TORCH_CHECK(gradient_accumulation_steps > 0, "gradient_accumulation_steps is ",
                gradient_accumulation_steps, "; it should be at least 1");
    TORCH_CHECK(batches_per_epoch >= 0, "batches_per_epoch is ", batches_per_epoch,
                "; it should be at least 0, and 0 if it is unknown");
  }

  /// Begins the next micro-batch. Call it first in each callback. Returns its position.
  const MicroBatchPosition& next() {
    if (++index_ < count_) return *this;
    count_ = gradient_accumulation_steps_;
    if (batches_per_epoch_ > 0) {
      count_ = std::min(count_, batches_per_epoch_ - batches_done_);
      batches_done_ = (batches_done_ + count_) % batches_per_epoch_;
    }
    index_ = 0;
    return *this;
  }

  /// Ends the window without a step, as after an exception or a load, where the gradients are
  /// cleared: the next micro-batch begins a window.
  /// \param batches_done  batches of the epoch before it
  /// \throws c10::Error if batches_done is negative or not less than batches_per_epoch
  void reset(std::int64_t batches_done = 0) {
    TORCH_CHECK(batches_done >= 0 && (batches_done == 0 || batches_done < batches_per_epoch_),
                "batches_done is ", batches_done,
                "; it should be at least 0 and less than batches_per_epoch, ", batches_per_epoch_);
    batches_done_ = batches_done;
    index_ = -1;
    count_ = 0;
  }

 private:
  std::int64_t gradient_accumulation_steps_, batches_per_epoch_;
  std::int64_t batches_done_ = 0;  // of the epoch, including the current window
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
