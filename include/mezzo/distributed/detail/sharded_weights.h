#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/kernels/dense_memory.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// The memory of a ShardedOptimizer: which slice of which parameter is this rank's, and how the
// ranks exchange gradients and weights.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns this rank's part of `flat`, which is as many equal parts as there are ranks.
inline at::Tensor own_part(const at::Tensor& flat, const GroupPtr& group) {
  const int64_t length = flat.numel() / group->getSize();
  return flat.narrow(0, group->getRank() * length, length);
}

/// Sums each bucket over the ranks by a reduce-scatter: a rank gets the sum of its own part, and
/// its other parts become zero. A further pass adds to these zeros, and only what it added is
/// summed.
class ShardExchange : public BucketExchange {
 public:
  ShardExchange(BucketedGradients& gradients, GroupPtr group)
      : gradients_(gradients), group_(std::move(group)) {}

  void begin(std::size_t bucket) override {
    if (group_->getSize() == 1) return;
    const at::Tensor& flat = gradients_.buckets()[bucket].flat;
    under_way_.push_back({flat, reduce_scatter(group_, own_part(flat, group_), flat)});
  }
  void finish() override {
    while (!under_way_.empty()) end_first();
    has_summed_ = true;
  }

  /// Whether a backward pass has ended with sums since this was last set to false.
  bool has_summed() const noexcept { return has_summed_; }
  void set_has_summed(bool has_summed) noexcept { has_summed_ = has_summed; }

 private:
  struct Scatter {
    at::Tensor flat;
    Request request;
  };

  void end_first() {
    Scatter& first = under_way_.front();
    first.request.wait();
    const int64_t length = first.flat.numel() / group_->getSize();
    const int64_t begin = group_->getRank() * length;
    first.flat.narrow(0, 0, begin).zero_();
    first.flat.narrow(0, begin + length, first.flat.numel() - begin - length).zero_();
    under_way_.pop_front();
  }

  BucketedGradients& gradients_;
  GroupPtr group_;
  std::deque<Scatter> under_way_;
  bool has_summed_ = false;
};

/// The elements of one parameter that lie in this rank's part of a bucket.
struct ShardSlice {
  std::size_t parameter;  ///< its number in the buckets
  std::size_t bucket;
  int64_t begin;         ///< where the slice begins in the parameter's memory, in elements
  at::Tensor weights;    ///< one dimension, with a version counter of its own
  at::Tensor gradients;  ///< likewise, in the bucket
};

/// Returns elements `begin` to `begin + count` of `flat`, with a version counter of their own.
inline at::Tensor stretch_of(const at::Tensor& flat, int64_t begin, int64_t count) {
  at::Tensor stretch = at::empty({0}, flat.options());
  return stretch.set_(flat.storage(), begin, {count}, {1});
}

/// Keeps the parameters of flat gradient buckets in flat buffers of the same layout, so that one
/// all-gather a bucket brings every rank the slices that the others have trained.
class ShardedWeights {
 public:
  /// Moves the parameters into the buffers; their values stay.
  ShardedWeights(std::shared_ptr<BucketedGradients> gradients, GroupPtr group)
      : gradients_(std::move(gradients)),
        group_(std::move(group)),
        bucket_of_(parameters().size()),
        stamps_(parameters().size()),
        slice_of_(parameters().size()) {
    const c10::InferenceMode no_inference(false);
    const c10::NoGradGuard no_grad;
    for (std::size_t bucket = 0; bucket < gradients_->buckets().size(); ++bucket) {
      const GradBucket& like = gradients_->buckets()[bucket];
      const at::ScalarType dtype = parameters()[like.parameters.front()].scalar_type();
      flats_.push_back(at::zeros({like.flat.numel()}, like.flat.options().dtype(dtype)));
      for (const std::size_t number : like.parameters) {
        bucket_of_[number] = bucket;
        add_slice(number, bucket);
        follow(number);  // frees the parameter's old memory before the next buffer is made
      }
    }
  }

  /// This rank's slices, bucket by bucket; at most one of each parameter.
  const std::vector<ShardSlice>& slices() const noexcept { return slices_; }
  const std::vector<at::Tensor>& parameters() const noexcept { return gradients_->parameters(); }
  const std::vector<GradBucket>& buckets() const noexcept { return gradients_->buckets(); }
  /// The view of the gradient buffer that belongs to parameter `number`; the weights lie likewise.
  const at::Tensor& place(std::size_t number) const { return gradients_->place(number); }

  /// Returns the device of the first gradient; none where no parameter has one. All ranks get the
  /// same answer, since a parameter that has a gradient on one rank gets one on all.
  std::optional<at::Device> device_of_gradients() const {
    for (const at::Tensor& parameter : parameters()) {
      if (parameter.grad().defined()) return parameter.device();
    }
    return std::nullopt;
  }

