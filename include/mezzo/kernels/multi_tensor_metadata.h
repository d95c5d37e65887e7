#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <ATen/ceil_div.h>
#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Tensors of one multi-tensor launch, divided into a chunk for each block (TensorListMetadata of
/// ATen's multi_tensor_apply). Passed by value as a kernel argument: nothing is copied to the
/// device, and a CUDA graph keeps its own copy. More than kMaxTensors take more launches.
/// \tparam Args  kernel arguments of a tensor, with num_elements()
template <class Args, int kMaxTensors>
class TensorListMetadata {
 public:
  /// The elements [begin, end) of a tensor, which one block processes.
  struct Chunk : Args {
    int64_t begin;
    int64_t end;
    int64_t chunk_in_tensor;
  };

  explicit TensorListMetadata(int elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }
  int64_t num_blocks() const { return empty() ? 0 : end_block_[size_ - 1]; }

  /// Adds a tensor. Returns false, and adds nothing, if it is full.
  bool push_back(const Args& args) {
    if (size_ == kMaxTensors) return false;
    end_block_[size_] = static_cast<int32_t>(
        num_blocks() + at::ceil_div(args.num_elements(), int64_t{elements_per_block_}));
    args_[size_] = args;
    ++size_;
    return true;
  }

  C10_HOST_DEVICE Chunk get_chunk(int64_t block) const {
    int tensor = 0;  // binary search for the first with block < end_block_[tensor]
    for (int high = size_ - 1; tensor < high;) {
      const int middle = (tensor + high) / 2;
      if (block < end_block_[middle]) {
        high = middle;
      } else {
        tensor = middle + 1;
      }
    }
    const int64_t chunk_in_tensor = block - (tensor == 0 ? 0 : end_block_[tensor - 1]);
    const int64_t begin = chunk_in_tensor * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t numel = args_[tensor].num_elements();
    return {args_[tensor], begin, end < numel ? end : numel, chunk_in_tensor};
  }

 private:
  Args args_[kMaxTensors];
  int32_t end_block_[kMaxTensors];  // one past the tensor's last block
  int elements_per_block_;
  int size_ = 0;
};

/// Kernel arguments of a contiguous range of gradients.
struct GradArgs {
  void* data;
  int64_t numel;
  int64_t first_partial;  ///< index of the first block's PartialGradStats

  C10_HOST_DEVICE int64_t num_elements() const { return numel; }
};

using GradListMetadata = TensorListMetadata<GradArgs, 300>;

/// Arguments of a step on a device, some of them in device memory. Null means no scale, no check,
/// no clipping or no schedule.
struct DeviceStepArgs {
  const float* inv_scale = nullptr;
  const float* found_inf = nullptr;
  const double* norm_sq = nullptr;
  double max_norm = 0;
  bool zero_grad = false;
  const float* applied_steps = nullptr;
  const double* lr_factors = nullptr;
  int64_t lr_factor_count = 0;

  /// Returns the schedule's factor of the learning rate for this step.
  C10_HOST_DEVICE double lr_factor() const {
    if (lr_factors == nullptr) return 1.0;
    const auto step = static_cast<int64_t>(*applied_steps);
    return lr_factors[step < lr_factor_count ? step : lr_factor_count - 1];
  }
};

/// Kernel arguments of a param group.
struct DeviceGroupArgs {
  FunctorArgs functor_args;  ///< HyperParams
  double lr;
  uint64_t seed;
};

/// Parameters of one dtype and their groups. ParamArgs::group is here an index of its groups.
class ParamListMetadata : public TensorListMetadata<ParamArgs, 300> {
 public:
  static constexpr int kMaxGroups = 8;

  using TensorListMetadata::TensorListMetadata;

  /// Adds a parameter and, if its group is new, the group. Returns false, and adds nothing, if
  /// full.
  bool push_back(ParamArgs param, const DeviceGroupArgs& group) {
    const bool is_new = empty() || param.group != last_group_;
    if (is_new && num_groups_ == kMaxGroups) return false;
    const std::uint32_t source_group = param.group;
    param.group = static_cast<std::uint32_t>(is_new ? num_groups_ : num_groups_ - 1);
    if (!TensorListMetadata::push_back(param)) return false;
    if (is_new) groups_[num_groups_++] = group;
    last_group_ = source_group;
    return true;
  }

  void clear() {
    TensorListMetadata::clear();
    num_groups_ = 0;
  }

  C10_HOST_DEVICE const DeviceGroupArgs& group(std::uint32_t index) const { return groups_[index]; }

 private:
  DeviceGroupArgs groups_[kMaxGroups];
  int num_groups_ = 0;
  std::uint32_t last_group_ = 0;  // as the caller numbers groups
};
static_assert(sizeof(ParamListMetadata) + sizeof(DeviceStepArgs) <= 32764,
              "limit of CUDA 12.1 from sm_70 on");

/// Addresses of step counts that one launch increments. Below 4 KB, which any launch carries
/// cheaply.
struct StateStepsMetadata {
  static constexpr int kCapacity = 480;

  float* state_steps[kCapacity];
  int size = 0;
};
static_assert(sizeof(StateStepsMetadata) < 4000, "4 KB with the found_inf pointer");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
