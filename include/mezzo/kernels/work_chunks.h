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

/// Calls `work(i)` once for each i in [0, count) on libtorch's intra-op threads, dynamically
/// scheduled: cores differ in speed, and a preempted thread delays only its own item.
///
/// Not at::parallel_for: a template, it runs serially in a caller compiled without -fopenmp.
/// TensorIterator::for_each is compiled in libtorch; here its elements are the threads.
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

/// The fewest elements that are worth another thread (ATen's GRAIN_SIZE).
inline constexpr int64_t kThreadGrain = 32768;

/// Divides the elements of several tensors into chunks. Chunks depend on the sizes, not on the
/// number of threads, so that sums over chunks are bitwise identical on any machine. Small chunks
/// are scheduled in batches.
class WorkChunks {
 public:
  struct Chunk {
    std::size_t tensor_index;  ///< the argument of add()
    int64_t begin;
    int64_t numel;
  };

  /// \param size   elements per chunk; a tensor's last chunk may be smaller
  /// \param batch  the fewest elements that a thread takes at a time
  explicit WorkChunks(int64_t size, int64_t batch = kThreadGrain) : size_(size), batch_(batch) {}

  void add(std::size_t tensor_index, int64_t numel) {
    for (int64_t begin = 0; begin < numel; begin += size_) {
      const int64_t chunk_size = std::min(size_, numel - begin);
      if (batch_budget_ <= 0) {
        first_of_batch_.push_back(chunks_.size());
        batch_budget_ = batch_;
      }
      chunks_.push_back({tensor_index, begin, chunk_size});
      batch_budget_ -= chunk_size + kChunkCost;
    }
  }

  std::size_t size() const noexcept { return chunks_.size(); }

  /// Calls `work(i, chunk)` for each chunk i, on libtorch's threads.
  void for_each(c10::function_ref<void(std::size_t, const Chunk&)> work) const {
    parallel_dynamic(static_cast<int64_t>(first_of_batch_.size()), [&](int64_t index) {
      const auto batch = static_cast<std::size_t>(index);
      const bool is_last = batch + 1 == first_of_batch_.size();
      const std::size_t end = is_last ? chunks_.size() : first_of_batch_[batch + 1];
      for (std::size_t i = first_of_batch_[batch]; i < end; ++i) work(i, chunks_[i]);
    });
  }

  /// Calls `work(chunk)` for every chunk. Returns whether any call returned true.
  template <class Work>
  bool any(const Work& work) const {
    std::atomic<bool> found{false};
    for_each([&](std::size_t, const Chunk& chunk) {
      if (work(chunk)) found.store(true, std::memory_order_relaxed);
    });
    return found.load();
  }

 private:
  static constexpr int64_t kChunkCost = 128;  // of a function call, in elements

  int64_t size_;
  int64_t batch_;
  int64_t batch_budget_ = 0;  // elements left in the last batch
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_of_batch_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