  /// Brings the buffers in line with the parameters. If a parameter has been written, or given
  /// other memory, its values are copied and the version of its slice is bumped. A slice gets a
  /// gradient if its parameter has one.
  /// \throws c10::Error if a parameter's dtype, device or shape has changed
  void follow() {
    const c10::NoGradGuard no_grad;
    for (std::size_t number = 0; number < parameters().size(); ++number) follow(number);
    for (const ShardSlice& slice : slices_) {
      const bool has_gradient = parameters()[slice.parameter].grad().defined();
      slice.weights.mutable_grad() = has_gradient ? slice.gradients : at::Tensor();
    }
  }

  /// Gives every rank the slices of all ranks. Waits for the collectives.
  void gather() {
    const c10::NoGradGuard no_grad;
    if (group_->getSize() > 1) {
      PendingRequests requests;
      for (const at::Tensor& flat : flats_) {
        requests.add(all_gather(group_, flat, own_part(flat, group_)));
      }
      requests.wait();
    }
    for (std::size_t number = 0; number < parameters().size(); ++number) {
      parameters()[number].unsafeGetTensorImpl()->bump_version();
      stamps_[number] = WriteStamp::of(parameters()[number]);
    }
  }

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const at::Tensor& flat : flats_) bytes += static_cast<int64_t>(flat.nbytes());
    return bytes;
  }

 private:
  /// A parameter without elements gets an empty slice on rank 0, so that one rank keeps its state.
  void add_slice(std::size_t number, std::size_t bucket) {
    const at::Tensor own = own_part(flats_[bucket], group_);
    const int64_t first = place(number).storage_offset();
    const int64_t numel = place(number).numel();
    const int64_t begin = std::max(first, own.storage_offset());
    const int64_t end = std::min(first + numel, own.storage_offset() + own.numel());
    if (numel == 0 ? group_->getRank() != 0 : begin >= end) return;
    const int64_t count = numel == 0 ? 0 : end - begin;
    slice_of_[number] = stretch_of(flats_[bucket], begin, count);
    slices_.push_back({number, bucket, begin - first, slice_of_[number],
                       stretch_of(buckets()[bucket].flat, begin, count)});
  }

  void follow(std::size_t number) {
    const at::Tensor& parameter = parameters()[number];
    if (stamps_[number].is_current(parameter)) return;
    if (!is_in_place(number)) move_to_place(number);
    if (slice_of_[number].defined()) slice_of_[number].unsafeGetTensorImpl()->bump_version();
    stamps_[number] = WriteStamp::of(parameter);
  }

  bool is_in_place(std::size_t number) const {
    const at::Tensor& parameter = parameters()[number];
    const at::Tensor& flat = flats_[bucket_of_[number]];
    TORCH_CHECK(
        parameter.scalar_type() == flat.scalar_type() && parameter.device() == flat.device() &&
            parameter.sizes() == place(number).sizes(),
        "ShardedOptimizer: ", parameter_words(number, parameter), " was ",
        tensor_words(place(number).to(flat.scalar_type())),
        " when the optimizer was made; cast and move the model first, then make the optimizer");
    return parameter.const_data_ptr() == memory_of(number) && same_layout(parameter, place(number));
  }

  /// Gives the parameter a storage that ends where the parameter does: with the buffer's storage a
  /// file of the model would hold the whole buffer once for each parameter.
  void move_to_place(std::size_t number) {
    const at::Tensor& parameter = parameters()[number];
    const at::Tensor& flat = flats_[bucket_of_[number]];
    const auto keeps_buffer = [flat](void*) {};
    const at::Tensor own =
        at::from_blob(memory_of(number), place(number).sizes(), place(number).strides(),
                      keeps_buffer, flat.options(), flat.device());
    own.copy_(parameter.detach());
    parameter.set_data(own);
  }

  void* memory_of(std::size_t number) const {
    const at::Tensor& flat = flats_[bucket_of_[number]];
    return static_cast<char*>(flat.mutable_data_ptr()) +
           place(number).storage_offset() * flat.element_size();
  }

  std::shared_ptr<BucketedGradients> gradients_;
  GroupPtr group_;
  std::vector<at::Tensor> flats_;       // of each bucket
  std::vector<std::size_t> bucket_of_;  // of each parameter
  std::vector<WriteStamp> stamps_;      // of each parameter, when it last agreed with the buffers
  std::vector<ShardSlice> slices_;
  std::vector<at::Tensor> slice_of_;  // of each parameter: the weights of its slice, or undefined
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
