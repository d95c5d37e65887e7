#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/launch_table.h>
#include <mezzo/kernels/step_use.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A step of one parameter on a device.
struct StepRow {
  StepSpan span;
  float* count;      ///< number of steps applied so far, on the device; null: steps are not counted
  int group;         ///< number of the parameter's group
  int number;        ///< number of the parameter in the optimizer
  bool variant;      ///< selects the second loop of a rule that has two (amsgrad, momentum)
  bool copies_half;  ///< a copy of the parameter is half, not bfloat16
  optim::WeightStorage storage;
  at::ScalarType parameter_dtype;  ///< dtype of the trained values: float for a master
  at::ScalarType gradient_dtype;
};

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

/// The part of a StepRow that a launch takes. The kernel itself stands for the parameter's dtype,
/// variant and storage; it asks for the gradient's dtype.
struct StepTableRow {
  StepSpan span;
  const float* count;
  int number;
  int16_t group;  ///< index of the group in the table
  bool copies_half;
  at::ScalarType gradient_dtype;

  static StepTableRow of(const StepRow& row, int16_t group) {
    return {row.span, row.count, row.number, group, row.copies_half, row.gradient_dtype};
  }

  C10_HOST_DEVICE int64_t elements() const { return span.count; }
};

using StepSlice = TableSlice<StepTableRow>;

/// Numbers of a parameter group.
template <class Constants>
struct StepGroup {
  Constants constants;
  double lr;
  uint64_t seed;
};

/// Parameters of one kernel launch, of one dtype, and their groups.
template <class Row, class Constants, int kRows>
class StepTable : public LaunchTable<Row, kRows> {
  using Base = LaunchTable<Row, kRows>;

 public:
  static constexpr int kGroups = 8;

  using Base::Base;

  /// Adds a row and, if it is new, its group. Returns false if there is no room for both.
  bool push_back(const StepRow& row, const StepGroup<Constants>& group) {
    const bool is_new = Base::empty() || row.group != last_group_;
    if (Base::full() || (is_new && groups_ == kGroups)) return false;
    if (is_new) group_[groups_++] = group;
    last_group_ = row.group;
    Base::push_back(Row::of(row, static_cast<int16_t>(groups_ - 1)));
    return true;
  }

  void clear() {
    Base::clear();
    groups_ = 0;
  }

  C10_HOST_DEVICE const StepGroup<Constants>& group(int index) const { return group_[index]; }

 private:
  StepGroup<Constants> group_[kGroups];
  int groups_ = 0;
  int last_group_ = -1;
};

/// The capacity fills the 32,764 bytes that CUDA 12.1 allows from sm_70 on.
template <class Constants>
using DeviceStepTable = StepTable<StepTableRow, Constants, 300>;

template <class Table>
inline constexpr bool kStepArgumentsFit = sizeof(Table) + sizeof(StepInputs) <= 32764;

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
