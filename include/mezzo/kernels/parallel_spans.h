#pragma once

#include <mezzo/base/version.h>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
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

/// A stretch of memory that a kernel walks.
template <class Loops>
struct Span {
  char* data;
  int64_t count;
  int64_t element_size;
  Loops loops;
  char* result = nullptr;  ///< where a kernel that does not write in place writes
};

/// A part of the work: stretches that together have about as many elements as those of other parts.
template <class Loops>
struct Part {
  std::vector<Span<Loops>> spans;
  bool found = false;
};

/// Cuts spans into at most one part a thread, of equal size and at least `grain` elements.
template <class Loops>
std::vector<Part<Loops>> equal_parts(const std::vector<Span<Loops>>& spans, int64_t grain) {
  int64_t total = 0;
  for (const auto& span : spans) total += span.count;
  const int64_t wanted = std::clamp<int64_t>(total / grain, 1, at::get_num_threads());
  const int64_t part_size = (total + wanted - 1) / wanted;
  std::vector<Part<Loops>> parts(1);
  int64_t room = part_size;
  for (const auto& span : spans) {
    for (int64_t begin = 0; begin < span.count;) {
      if (room == 0) {
        parts.emplace_back();
        room = part_size;
      }
      const int64_t count = std::min(room, span.count - begin);
      Span<Loops>& cut = parts.back().spans.emplace_back(span);
      cut.data += begin * span.element_size;
      cut.count = count;
      if (cut.result != nullptr) cut.result += begin * span.element_size;
      begin += count;
      room -= count;
    }
  }
  return parts;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
