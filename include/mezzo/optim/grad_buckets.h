/// \file
/// GradBuckets: gradients of many parameters in a few flat buffers.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// 25 MiB, the default of torch's DistributedDataParallel.
inline constexpr int64_t kDefaultBucketCapBytes = int64_t{25} << 20;

/// Options of GradBuckets.
struct GradBucketsOptions {
  /// Maximum size of a bucket, unless a single parameter is larger; > 0.
  int64_t bucket_cap_bytes = kDefaultBucketCapBytes;
};

/// Parameters whose gradients share one buffer.
struct FlatGradBucket {
  at::Device device;  ///< of parameters and buffer
  /// `grad_dtype()` of the parameters: their dtype unless `set_grad_dtype` was called.
  at::ScalarType dtype;
  /// Indices into GradBuckets::parameters, in the order of the gradients.
  std::vector<std::size_t> param_indices;
  /// 1D. Each gradient starts at a multiple of 64 bytes; the padding is zero.
  at::Tensor buffer;
};

/// Stores the gradients of parameters in flat buffers by device and dtype, so that collectives,
/// unscaling and norms run over a few large tensors instead of one for each parameter. After a
/// backward pass call copy_grads_to_buckets(); docs/distributed.md has the loop.
///
/// Buckets are in reverse order of the parameters, roughly the order of the backward pass. Not
/// thread-safe.
class GradBuckets {
 public:
  /// \param parameters  distinct leaf tensors of float32, float64, bfloat16 or float16, with or
  ///   without requires_grad
  /// \throws c10::Error naming the parameter or the option
  inline explicit GradBuckets(const std::vector<at::Tensor>& parameters,
                              const GradBucketsOptions& options = {});

  /// Returns the parameters, in the order of construction.
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Returns the buckets.
  const std::vector<FlatGradBucket>& buckets() const noexcept { return buckets_; }
  /// Returns the view of a bucket for the gradient of a parameter, with the parameter's strides.
  const at::Tensor& bucket_view(std::size_t param_index) const {
    return bucket_views_[param_index];
  }

  /// Copies every gradient to its bucket view, converted to the bucket's dtype, and makes `.grad`
  /// the view. Zeroes the view of a parameter without a gradient.
  /// \throws c10::Error, naming the parameter, if a gradient is not dense, has another shape or
  ///   device than its parameter, or is float32 and its bucket 16-bit
  void copy_grads_to_buckets() {
    clone_swapped_gradients();
    for (std::size_t param_index = 0; param_index < parameters_.size(); ++param_index) {
      copy_grad_to_bucket(param_index);
    }
  }
  /// copy_grads_to_buckets for one parameter.
  inline void copy_grad_to_bucket(std::size_t param_index);

  /// `Module::zero_grad`: undefines all gradients, or with `false` zeroes defined ones with one
  /// fill per bucket.
  void zero_grad(bool set_to_none = true) {
    const c10::NoGradGuard no_grad;
    if (!set_to_none) {
      for (const FlatGradBucket& bucket : buckets_) bucket.buffer.zero_();
    }
    for (std::size_t param_index = 0; param_index < parameters_.size(); ++param_index) {
      at::Tensor& gradient = parameters_[param_index].mutable_grad();
      if (gradient.defined()) gradient = set_to_none ? at::Tensor() : bucket_views_[param_index];
    }
  }

 private:
  inline void clone_swapped_gradients();
  /// Returns the dtype in which autograd accumulates the parameter's gradient.
  static at::ScalarType gradient_dtype(const at::Tensor& parameter) {
    const at::ScalarType dtype = parameter.grad_dtype().value_or(parameter.scalar_type());
    return detail::is_training_dtype(dtype) ? dtype : parameter.scalar_type();
  }

  std::vector<at::Tensor> parameters_;
  std::vector<FlatGradBucket> buckets_;
  std::vector<at::Tensor> bucket_views_;  // with separate version counters
};

