/// \file
/// Gradient accumulation over a data loader: micro-batches that know which is the last of its group
/// and how many the group has.
///
///     for (auto& batch : mezzo::accumulate(*loader, 4)) {
///       auto loss = mezzo::autocast([&] { return criterion(model->forward(batch.data), batch.target); });
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

/// A batch of the loader's, with its place among the micro-batches of one step.
template <class Batch>
class MicroBatch : public Batch {
 public:
  MicroBatch(const Batch& batch, std::int64_t index, std::int64_t count)
      : Batch(batch), index_(index), count_(count) {}

  /// Which of its group it is, from 0.
  std::int64_t index() const noexcept { return index_; }
  /// How many micro-batches the group has.
  std::int64_t count() const noexcept { return count_; }
  /// Whether the step follows.
  bool is_last() const noexcept { return index_ + 1 == count_; }
  /// Returns loss / count(): the losses of a group, each a mean over its micro-batch, add up to the
  /// mean of them.
  at::Tensor divide(const at::Tensor& loss) const { return count_ == 1 ? loss : loss / count_; }

 private:
  std::int64_t index_, count_;
};

/// What `accumulate` returns: a range that is walked through once.
template <class Loader>
class Accumulation {
  using LoaderIterator = decltype(std::declval<Loader&>().begin());
  using LoaderEnd = decltype(std::declval<Loader&>().end());
  using Batch = std::remove_cvref_t<decltype(*std::declval<LoaderIterator&>())>;
  static_assert(std::is_class_v<Batch> && !std::is_final_v<Batch>,
                "mezzo::accumulate: the loader's batches should be of a class that can be derived "
                "from, as torch::data::Example is; put others into a struct");

 public:
  Accumulation(Loader& loader, std::int64_t micro_batches)
      : loader_(&loader), micro_batches_(micro_batches) {
    TORCH_CHECK(micro_batches > 0, "accumulate: micro_batches is ", micro_batches,
                "; it should be at least 1");
  }

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = MicroBatch<Batch>;
    using difference_type = std::ptrdiff_t;
    using pointer = value_type*;
    using reference = value_type&;

    Iterator(LoaderIterator next, LoaderEnd end, std::int64_t micro_batches)
        : next_(std::move(next)), end_(std::move(end)), micro_batches_(micro_batches) {
      read_group();
    }

    reference operator*() { return *now_; }
    pointer operator->() { return &*now_; }
    Iterator& operator++() {
      if (now_->is_last()) {
        read_group();
      } else {
        set(now_->index() + 1);
      }
      return *this;
    }
    void operator++(int) { ++*this; }
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

  Iterator begin() { return {loader_->begin(), loader_->end(), micro_batches_}; }
  std::default_sentinel_t end() const noexcept { return {}; }

 private:
  Loader* loader_;
  std::int64_t micro_batches_;
};

/// Returns the batches of `loader` in groups of `micro_batches`, each a MicroBatch, which is a
/// batch of the loader's with `is_last()` and `divide(loss)` beside its own members. The last group
/// of an epoch may have fewer, and its losses are divided by as many as it has.
///
/// A group is read at once: it takes the memory of its batches, where the loader made them. So save
/// the place in the data (a checkpoint) after a step, when all that was read has been trained on.
/// Micro-batches count alike, whatever their size: of a smaller last one each sample weighs more.
///
/// \param loader  a torch::data loader, or a range of batches; it must outlive the loop
/// \throws c10::Error unless micro_batches is positive
template <class Loader>
Accumulation<Loader> accumulate(Loader& loader, std::int64_t micro_batches) {
  return {loader, micro_batches};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
