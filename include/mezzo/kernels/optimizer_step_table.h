#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/paged_table.h>
#include <mezzo/kernels/step_use.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One parameter's part of a step on a device.
struct StepRow {
  StepSpan span;
  float* count;      ///< how many steps were applied so far, on the device; null: none are counted
  int group;         ///< whose constants hold
  int number;        ///< the parameter's, in the optimizer
  bool variant;      ///< amsgrad, momentum: which of an optimizer's two loops
  bool copies_half;  ///< the dtype of the copy, where there is one
  optim::WeightStorage storage;
  at::ScalarType parameter_dtype;  ///< of what is trained: float where it is a master
  at::ScalarType gradient_dtype;
};

/// Where the device finds what the host does not know. Null: no scale, no check, no clipping, no
/// schedule.
struct StepInputs {
  const float* inv_scale = nullptr;
  const float* found_inf = nullptr;
  const double* sum_of_squares = nullptr;
  double max_norm = 0;
  bool clear = false;
  const float* applied = nullptr;  ///< how many steps the optimizer has applied
  const double* lr_factors = nullptr;
  int64_t lr_factor_count = 0;

  /// Of the step that comes after those applied.
  C10_HOST_DEVICE double lr_factor() const {
    if (lr_factors == nullptr) return 1.0;
    const auto number = static_cast<int64_t>(*applied);
    return lr_factors[number < lr_factor_count ? number : lr_factor_count - 1];
  }
};

/// What one block of a kernel works on.
struct StepSlice {
  StepSpan span;
  const float* count;
  int group;
  int number;
  bool copies_half;
  int64_t begin;
  int64_t end;
  int row;  ///< of the table
};

/// The numbers of a parameter group.
template <class Constants>
struct StepGroup {
  Constants constants;
  double lr;
  uint64_t seed;
};

/// Parameters of one kernel launch, of one pair of dtypes, cut into blocks. It travels by value as
/// the kernel's argument, so that nothing is copied to the device and a CUDA graph keeps its own;
/// those of more parameters are the pages of a PagedTable.
template <class Constants, int kRows>
class StepTable {
 public:
  static constexpr int kCapacity = kRows;
  static constexpr int kGroups = 8;

  explicit StepTable(int64_t elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return rows_ == 0; }
  int64_t blocks() const { return empty() ? 0 : end_block_[rows_ - 1]; }

  /// False if there is no room for the row and its group; it belongs to the next page.
  bool push_back(const StepRow& row, const StepGroup<Constants>& group) {
    const bool is_new = rows_ == 0 || row.group != last_group_;
    if (rows_ == kCapacity || (is_new && groups_ == kGroups)) return false;
    if (is_new) group_[groups_++] = group;
    last_group_ = row.group;
    const int64_t own = (row.span.count + elements_per_block_ - 1) / elements_per_block_;
    end_block_[rows_] = blocks() + own;
    span_[rows_] = row.span;
    count_[rows_] = row.count;
    group_of_[rows_] = static_cast<int8_t>(groups_ - 1);
    number_[rows_] = row.number;
    copies_half_[rows_] = row.copies_half;
    ++rows_;
    return true;
  }

  void clear() { rows_ = groups_ = 0; }

  /// Gives what is not used yet a value, so that equal tables have equal bytes.
  void clear_rest() {
    std::fill(span_ + rows_, span_ + kCapacity, StepSpan{});
    std::fill(count_ + rows_, count_ + kCapacity, nullptr);
    std::fill(end_block_ + rows_, end_block_ + kCapacity, blocks());
    std::fill(number_ + rows_, number_ + kCapacity, 0);
    std::fill(group_of_ + rows_, group_of_ + kCapacity, int8_t{0});
    std::fill(copies_half_ + rows_, copies_half_ + kCapacity, false);
    std::fill(group_ + groups_, group_ + kGroups, StepGroup<Constants>{});
  }

  /// Makes the row and the group of page `page`'s slice those of a PagedTable.
  C10_HOST_DEVICE static void renumber(int page, StepSlice& slice) {
    slice.row += page * kCapacity;
    slice.group += page * kGroups;
  }

  C10_HOST_DEVICE const StepGroup<Constants>& group(int index) const { return group_[index]; }

  C10_HOST_DEVICE StepSlice slice_of(int64_t block) const {
    const int row = item_of_block(end_block_, rows_, block);
    const int64_t begin = (block - first_block(row)) * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t count = span_[row].count;
    return {span_[row],
            count_[row],
            group_of_[row],
            number_[row],
            copies_half_[row],
            begin,
            end < count ? end : count,
            row};
  }

  C10_HOST_DEVICE int rows() const { return rows_; }
  C10_HOST_DEVICE int64_t first_block(int row) const { return row == 0 ? 0 : end_block_[row - 1]; }
  C10_HOST_DEVICE int64_t end_block(int row) const { return end_block_[row]; }

 private:
  StepSpan span_[kCapacity];
  const float* count_[kCapacity];
  int64_t end_block_[kCapacity];  // one past the last block that works on this row
  int number_[kCapacity];
  int8_t group_of_[kCapacity];
  bool copies_half_[kCapacity];
  StepGroup<Constants> group_[kGroups];
  int64_t elements_per_block_;
  int rows_ = 0;
  int groups_ = 0;
  int last_group_ = -1;
};

/// As many rows as the 32,764 bytes hold that CUDA 12.1 allows from sm_70 on.
template <class Constants>
using DeviceStepTable = StepTable<Constants, 300>;

/// The counters of the launch that counts a step: by value, or where in the device's memory there
/// are more than that.
class CounterTable {
 public:
  static constexpr std::size_t kCapacity = 4000;

  static bool holds(const std::vector<float*>& counters) { return counters.size() <= kCapacity; }

  /// `memory` has what `bytes_of` returned, unless the table holds them.
  explicit CounterTable(const std::vector<float*>& counters, const void* memory = nullptr)
      : there_(static_cast<float* const*>(memory)), size_(static_cast<int64_t>(counters.size())) {
    if (memory == nullptr) std::copy(counters.begin(), counters.end(), counter_);
  }

  static std::vector<std::byte> bytes_of(const std::vector<float*>& counters) {
    std::vector<std::byte> bytes(counters.size() * sizeof(float*));
    std::memcpy(bytes.data(), counters.data(), bytes.size());
    return bytes;
  }

  C10_HOST_DEVICE int64_t size() const { return size_; }
  C10_HOST_DEVICE float& operator[](int64_t i) const {
    return there_ == nullptr ? *counter_[i] : *there_[i];
  }

 private:
  float* counter_[kCapacity];
  float* const* there_;
  int64_t size_;
};
static_assert(sizeof(CounterTable) < 32700, "with the pointer beside it within 32,764 bytes");

/// The kernel's arguments.
template <class Constants>
inline constexpr bool kStepArgumentsFit = sizeof(PagedTable<DeviceStepTable<Constants>>) +
                                              sizeof(StepInputs) <=
                                          32764;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
