#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The rows of one kernel launch, cut into blocks. A row is a tensor, or a parameter with its
/// gradient and state, and has `elements()`. The table is passed by value as the kernel's argument,
/// so nothing is copied to the device and a CUDA graph keeps its own copy. More rows take more
/// launches.
template <class Args, int kMaxTensors>
class TensorListMetadata {
 public:
  /// The work of one block of a kernel: elements [begin, end) of a row.
  struct Chunk : Args {
    int64_t begin;
    int64_t end;
    int64_t chunk_in_tensor;  ///< number of this block among the row's blocks
  };

  explicit TensorListMetadata(int elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == kMaxTensors; }
  void clear() { size_ = 0; }
  int64_t num_blocks() const { return empty() ? 0 : end_block_[size_ - 1]; }

  static int64_t num_blocks_for(int64_t elements, int64_t elements_per_block) {
    return (elements + elements_per_block - 1) / elements_per_block;
  }

  /// Adds a row. The table must not be full.
  void push_back(const Args& row) {
    end_block_[size_] =
        static_cast<int32_t>(num_blocks() + num_blocks_for(row.elements(), elements_per_block_));
    args_[size_] = row;
    ++size_;
  }

  C10_HOST_DEVICE Chunk get_chunk(int64_t block) const {
    int row = 0;  // the first whose end lies beyond the block
    for (int high = size_ - 1; row < high;) {
      const int middle = (row + high) / 2;
      if (block < end_block_[middle]) {
        high = middle;
      } else {
        row = middle + 1;
      }
    }
    const int64_t chunk_in_tensor = block - (row == 0 ? 0 : end_block_[row - 1]);
    const int64_t begin = chunk_in_tensor * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t elements = args_[row].elements();
    return {args_[row], begin, end < elements ? end : elements, chunk_in_tensor};
  }

 private:
  Args args_[kMaxTensors];
  int32_t end_block_[kMaxTensors];  // one past the last block that works on this row
  int elements_per_block_;
  int size_ = 0;
};

/// Sixteen bytes of elements, read and written at once if the tensor is aligned to 16 bytes.
template <class Stored>
struct alignas(16) GradientPack {
  static constexpr int kSize = 16 / sizeof(Stored);
  Stored element[kSize];
};

/// A gradient that a kernel reads.
struct GradArgs {
  void* data;
  int64_t count;
  int64_t first_partial;  ///< index of its first block's partial result; later blocks follow

  C10_HOST_DEVICE int64_t elements() const { return count; }
};

using GradListMetadata = TensorListMetadata<GradArgs, 300>;

/// Device addresses of the numbers of a step that the host does not know, and the host's own. A
/// null address means: no scale, no check, no clipping, no schedule.
struct DeviceStepArgs {
  const float* inv_scale = nullptr;
  const float* found_inf = nullptr;
  const double* norm_sq = nullptr;
  double max_norm = 0;
  bool zero_grad = false;
  const float* applied_steps = nullptr;  ///< number of steps that the optimizer has applied
  const double* lr_factors = nullptr;
  int64_t lr_factor_count = 0;

  /// Returns the schedule's factor of the learning rate for this step.
  C10_HOST_DEVICE double lr_factor() const {
    if (lr_factors == nullptr) return 1.0;
    const auto number = static_cast<int64_t>(*applied_steps);
    return lr_factors[number < lr_factor_count ? number : lr_factor_count - 1];
  }
};

/// Numbers of a parameter group.
struct DeviceGroupArgs {
  FunctorArgs functor_args;
  double lr;
  uint64_t seed;
};

/// Parameters of one kernel launch, of one dtype, and their groups: a row's `group` is a number in
/// the table.
class ParamListMetadata : public TensorListMetadata<ParamArgs, 300> {
 public:
  static constexpr int kMaxGroups = 8;

  using TensorListMetadata::TensorListMetadata;

  /// Adds a row and, if it is new, its group. Returns false if there is no room for both.
  bool push_back(ParamArgs row, const DeviceGroupArgs& group) {
    const bool is_new = empty() || row.group != last_group_;
    if (full() || (is_new && groups_ == kMaxGroups)) return false;
    if (is_new) group_[groups_++] = group;
    last_group_ = row.group;
    row.group = static_cast<std::uint32_t>(groups_ - 1);
    TensorListMetadata::push_back(row);
    return true;
  }

  void clear() {
    TensorListMetadata::clear();
    groups_ = 0;
  }

  C10_HOST_DEVICE const DeviceGroupArgs& group(std::uint32_t index) const { return group_[index]; }

 private:
  DeviceGroupArgs group_[kMaxGroups];
  int groups_ = 0;
  std::uint32_t last_group_ = 0;
};
static_assert(sizeof(ParamListMetadata) + sizeof(DeviceStepArgs) <= 32764,
              "CUDA 12.1's limit from sm_70 on");

/// Addresses of the counters that one launch increases, within the 4 KB that every launch carries
/// cheaply.
struct StateStepsMetadata {
  static constexpr int kCapacity = 480;

  float* counter[kCapacity];
  int size = 0;
};
static_assert(sizeof(StateStepsMetadata) < 4000, "with the pointer beside it within 4 KB");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
