/// \file
/// Gradients of many parameters in a few flat buffers.
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

/// 25 MiB, the default of libtorch's DistributedDataParallel.
inline constexpr int64_t kDefaultBucketBytes = int64_t{25} << 20;

/// Options of GradBuckets.
struct GradBucketsOptions {
  /// The most bytes that a bucket holds, except for one parameter that is larger; > 0.
  int64_t bucket_bytes = kDefaultBucketBytes;
};

/// Parameters whose gradients lie in one buffer.
struct GradBucket {
  /// The device of the parameters and of the buffer.
  at::Device device;
  /// The gradients' dtype: `parameter.grad_dtype()`, which is the parameter's own dtype unless
  /// somebody has called `set_grad_dtype`.
  at::ScalarType dtype;
  /// Indices into GradBuckets::parameters, in the order in which the gradients lie.
  std::vector<std::size_t> parameters;
  /// The buffer, one dimension. Each gradient begins at a multiple of 64 bytes; the gaps between
  /// gradients are zero.
  at::Tensor flat;
};

/// Keeps the gradients of a set of parameters in flat buffers, by device and dtype, so that ranks
/// exchange a few long messages, and the kernels that unscale, check and take norms walk a few long
/// rows (on CUDA with fewer launches) in place of one for each parameter. After a backward pass
/// call reattach_gradients(); docs/data-parallel.md has the loop.
///
/// Buckets are in reverse order of the parameters, roughly the order in which a backward pass makes
/// gradients. Use them from one thread at a time.
class GradBuckets {
 public:
  /// \param parameters  leaves of float32, float64, bfloat16 or float16, each once; they need not
  ///   require grad
  /// \throws c10::Error naming the parameter or the option
  inline explicit GradBuckets(const std::vector<at::Tensor>& parameters,
                              const GradBucketsOptions& options = {});

  /// Returns the parameters, in the order in which they were given.
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  /// Returns the buckets.
  const std::vector<GradBucket>& buckets() const noexcept { return buckets_; }
  /// Returns the view of a bucket where the gradient of parameter `number` lies, laid out like the
  /// parameter.
  const at::Tensor& place(std::size_t number) const { return places_[number]; }

  /// Brings every gradient to its place, converted to the bucket's dtype, and makes `.grad` the
  /// view. Where a parameter has no gradient, its part of the buffer becomes zero.
  /// \throws c10::Error, naming the parameter, if a gradient is not dense, has another shape or
  ///   device than its parameter, or is of float and its bucket of 16 bits
  void reattach_gradients() {
    copy_exchanged_gradients();
    for (std::size_t number = 0; number < parameters_.size(); ++number) {
      reattach_gradient(number);
    }
  }
  /// Does what reattach_gradients does, for parameter `number` alone.
  inline void reattach_gradient(std::size_t number);

  /// Does what `Module::zero_grad` does: undefines all gradients, or with `false` sets those that
  /// are defined to zero, with one fill a bucket.
  void zero_grad(bool set_to_none = true) {
    const c10::NoGradGuard no_grad;
    if (!set_to_none) {
      for (const GradBucket& bucket : buckets_) bucket.flat.zero_();
    }
    for (std::size_t number = 0; number < parameters_.size(); ++number) {
      at::Tensor& gradient = parameters_[number].mutable_grad();
      if (gradient.defined()) gradient = set_to_none ? at::Tensor() : places_[number];
    }
  }

 private:
  inline void copy_exchanged_gradients();
  /// Returns the dtype in which autograd adds up the parameter's gradients.
  static at::ScalarType gradient_dtype(const at::Tensor& parameter) {
    const at::ScalarType dtype = parameter.grad_dtype().value_or(parameter.scalar_type());
    return detail::is_training_dtype(dtype) ? dtype : parameter.scalar_type();
  }

  std::vector<at::Tensor> parameters_;
  std::vector<GradBucket> buckets_;
  std::vector<at::Tensor> places_;  // with version counters of their own
};

