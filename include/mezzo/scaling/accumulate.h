/// \file
/// Gradient accumulation over a data loader: micro-batches that know which is the last of its group
/// and how many the group has.
///
///     for (auto& batch : mezzo::accumulate(*loader, 4)) {
///       auto loss = mezzo::autocast(setting, [&] { return criterion(net(batch.data), batch.target); });
///       scaler.scale(batch.divide(loss)).backward();
///       if (!batch.is_last()) continue;
///       scaler.step(optimizer);
///       scaler.update();
///       optimizer.zero_grad();
///     }
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
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
  at::Tensor divide(const at::Tensor& loss) const { return count_ == 1 ? loss : loss / count_; }

 private:
  std::int64_t index_, count_;
};

/// The range that `accumulate` returns. It can be walked through once.
template <class Loader>
class Accumulation {
  using LoaderIterator = decltype(std::declval<Loader&>().begin());
  using LoaderEnd = decltype(std::declval<Loader&>().end());
  using Batch = std::remove_cvref_t<decltype(*std::declval<LoaderIterator&>())>;
  static_assert(std::is_class_v<Batch> && !std::is_final_v<Batch>,
                "mezzo::accumulate: the loader's batches should be of a class that can be derived "
                "from, as torch::data::Example is; put others into a struct");

 public:
  /// Refers to `loader`, which must outlive it. \throws c10::Error unless micro_batches is positive
  Accumulation(Loader& loader, std::int64_t micro_batches)
      : loader_(&loader), micro_batches_(micro_batches) {
    TORCH_CHECK(micro_batches > 0, "accumulate: micro_batches is ", micro_batches,
                "; it should be at least 1");
  }

  /// An input iterator over MicroBatch. It holds the batches of one group.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;  ///< one pass
    using value_type = MicroBatch<Batch>;               ///< a batch and its place in the group
    using difference_type = std::ptrdiff_t;             ///< as the standard demands; not used
    using pointer = value_type*;                        ///< valid until the next increment
    using reference = value_type&;                      ///< valid until the next increment

    /// Reads the first group of the batches from `next` to `end`.
    Iterator(LoaderIterator next, LoaderEnd end, std::int64_t micro_batches)
        : next_(std::move(next)), end_(std::move(end)), micro_batches_(micro_batches) {
      read_group();
    }

    /// Returns the present micro-batch.
    reference operator*() { return *now_; }
    /// Returns the address of the present micro-batch.
    pointer operator->() { return &*now_; }
    /// Goes to the next micro-batch. After the last of a group it reads the next group.
    Iterator& operator++() {
      if (now_->is_last()) {
        read_group();
      } else {
        set(now_->index() + 1);
      }
      return *this;
    }
    /// Goes to the next micro-batch, and returns nothing: the range is walked through once.
    void operator++(int) { ++*this; }
    /// Returns whether all batches have been visited.
    bool operator==(std::default_sentinel_t) const noexcept { return !now_; }

   private:
    /// Reads a whole group, so that the first of an incomplete one knows its count.
    void read_group() {
      group_.clear();
      now_.reset();
      while (static_cast<std::int64_t>(group_.size()) < micro_batches_ && next_ != end_) {
        group_.push_back(*next_);
        ++next_;
      }
      if (!group_.empty()) set(0);
    }
    void set(std::int64_t index) {
      now_.emplace(group_[static_cast<std::size_t>(index)], index,
                   static_cast<std::int64_t>(group_.size()));
    }

    LoaderIterator next_;
    LoaderEnd end_;
    std::int64_t micro_batches_;
    std::vector<Batch> group_;
    std::optional<MicroBatch<Batch>> now_;
  };

  /// Starts to walk through the loader, and reads the first group.
  Iterator begin() { return {loader_->begin(), loader_->end(), micro_batches_}; }
  /// Returns the end of the range.
  std::default_sentinel_t end() const noexcept { return {}; }

 private:
  Loader* loader_;
  std::int64_t micro_batches_;
};

/// Returns the batches of `loader` in groups of `micro_batches`, each a MicroBatch, which is a
/// batch of the loader's with `is_last()` and `divide(loss)` beside its own members. The last group
/// of an epoch may have fewer, and its losses are divided by as many as it has.
///
/// A group is read at once: it takes the memory of its batches, where the loader made them. Save
/// the position in the data (a checkpoint) after a step, when all batches that were read have been
/// trained on. All micro-batches have the same weight, so the samples of a smaller one weigh more.
///
/// \param loader  a torch::data loader, or a range of batches; it must outlive the loop
/// \throws c10::Error unless micro_batches is positive
template <class Loader>
Accumulation<Loader> accumulate(Loader& loader, std::int64_t micro_batches) {
  return {loader, micro_batches};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
