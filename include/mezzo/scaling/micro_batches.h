/// \file
/// micro_batches: gradient accumulation over a data loader.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/scaling/gradient_accumulation.h>

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A batch of a data loader with its position in an accumulation window.
template <class Batch>
class MicroBatch : public Batch, public MicroBatchPosition {
 public:
  /// Copies the batch.
  MicroBatch(const Batch& batch, const MicroBatchPosition& position)
      : Batch(batch), MicroBatchPosition(position) {}

  // Hide members of the batch with these names.
  using MicroBatchPosition::count;
  using MicroBatchPosition::index;
  using MicroBatchPosition::is_last;
  using MicroBatchPosition::normalize_loss;
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
    if (batches.empty()) return;
    GradientAccumulation window(std::ssize(batches));
    for (const Batch& batch : batches) window_.emplace_back(batch, window.next());
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
/// its size. docs/guide.md has the loop. A trainer without a loop uses GradientAccumulation.
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