inline GradBuckets::GradBuckets(const std::vector<at::Tensor>& parameters,
                                const GradBucketsOptions& options)
    : parameters_(parameters), places_(parameters.size()) {
  constexpr int64_t kAlignment = 64;
  TORCH_CHECK(options.bucket_bytes > 0, "GradBuckets: bucket_bytes is ", options.bucket_bytes,
              "; it must be greater than 0");
  std::unordered_set<const at::TensorImpl*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    TORCH_CHECK(parameter.defined(), "GradBuckets: parameter ", i, " is undefined; leave it out");
    TORCH_CHECK(
        parameter.layout() == at::kStrided && detail::is_training_dtype(parameter.scalar_type()),
        "GradBuckets: ", detail::describe_param(i, parameter),
        " should be dense, and of float32, float64, bfloat16 or float16; leave it out");
    TORCH_CHECK(parameter.is_leaf() && !parameter.is_inference(),
                "GradBuckets: ", detail::describe_param(i, parameter),
                " is no leaf, or was made under c10::InferenceMode; give the tensor that the "
                "module registered, made outside of inference mode");
    TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second,
                "GradBuckets: ", detail::describe_param(i, parameter),
                " is given twice, as model->parameters() gives a weight that two modules share; "
                "give it once");
  }
  detail::TensorGroups<std::optional<std::size_t>> open;  // buckets that are filled
  std::vector<int64_t> lengths;                           // of the buckets
  std::vector<int64_t> offsets(parameters.size());
  for (std::size_t number = parameters.size(); number-- > 0;) {
    const at::Tensor& parameter = parameters[number];
    const at::ScalarType dtype = gradient_dtype(parameter);
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    std::optional<std::size_t>& bucket = open.get(parameter.device(), dtype);
    if (!bucket || (lengths[*bucket] + parameter.numel()) * size > options.bucket_bytes) {
      bucket = buckets_.size();
      buckets_.push_back({parameter.device(), dtype, {}, {}});
      lengths.push_back(0);
    }
    int64_t& length = lengths[*bucket];
    offsets[number] = length;
    const int64_t aligned = kAlignment / size;
    length = (length + parameter.numel() + aligned - 1) / aligned * aligned;
    buckets_[*bucket].parameters.push_back(number);
  }
  const c10::InferenceMode no_inference(false);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    GradBucket& bucket = buckets_[i];
    bucket.flat = at::zeros({lengths[i]}, at::TensorOptions(bucket.dtype).device(bucket.device));
    for (const std::size_t number : bucket.parameters) {
      const at::Tensor& parameter = parameters[number];
      const at::Tensor like = parameter.is_non_overlapping_and_dense()
                                  ? parameter
                                  : at::empty(parameter.sizes(), at::TensorOptions(at::kMeta));
      places_[number] = at::empty({0}, bucket.flat.options());
      places_[number].set_(bucket.flat.storage(), offsets[number], parameter.sizes(),
                           like.strides());
    }
  }
}

/// Clones gradients that are views of another parameter's slice, as after two `.grad`s were
/// swapped: reattaching the other parameter would overwrite them.
inline void GradBuckets::copy_exchanged_gradients() {
  const c10::NoGradGuard no_grad;
  std::unordered_set<const c10::StorageImpl*> buffers;
  for (const GradBucket& bucket : buckets_) {
    buffers.insert(bucket.flat.storage().unsafeGetStorageImpl());
  }
  for (std::size_t number = 0; number < parameters_.size(); ++number) {
    at::Tensor& gradient = parameters_[number].mutable_grad();
    if (!gradient.defined() || gradient.is_same(places_[number]) || !gradient.has_storage())
      continue;
    const bool is_elsewhere = gradient.const_data_ptr() != places_[number].const_data_ptr() &&
                              buffers.contains(gradient.storage().unsafeGetStorageImpl());
    if (is_elsewhere) gradient = gradient.detach().clone();
  }
}

inline void GradBuckets::reattach_gradient(std::size_t number) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& parameter = parameters_[number];
  const at::Tensor& place = places_[number];
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) {
    place.zero_();
    return;
  }
  TORCH_CHECK(parameter.device() == place.device() && parameter.sizes() == place.sizes() &&
                  gradient_dtype(parameter) == place.scalar_type(),
              "GradBuckets: gradients of ", detail::describe_param(number, parameter), " are in ",
              detail::dtype_name(gradient_dtype(parameter)), ", and their place is ",
              detail::describe(place),
              "; cast and move the model first, and choose the gradients' dtype "
              "(accumulate_in_float, set_grad_dtype), then make these GradBuckets (or the "
              "DataParallel that made them)");
  TORCH_CHECK(gradient.layout() == at::kStrided &&
                  detail::is_training_dtype(gradient.scalar_type()) &&
                  gradient.device() == place.device() && gradient.sizes() == place.sizes(),
              "GradBuckets: the gradient of ", detail::describe_param(number, parameter), " is ",
              detail::describe(gradient),
              "; it should be dense, and of its parameter's shape and device: set the parameter's "
              "mutable_grad() to such a tensor, or to torch::Tensor()");
  TORCH_CHECK(
      !detail::is_low_precision(place) || gradient.scalar_type() != at::kFloat,
      "GradBuckets: the gradient of ", detail::describe_param(number, parameter),
      " is float32, and its bucket would round it to ", detail::dtype_name(place.scalar_type()),
      "; take the step and zero_grad() before the next backward pass, or keep gradients in "
      "float32: call accumulate_in_float before these GradBuckets (or the DataParallel that "
      "made them) are made");
  const bool is_in_place = gradient.scalar_type() == place.scalar_type() &&
                           gradient.const_data_ptr() == place.const_data_ptr() &&
                           gradient.strides() == place.strides() && !gradient.is_neg();
  if (!is_in_place) place.copy_(gradient.detach());
  gradient = place;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
