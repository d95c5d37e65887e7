#pragma once

#include <mezzo/base/version.h>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Calls `work(i)` once for each i below `count` on libtorch's intra-op threads, each of which
/// takes the next as soon as it is free: cores are not equally fast, and a thread that the system
/// holds up holds up no more than its chunk_size.
///
/// at::parallel_for will not do in a header: it is a template, and runs serially in a caller that
/// is compiled without -fopenmp. TensorIterator's loop over elements lives in libtorch itself; here
/// its elements are the threads.
inline void parallel_dynamic(int64_t count, c10::function_ref<void(int64_t)> work) {
  std::atomic<int64_t> next{0};
  const auto run_items = [&](char**, const int64_t*, int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  };
  std::vector<char> threads(
      static_cast<std::size_t>(std::min<int64_t>(count, at::get_num_threads())));
  if (threads.size() < 2) return run_items(nullptr, nullptr, 0, 0);
  const at::Tensor elements = at::from_blob(threads.data(), {static_cast<int64_t>(threads.size())},
                                            at::TensorOptions().dtype(at::kByte));
  auto iterator = at::TensorIteratorConfig().add_borrowed_const_input(elements).build();
  iterator.for_each(run_items, /*grain_size=*/1);
}

/// The number of elements below which another thread costs more time than it saves.
inline constexpr int64_t kThreadGrain = 32768;

/// The elements of several tensors, cut into chunks. Chunks depend on the sizes alone, not on the
/// number of threads, so sums taken chunk by chunk are equal on any machine. Threads take small
/// chunks in batches.
class WorkChunks {
 public:
  struct Chunk {
    std::size_t tensor_index;  ///< the tensor's number, as it was added
    int64_t begin;
    int64_t count;
  };

  /// Makes chunks of `size` elements (an item's last may be smaller), in batches of at least
  /// `batch` elements.
  explicit WorkChunks(int64_t size, int64_t batch = kThreadGrain) : size_(size), batch_(batch) {}

  void add(std::size_t tensor_index, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += size_) {
      const int64_t chunk_size = std::min(size_, count - begin);
      if (batch_budget_ <= 0) {
        first_of_batch_.push_back(chunks_.size());
        batch_budget_ = batch_;
      }
      chunks_.push_back({tensor_index, begin, chunk_size});
      batch_budget_ -= chunk_size + kChunkCost;
    }
  }

  std::size_t size() const noexcept { return chunks_.size(); }

  /// Calls `work(i, chunk)` once for every chunk, on libtorch's threads; i is the chunk's number.
  void for_each(c10::function_ref<void(std::size_t, const Chunk&)> work) const {
    parallel_dynamic(static_cast<int64_t>(first_of_batch_.size()), [&](int64_t index) {
      const auto batch = static_cast<std::size_t>(index);
      const bool is_last = batch + 1 == first_of_batch_.size();
      const std::size_t end = is_last ? chunks_.size() : first_of_batch_[batch + 1];
      for (std::size_t i = first_of_batch_[batch]; i < end; ++i) work(i, chunks_[i]);
    });
  }

  /// Calls `work(chunk)` for every chunk, and returns whether any call returned true.
  template <class Work>
  bool any(const Work& work) const {
    std::atomic<bool> found{false};
    for_each([&](std::size_t, const Chunk& chunk) {
      if (work(chunk)) found.store(true, std::memory_order_relaxed);
    });
    return found.load();
  }

 private:
  static constexpr int64_t kChunkCost = 128;  // of a call or two, in elements

  int64_t size_;
  int64_t batch_;
  int64_t batch_budget_ = 0;  // of the last batch
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_of_batch_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
