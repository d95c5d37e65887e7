#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/parallel_spans.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One gradient's memory, to be read once.
struct SummaryStretch {
  const char* data;
  char* copy_to;  ///< null, or where its elements go as well
  int64_t count;
  int64_t element_size;
  at::ScalarType dtype;
};

inline SummaryStretch summary_stretch(const at::Tensor& gradient, void* copy_to = nullptr) {
  return {static_cast<const char*>(gradient.const_data_ptr()), static_cast<char*>(copy_to),
          gradient.numel(), static_cast<int64_t>(gradient.element_size()), gradient.scalar_type()};
}

/// Stretches cut into chunks that do not depend on the number of threads.
class SummaryChunks {
 public:
  struct Chunk {
    std::size_t stretch;
    int64_t begin;
    int64_t count;
  };

  explicit SummaryChunks(const std::vector<SummaryStretch>& stretches) {
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      for (int64_t begin = 0; begin < stretches[i].count; begin += kSummaryChunk) {
        const int64_t count = std::min(kSummaryChunk, stretches[i].count - begin);
        if (cost_ == 0) first_of_batch_.push_back(chunks_.size());
        chunks_.push_back({i, begin, count});
        cost_ += count + kChunkCost;
        if (cost_ >= kBatchCost) cost_ = 0;
      }
    }
  }

  std::size_t size() const noexcept { return chunks_.size(); }
  const Chunk& operator[](std::size_t i) const { return chunks_[i]; }

  /// Runs `work(i)` for every chunk on libtorch's threads. Each thread takes the next batch when it
  /// is done with one: a thread that the system holds up holds up no more than its own.
  template <class Work>
  void for_each(const Work& work) const {
    std::atomic<std::size_t> next{0};
    const auto drain = [&](int /*worker*/) {
      for (std::size_t batch = next++; batch < first_of_batch_.size(); batch = next++) {
        const bool is_last = batch + 1 == first_of_batch_.size();
        const std::size_t end = is_last ? chunks_.size() : first_of_batch_[batch + 1];
        for (std::size_t i = first_of_batch_[batch]; i < end; ++i) work(i);
      }
    };
    const auto threads = static_cast<std::size_t>(at::get_num_threads());
    std::vector<int> workers(std::min(threads, first_of_batch_.size()));
    parallel_for_each(workers, drain);
  }

 private:
  static constexpr int64_t kChunkCost = 128;    // a call, in elements
  static constexpr int64_t kBatchCost = 32768;  // below it, a thread costs more than it brings

  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_of_batch_;
  int64_t cost_ = 0;  // of the last batch; 0 when it is full
};

/// One partial result a stretch: its chunks', merged in their order.
template <class Partial, class Work>
std::vector<Partial> summarize_stretches(const std::vector<SummaryStretch>& stretches,
                                         const Work& work) {
  const SummaryChunks chunks(stretches);
  std::vector<Partial> of_chunk(chunks.size());
  chunks.for_each([&](std::size_t i) {
    const auto& chunk = chunks[i];
    work(stretches[chunk.stretch], chunk, of_chunk[i]);
  });
  std::vector<Partial> of_stretch(stretches.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    of_stretch[chunks[i].stretch].merge(of_chunk[i]);
  }
  return of_stretch;
}

inline std::vector<GradientPartial> summarize_cpu(const std::vector<SummaryStretch>& stretches) {
  const auto work = [](const SummaryStretch& stretch, const SummaryChunks::Chunk& chunk,
                       GradientPartial& partial) {
    const SummaryLoops loops = summary_loops(stretch.dtype, best_isa());
    const int64_t offset = chunk.begin * stretch.element_size;
    if (stretch.copy_to == nullptr) {
      loops.summarize(stretch.data + offset, chunk.count, partial);
    } else {
      loops.copy_and_summarize(stretch.data + offset, stretch.copy_to + offset, chunk.count,
                               partial);
    }
  };
  return summarize_stretches<GradientPartial>(stretches, work);
}

/// All partial results as one, in their order.
template <class Partial>
Partial merged(const std::vector<Partial>& partials) {
  Partial total;
  for (const Partial& partial : partials) total.merge(partial);
  return total;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
