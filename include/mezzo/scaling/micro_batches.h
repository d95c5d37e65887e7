/// \file
/// micro_batches: gradient accumulation over a data loader.
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

/// A batch of a data loader with its position in an accumulation window, the micro-batches of one
/// step.
template <class Batch>
class MicroBatch : public Batch {
 public:
  /// Copies the batch. \param index  position in the window, from 0 to count - 1
  MicroBatch(const Batch& batch, std::int64_t index, std::int64_t count)
      : Batch(batch), index_(index), count_(count) {}

  /// Returns the position of this micro-batch in its window, from 0.
  std::int64_t index() const noexcept { return index_; }
  /// Returns the number of micro-batches in the window.
  std::int64_t count() const noexcept { return count_; }
  /// Returns whether this is the last micro-batch of the window, after which the optimizer steps.
  bool is_last() const noexcept { return index_ + 1 == count_; }
  /// Returns loss / count(): the sum over the window is then the mean of its losses.
  at::Tensor normalize_loss(const at::Tensor& loss) const {
    return count_ == 1 ? loss : loss / count_;
  }

 private:
  std::int64_t index_, count_;
};

namespace detail {

/// Input iterator over MicroBatches. Holds the batches of the current window.
template <class Next, class End>
class MicroBatchIterator {
  using Batch = std::remove_cvref_t<decltype(*std::declval<Next&>())>;
  static_assert(std::is_class_v<Batch> && !std::is_final_v<Batch>,
                "mezzo::micro_batches: the loader's batch type must be a class that can be a base "
                "class, such as torch::data::Example; wrap other types in a struct");

 public:
  using difference_type = std::ptrdiff_t;

  /// Reads the first window of the batches from `next` to `end`.
  MicroBatchIterator(Next next, End end, std::int64_t gradient_accumulation_steps)
      : next_(std::move(next)),
        end_(std::move(end)),
        gradient_accumulation_steps_(gradient_accumulation_steps) {
    read_window();
  }
  // Move-only: a copy would keep the batches of its window alive.
  MicroBatchIterator(MicroBatchIterator&&) noexcept = default;
  MicroBatchIterator& operator=(MicroBatchIterator&&) noexcept = default;
  MicroBatch<Batch>& operator*() { return window_[position_]; }
  MicroBatchIterator& operator++() {
    if (++position_ == window_.size()) read_window();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const noexcept { return window_.empty(); }

 private:
  /// Reads a whole window, since the last window of an epoch may be smaller.
  void read_window() {
    window_.clear();
    position_ = 0;
    std::vector<Batch> batches;
    while (std::ssize(batches) < gradient_accumulation_steps_) {
      if (std::exchange(is_read_, false)) ++next_;  // loads a batch, so not before it is needed
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
  bool is_read_ = false;  // whether the window has the batch at next_
};

}  // namespace detail

/// Returns the batches of `loader` in accumulation windows of `gradient_accumulation_steps`
/// micro-batches. A MicroBatch is a batch of the loader with `is_last()` and
/// `normalize_loss(loss)`. The last window of an epoch may be smaller; its losses are divided by
/// its size. docs/guide.md has the loop.
///
/// A window is loaded at once and occupies the memory of its batches. A loader that reuses the
/// tensors of the previous batch must copy them. Save the position in the data (a checkpoint) after
/// a step, when all loaded batches have been trained on. Samples of a smaller micro-batch have a
/// larger weight in the mean of means.
///
/// \param loader  a torch::data loader, or a range of batches; it must outlive the loop
/// \return a single-pass range for a range-based for loop
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
