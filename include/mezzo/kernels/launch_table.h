#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The rows of one kernel launch, cut into blocks. A row is a tensor, or a parameter with its
/// gradient and state, and has `elements()`. The table is passed by value as the kernel's argument,
/// so nothing is copied to the device and a CUDA graph keeps its own copy. More rows take more
/// launches.
template <class Row, int kRows>
class LaunchTable {
 public:
  /// The work of one block of a kernel: elements [begin, end) of a row.
  struct Slice : Row {
    int64_t begin;
    int64_t end;
    int64_t own_block;  ///< number of this block among the row's blocks
  };

  explicit LaunchTable(int elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return rows_ == 0; }
  bool full() const { return rows_ == kRows; }
  void clear() { rows_ = 0; }
  int64_t blocks() const { return empty() ? 0 : end_block_[rows_ - 1]; }

  static int64_t blocks_of(int64_t elements, int64_t elements_per_block) {
    return (elements + elements_per_block - 1) / elements_per_block;
  }

  /// Adds a row. The table must not be full.
  void push_back(const Row& row) {
    end_block_[rows_] =
        static_cast<int32_t>(blocks() + blocks_of(row.elements(), elements_per_block_));
    row_[rows_] = row;
    ++rows_;
  }

  C10_HOST_DEVICE Slice slice_of(int64_t block) const {
    int row = 0;  // the first whose end lies beyond the block
    for (int high = rows_ - 1; row < high;) {
      const int middle = (row + high) / 2;
      if (block < end_block_[middle]) {
        high = middle;
      } else {
        row = middle + 1;
      }
    }
    const int64_t own_block = block - (row == 0 ? 0 : end_block_[row - 1]);
    const int64_t begin = own_block * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t elements = row_[row].elements();
    return {row_[row], begin, end < elements ? end : elements, own_block};
  }

 private:
  Row row_[kRows];
  int32_t end_block_[kRows];  // one past the last block that works on this row
  int elements_per_block_;
  int rows_ = 0;
};

/// Sixteen bytes of elements, read and written at once if the tensor is aligned to 16 bytes.
template <class Stored>
struct alignas(16) GradientPack {
  static constexpr int kSize = 16 / sizeof(Stored);
  Stored element[kSize];
};

/// A gradient that a kernel reads.
struct GradientRow {
  void* data;
  int64_t count;
  int64_t first_partial;  ///< index of its first block's partial result; later blocks follow

  C10_HOST_DEVICE int64_t elements() const { return count; }
};

using GradientTable = LaunchTable<GradientRow, 300>;

/// Device addresses of the numbers of a step that the host does not know, and the host's own. A
/// null address means: no scale, no check, no clipping, no schedule.
struct StepInputs {
  const float* inv_scale = nullptr;
  const float* found_inf = nullptr;
  const double* sum_of_squares = nullptr;
  double max_norm = 0;
  bool clear = false;
  const float* applied = nullptr;  ///< number of steps that the optimizer has applied
  const double* lr_factors = nullptr;
  int64_t lr_factor_count = 0;

  /// Returns the schedule's factor of the learning rate for this step.
  C10_HOST_DEVICE double lr_factor() const {
    if (lr_factors == nullptr) return 1.0;
    const auto number = static_cast<int64_t>(*applied);
    return lr_factors[number < lr_factor_count ? number : lr_factor_count - 1];
  }
};

/// Numbers of a parameter group.
struct StepGroup {
  StepNumbers constants;
  double lr;
  uint64_t seed;
};

/// Parameters of one kernel launch, of one dtype, and their groups: a row's `group` is a number in
/// the table.
class StepTable : public LaunchTable<StepRow, 300> {
 public:
  static constexpr int kGroups = 8;

  using LaunchTable::LaunchTable;

  /// Adds a row and, if it is new, its group. Returns false if there is no room for both.
  bool push_back(StepRow row, const StepGroup& group) {
    const bool is_new = empty() || row.group != last_group_;
    if (full() || (is_new && groups_ == kGroups)) return false;
    if (is_new) group_[groups_++] = group;
    last_group_ = row.group;
    row.group = static_cast<std::uint32_t>(groups_ - 1);
    LaunchTable::push_back(row);
    return true;
  }

  void clear() {
    LaunchTable::clear();
    groups_ = 0;
  }

  C10_HOST_DEVICE const StepGroup& group(std::uint32_t index) const { return group_[index]; }

 private:
  StepGroup group_[kGroups];
  int groups_ = 0;
  std::uint32_t last_group_ = 0;
};
static_assert(sizeof(StepTable) + sizeof(StepInputs) <= 32764, "CUDA 12.1's limit from sm_70 on");

/// Addresses of the counters that one launch increases, within the 4 KB that every launch carries
/// cheaply.
struct CounterTable {
  static constexpr int kCapacity = 480;

  float* counter[kCapacity];
  int size = 0;
};
static_assert(sizeof(CounterTable) < 4000, "with the pointer beside it within 4 KB");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