inline GradBuckets::GradBuckets(const std::vector<at::Tensor>& parameters,
                                const GradBucketsOptions& options)
    : parameters_(parameters), bucket_views_(parameters.size()) {
  constexpr int64_t kAlignment = 64;
  TORCH_CHECK(options.bucket_cap_bytes > 0, "GradBuckets: bucket_cap_bytes is ",
              options.bucket_cap_bytes, "; it must be greater than 0");
  std::unordered_set<const at::TensorImpl*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    TORCH_CHECK(parameter.defined(), "GradBuckets: parameter ", i, " is undefined; omit it");
    TORCH_CHECK(
        parameter.layout() == at::kStrided && detail::is_training_dtype(parameter.scalar_type()),
        "GradBuckets: ", detail::describe_param(i, parameter),
        " should be dense, and of float32, float64, bfloat16 or float16; omit it");
    TORCH_CHECK(
        parameter.is_leaf() && !parameter.is_inference(),
        "GradBuckets: ", detail::describe_param(i, parameter),
        " is not a leaf, or is an inference tensor; pass the tensor that the module registered, "
        "made outside c10::InferenceMode");
    TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second,
                "GradBuckets: ", detail::describe_param(i, parameter),
                " appears twice, as a weight that two modules share does in model->parameters(); "
                "pass it once");
  }
  detail::TensorGroups<std::optional<std::size_t>> open;  // bucket being filled
  std::vector<int64_t> lengths;                           // of the buckets, in elements
  std::vector<int64_t> offsets(parameters.size());
  for (std::size_t param_index = parameters.size(); param_index-- > 0;) {
    const at::Tensor& parameter = parameters[param_index];
    const at::ScalarType dtype = gradient_dtype(parameter);
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    std::optional<std::size_t>& bucket = open.get(parameter.device(), dtype);
    if (!bucket || (lengths[*bucket] + parameter.numel()) * size > options.bucket_cap_bytes) {
      bucket = buckets_.size();
      buckets_.push_back({parameter.device(), dtype, {}, {}});
      lengths.push_back(0);
    }
    int64_t& length = lengths[*bucket];
    offsets[param_index] = length;
    const int64_t aligned = kAlignment / size;
    length = (length + parameter.numel() + aligned - 1) / aligned * aligned;
    buckets_[*bucket].param_indices.push_back(param_index);
  }
  const c10::InferenceMode no_inference(false);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    FlatGradBucket& bucket = buckets_[i];
    bucket.buffer = at::zeros({lengths[i]}, at::TensorOptions(bucket.dtype).device(bucket.device));
    for (const std::size_t param_index : bucket.param_indices) {
      const at::Tensor& parameter = parameters[param_index];
      const at::Tensor like = parameter.is_non_overlapping_and_dense()
                                  ? parameter
                                  : at::empty(parameter.sizes(), at::TensorOptions(at::kMeta));
      bucket_views_[param_index] = at::empty({0}, bucket.buffer.options());
      bucket_views_[param_index].set_(bucket.buffer.storage(), offsets[param_index],
                                      parameter.sizes(), like.strides());
    }
  }
}

/// Clones gradients that are the bucket view of another parameter, as after `std::swap` of two
/// `.grad`s, which copy_grad_to_bucket would overwrite.
inline void GradBuckets::clone_swapped_gradients() {
  const c10::NoGradGuard no_grad;
  std::unordered_set<const c10::StorageImpl*> buffers;
  for (const FlatGradBucket& bucket : buckets_) {
    buffers.insert(bucket.buffer.storage().unsafeGetStorageImpl());
  }
  for (std::size_t param_index = 0; param_index < parameters_.size(); ++param_index) {
    at::Tensor& gradient = parameters_[param_index].mutable_grad();
    if (!gradient.defined() || gradient.is_same(bucket_views_[param_index]) ||
        !gradient.has_storage())
      continue;
    const bool is_in_other_view =
        gradient.const_data_ptr() != bucket_views_[param_index].const_data_ptr() &&
        buffers.contains(gradient.storage().unsafeGetStorageImpl());
    if (is_in_other_view) gradient = gradient.detach().clone();
  }
}

inline void GradBuckets::copy_grad_to_bucket(std::size_t param_index) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& parameter = parameters_[param_index];
  const at::Tensor& view = bucket_views_[param_index];
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  TORCH_CHECK(parameter.device() == view.device() && parameter.sizes() == view.sizes() &&
                  gradient_dtype(parameter) == view.scalar_type(),
              "GradBuckets: gradients of ", detail::describe_param(param_index, parameter),
              " are in ", detail::dtype_name(gradient_dtype(parameter)),
              ", and their bucket view is ", detail::describe(view),
              "; cast and move the model first, and choose the gradients' dtype "
              "(accumulate_in_float, set_grad_dtype), then construct the GradBuckets (or the "
              "DistributedDataParallel that has them)");
  TORCH_CHECK(
      gradient.layout() == at::kStrided && detail::is_training_dtype(gradient.scalar_type()) &&
          gradient.device() == view.device() && gradient.sizes() == view.sizes(),
      "GradBuckets: the gradient of ", detail::describe_param(param_index, parameter), " is ",
      detail::describe(gradient),
      "; it should be dense, of the parameter's shape and device: set mutable_grad() to such a "
      "tensor, or to torch::Tensor()");
  TORCH_CHECK(!detail::is_low_precision(view) || gradient.scalar_type() != at::kFloat,
              "GradBuckets: the gradient of ", detail::describe_param(param_index, parameter),
              " is float32, and its bucket would round it to ",
              detail::dtype_name(view.scalar_type()),
              "; take the step and zero_grad() before the next backward pass, or accumulate in "
              "float32: call accumulate_in_float before the GradBuckets (or the "
              "DistributedDataParallel that has them) are constructed");
  const bool is_in_place = gradient.scalar_type() == view.scalar_type() &&
                           gradient.const_data_ptr() == view.const_data_ptr() &&
                           gradient.strides() == view.strides() && !gradient.is_neg();
  if (!is_in_place) view.copy_(gradient.detach());
  gradient = view;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
