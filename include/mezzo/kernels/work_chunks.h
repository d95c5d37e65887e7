#pragma once

#include <mezzo/base/version.h>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Runs `work(item)` for each of `items`, on libtorch's own intra-op threads.
///
/// at::parallel_for will not do in a header: it is a template, and runs serially in a caller that
/// is compiled without -fopenmp. TensorIterator's loop over elements lives in libtorch itself; here
/// the items are its elements, seen as bytes that lie sizeof(Item) apart.
template <class Item, class Work>
void parallel_for_each(std::vector<Item>& items, const Work& work) {
  if (items.size() < 2) {
    for (Item& item : items) work(item);
    return;
  }
  const auto count = static_cast<int64_t>(items.size());
  const at::Tensor bytes = at::from_blob(items.data(), at::IntArrayRef(count),
                                         at::IntArrayRef(static_cast<int64_t>(sizeof(Item))),
                                         at::TensorOptions().dtype(at::kByte));
  auto iterator = at::TensorIteratorConfig().add_borrowed_const_input(bytes).build();
  const auto loop = [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
    for (int64_t j = 0; j < outer; ++j) {
      for (int64_t i = 0; i < inner; ++i) {
        work(*reinterpret_cast<Item*>(data[0] + i * strides[0] + j * strides[1]));
      }
    }
  };
  iterator.for_each(loop, /*grain_size=*/1);
}

/// Calls `work(i)` once for each i below `count` on libtorch's threads, each of which takes the
/// next as soon as it is free: cores are not equally fast, and a thread that the system holds up
/// holds up no more than its own.
template <class Work>
void parallel_dynamic(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  std::vector<int> workers(
      static_cast<std::size_t>(std::min<int64_t>(count, at::get_num_threads())));
  parallel_for_each(workers, [&](int&) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  });
}

/// Elements below which a thread of its own costs more than it brings.
inline constexpr int64_t kThreadGrain = 32768;

/// The elements of several tensors, cut into chunks that depend on their sizes alone and not on the
/// number of threads: what is summed chunk by chunk is the same number on any machine. Threads take
/// small chunks in batches.
class WorkChunks {
 public:
  struct Chunk {
    std::size_t item;  ///< the tensor's number, as it was added
    int64_t begin;
    int64_t count;
  };

  /// Chunks of `size` elements, but for an item's last; batches of `batch` elements and more.
  explicit WorkChunks(int64_t size, int64_t batch = kThreadGrain) : size_(size), batch_(batch) {}

  void add(std::size_t item, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += size_) {
      const int64_t own = std::min(size_, count - begin);
      if (room_ <= 0) {
        first_of_batch_.push_back(chunks_.size());
        room_ = batch_;
      }
      chunks_.push_back({item, begin, own});
      room_ -= own + kChunkCost;
    }
  }

  std::size_t size() const noexcept { return chunks_.size(); }
  const Chunk& operator[](std::size_t i) const { return chunks_[i]; }

  /// Calls `work(i)` once for every chunk, on libtorch's threads.
  template <class Work>
  void for_each(const Work& work) const {
    parallel_dynamic(static_cast<int64_t>(first_of_batch_.size()), [&](int64_t index) {
      const auto batch = static_cast<std::size_t>(index);
      const bool is_last = batch + 1 == first_of_batch_.size();
      const std::size_t end = is_last ? chunks_.size() : first_of_batch_[batch + 1];
      for (std::size_t i = first_of_batch_[batch]; i < end; ++i) work(i);
    });
  }

  /// Whether `work(chunk)`, called for every chunk, says so of any.
  template <class Work>
  bool any(const Work& work) const {
    std::atomic<bool> found{false};
    for_each([&](std::size_t i) {
      if (work(chunks_[i])) found.store(true, std::memory_order_relaxed);
    });
    return found.load();
  }

 private:
  static constexpr int64_t kChunkCost = 128;  // of a call or two, in elements

  int64_t size_;
  int64_t batch_;
  int64_t room_ = 0;  // of the last batch
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_of_batch_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
