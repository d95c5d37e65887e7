#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary_element.h>
#include <mezzo/kernels/gradient_summary_partial.h>

#include <c10/macros/Macros.h>

#include <cstdint>

// What one thread of a CUDA block does, written for host and device so that it is tested where
// there is no GPU.
#if defined(__CUDACC__)
#define MEZZO_UNROLL _Pragma("unroll")
#else
#define MEZZO_UNROLL
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sixteen bytes of elements, read at once where a tensor is so aligned.
template <class Stored>
struct alignas(16) SummaryPack {
  static constexpr int kSize = 16 / sizeof(Stored);
  Stored element[kSize];
};

/// Calls `visit(Stored, index)` on the elements of `data` that are `thread`'s among `threads`; four
/// packs are under way at a time.
template <class Stored, class Visit>
C10_HOST_DEVICE void visit_share(const Stored* data, int64_t count, int thread, int threads,
                                 Visit& visit) {
  using Pack = SummaryPack<Stored>;
  constexpr int kAtOnce = 4;
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % sizeof(Pack) == 0;
  const int64_t packs = is_aligned ? count / Pack::kSize : 0;
  const auto* const pack = reinterpret_cast<const Pack*>(data);
  int64_t i = thread;
  for (; i + int64_t{kAtOnce - 1} * threads < packs; i += int64_t{kAtOnce} * threads) {
    Pack values[kAtOnce];
    MEZZO_UNROLL
    for (int k = 0; k < kAtOnce; ++k) values[k] = pack[i + int64_t{k} * threads];
    MEZZO_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      MEZZO_UNROLL
      for (int lane = 0; lane < Pack::kSize; ++lane) {
        visit(values[k].element[lane], (i + int64_t{k} * threads) * Pack::kSize + lane);
      }
    }
  }
  for (; i < packs; i += threads) {
    const Pack values = pack[i];
    MEZZO_UNROLL
    for (int lane = 0; lane < Pack::kSize; ++lane) {
      visit(values.element[lane], i * Pack::kSize + lane);
    }
  }
  for (i = packs * Pack::kSize + thread; i < count; i += threads) visit(data[i], i);
}

/// What a thread gathers of its share.
template <class Element>
class SummaryShare {
 public:
  using Format = FloatFormat<Element>;

  C10_HOST_DEVICE void operator()(typename Format::Stored stored, int64_t /*index*/) {
    const typename Format::Bits bits = stored;
    typename Format::Value value;
    Format::widen(bits, value);
    add_square(value, sum_of_squares_);
    keep_larger_magnitude<Format>(bits, largest_);
  }
  C10_HOST_DEVICE GradientPartial partial() const {
    GradientPartial result;
    result.sum_of_squares = sum_of_squares_;
    set_largest<Format>(largest_, result);
    return result;
  }

 private:
  double sum_of_squares_ = 0;
  typename Format::Bits largest_ = 0;
};

template <class Element>
class StatisticsShare {
 public:
  using Format = FloatFormat<Element>;
  using Value = typename Format::Value;
  using Bits = typename Format::Bits;

  /// `first_index` is what stands before the block's first element in its tensor.
  C10_HOST_DEVICE StatisticsShare(const StatisticsQuery& query, int32_t gradient,
                                  int64_t first_index)
      : first_index_(first_index) {
    partial_.first_bad_gradient = gradient;
    element_.inv_scale = static_cast<Value>(query.inv_scale);
    element_.set_underflow(query.underflow);
  }
  C10_HOST_DEVICE void operator()(typename Format::Stored stored, int64_t index) {
    summary_(stored, index);
    const Bits bits = stored;
    element_(bits, zeros_, underflows_, scaled_underflows_);
    if (partial_.first_bad_element < 0 && element_.is_bad(bits)) {
      partial_.first_bad_element = first_index_ + index;
    }
  }
  C10_HOST_DEVICE StatisticsPartial partial() const {
    StatisticsPartial result = partial_;
    result.summary = summary_.partial();
    result.zeros = static_cast<int64_t>(zeros_);
    result.underflows = static_cast<int64_t>(underflows_);
    result.scaled_underflows = static_cast<int64_t>(scaled_underflows_);
    if (result.first_bad_element < 0) result.first_bad_gradient = -1;
    return result;
  }

 private:
  SummaryShare<Element> summary_;
  StatisticsElement<Format, Value, Bits> element_;
  Bits zeros_ = 0;
  Bits underflows_ = 0;
  Bits scaled_underflows_ = 0;
  StatisticsPartial partial_;
  int64_t first_index_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL
