/// \file
/// Gradient accumulation over a data loader: micro-batches that know which is the last of its group
/// and how many the group has.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A batch of the loader, with its place among the micro-batches of one step.
template <class Batch>
class MicroBatch : public Batch {
 public:
  /// Copies the batch: number `index`, from 0, of `count`.
  MicroBatch(const Batch& batch, std::int64_t index, std::int64_t count)
      : Batch(batch), index_(index), count_(count) {}

  /// Returns the number of this micro-batch in its group, from 0.
  std::int64_t index() const noexcept { return index_; }
  /// Returns the number of micro-batches in the group.
  std::int64_t count() const noexcept { return count_; }
  /// Returns whether this is the last of its group, so that the step follows.
  bool is_last() const noexcept { return index_ + 1 == count_; }
  /// Returns loss / count(): the losses of a group, each a mean over its micro-batch, add up to the
  /// mean of them.
  at::Tensor normalize_loss(const at::Tensor& loss) const {
    return count_ == 1 ? loss : loss / count_;
  }

 private:
  std::int64_t index_, count_;
};

namespace detail {

/// Visits the MicroBatches of one group, which it holds, after another.
template <class Next, class End>
class MicroBatchIterator {
  using Batch = std::remove_cvref_t<decltype(*std::declval<Next&>())>;
  static_assert(
      std::is_class_v<Batch> && !std::is_final_v<Batch>,
      "mezzo::micro_batches: the loader's batches should be of a class that can be derived "
      "from, as torch::data::Example is; put others into a struct");

 public:
  using difference_type = std::ptrdiff_t;

  /// Reads the first group of the batches from `next` to `end`.
  MicroBatchIterator(Next next, End end, std::int64_t gradient_accumulation_steps)
      : next_(std::move(next)),
        end_(std::move(end)),
        gradient_accumulation_steps_(gradient_accumulation_steps) {
    read_window();
  }
  // Not copied: a copy would keep the batches of its group.
  MicroBatchIterator(MicroBatchIterator&&) noexcept = default;
  MicroBatchIterator& operator=(MicroBatchIterator&&) noexcept = default;
  MicroBatch<Batch>& operator*() { return window_[position_]; }
  /// Goes to the next micro-batch. After the last of a group it reads the next group.
  MicroBatchIterator& operator++() {
    if (++position_ == window_.size()) read_window();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const noexcept { return window_.empty(); }

 private:
  /// Reads a whole group, so that the first of an incomplete one knows its count.
  void read_window() {
    window_.clear();
    position_ = 0;
    std::vector<Batch> batches;
    while (std::ssize(batches) < gradient_accumulation_steps_) {
      if (std::exchange(is_read_, false)) ++next_;  // draws a batch, so only when one is needed
      if (next_ == end_) break;
      batches.push_back(*next_);
      is_read_ = true;
    }
    for (const Batch& batch : batches) {
      window_.emplace_back(batch, std::ssize(window_), std::ssize(batches));
    }
  }

  Next next_;
  End end_;
  std::int64_t gradient_accumulation_steps_;
  std::vector<MicroBatch<Batch>> window_;
  std::size_t position_ = 0;
  bool is_read_ = false;  // the batch at next_
};

}  // namespace detail

/// Returns the batches of `loader` in groups of `gradient_accumulation_steps`, each a MicroBatch,
/// which is a batch of the loader's with `is_last()` and `normalize_loss(loss)` beside its own
/// members. The last group of an epoch may have fewer, and its losses are divided by as many as it
/// has. docs/guide.md has the loop.
///
/// A group is read at once: it takes the memory of its batches, where the loader made them. Save
/// the position in the data (a checkpoint) after a step, when all batches that were read have been
/// trained on. All micro-batches have the same weight, so the samples of a smaller one weigh more.
/// Copy the batches of a loader that reuses the tensors of the previous batch: otherwise a group
/// holds its last batch several times.
///
/// \param loader  a torch::data loader, or a range of batches; it must outlive the loop
/// \return a range that can be walked through once, for a range-based for loop
/// \throws c10::Error unless gradient_accumulation_steps is positive
template <class Loader>
auto micro_batches(Loader& loader, std::int64_t gradient_accumulation_steps) {
  TORCH_CHECK(gradient_accumulation_steps > 0, "micro_batches: gradient_accumulation_steps is ",
              gradient_accumulation_steps, "; it should be at least 1");
  return std::ranges::subrange(
      detail::MicroBatchIterator(loader.begin(), loader.end(), gradient_accumulation_steps),
      std::default_sentinel);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
