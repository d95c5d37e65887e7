#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_statistics.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/grad_bucket.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Which gradient a read was of, and in which state. Holds it weakly: its memory goes when the user
/// lets it go, and yet no other tensor can come to lie at the same address meanwhile.
class ReadMark {
 public:
  void set(const at::Tensor& gradient, const at::Tensor& flat) {
    if (gradient.is_inference()) return clear();  // whose changes nobody counts
    gradient_.emplace(gradient.getIntrusivePtr());
    data_ = gradient.const_data_ptr();
    version_ = gradient._version();
    flat_version_ = flat.defined() ? flat._version() : 0;
  }
  void clear() { gradient_.reset(); }

  bool holds_for(const at::Tensor& gradient, const at::Tensor& flat) const {
    return gradient_.has_value() && !gradient_->expired() &&
           gradient_->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
           data_ == gradient.const_data_ptr() && version_ == gradient._version() &&
           flat_version_ == (flat.defined() ? flat._version() : 0);
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::optional<WeakTensor> gradient_;
  const void* data_ = nullptr;
  int64_t version_ = 0;
  int64_t flat_version_ = 0;
};

/// A parameter and the place of its gradient.
struct GradientSlot {
  at::Tensor parameter;
  std::size_t bucket = 0;

  // Flat storage. The place has a version counter of its own: changing one gradient says nothing
  // of the others of its bucket.
  at::Tensor place;
  bool may_be_nonzero = false;

  bool is_hooked = false;
  bool has_arrived = false;  // in this backward pass
  bool is_pending = false;   // waits in the queue of those to be read

  ReadMark mark;               // of the read that the partial results come from
  GradientPartial partial;     // on the CPU
  at::Tensor device_partials;  // on CUDA, several as bytes

  const at::Tensor& gradient() const { return parameter.grad(); }
  bool has_dense_gradient() const {
    return gradient().defined() && gradient().layout() == at::kStrided;
  }
};

/// Whether the gradient's memory holds its elements in the order of the parameter's.
inline bool is_laid_out_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.is_non_overlapping_and_dense() && !gradient.is_neg() && !gradient.is_conj() &&
         !gradient._is_zerotensor() &&
         torch::autograd::utils::obeys_layout_contract(gradient, parameter);
}

inline bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

/// Whether a gradient of the parameter as it is now can lie in the place that was made for it.
inline bool fits_place(const GradientSlot& slot) {
  return slot.parameter.scalar_type() == slot.place.scalar_type() &&
         slot.parameter.device() == slot.place.device() &&
         slot.parameter.sizes() == slot.place.sizes();
}

/// Whether the slot's gradient is the memory that is meant for it, by whatever name.
inline bool is_in_place(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.gradient();
  return shares_storage(gradient, slot.place) &&
         gradient.storage_offset() == slot.place.storage_offset() &&
         is_laid_out_like(gradient, slot.parameter);
}

/// \throws c10::Error if the gradient, dense or sparse, cannot be its parameter's
inline void check_gradient(const GradientSlot& slot, std::size_t number) {
  const at::Tensor& gradient = slot.gradient();
  const at::Tensor& parameter = slot.parameter;
  TORCH_CHECK(gradient.layout() == at::kStrided || gradient.is_sparse(),
              "GradBuckets: the gradient of ", parameter_words(number, parameter), " is ",
              tensor_words(gradient), "; make it dense, or sparse in COO layout");
  TORCH_CHECK(gradient.scalar_type() == parameter.scalar_type() &&
                  gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              "GradBuckets: the gradient of ", parameter_words(number, parameter), " is ",
              tensor_words(gradient),
              "; set the parameter's mutable_grad() to a tensor like it, or to torch::Tensor()");
}

/// Gradients of one device for a summary, with the numbers of their parameters.
struct GradientsToRead {
  std::vector<std::size_t> numbers;
  std::vector<at::Tensor> tensors;
};

/// What GradBuckets holds, at an address that hooks can refer to.
class BucketedGradients final : public OptimizerBuckets,
                                public std::enable_shared_from_this<BucketedGradients> {
 public:
  explicit BucketedGradients(const GradBucketsOptions& options) : options_(options) {}

  const GradBucketsOptions& options() const noexcept { return options_; }
  const std::vector<at::Tensor>& parameters() const noexcept override { return parameters_; }
  const std::vector<GradBucket>& buckets() const noexcept { return buckets_; }

  // Virtual ones are declared inline: the first that is not would bring the vtable, and all that it
  // refers to, into every unit.
  inline void add_parameters(const std::vector<at::Tensor>& parameters) override;
  void remove_hooks();
  inline void reattach_gradients() override;
  std::vector<BucketGradient> gradients();
  std::vector<std::size_t> sparse_gradients();
  inline GradientSummary summarize(const at::Tensor& inv_scale) override;
  GradientStatistics statistics(const at::Tensor& inv_scale, at::ScalarType low_precision);
  void forget_reads();
  void zero_grad(bool set_to_none);
  void rebuild_buckets();
  void add_no_sync(int change);
  at::Tensor accumulate_if_finite(const std::function<void()>& backward);
  /// Returns the callback's number.
  int64_t on_ready(std::function<void(std::size_t)> callback);
  /// Takes the callback of that number away, unless another has taken its place.
  void end_ready(int64_t callback);
  bool is_no_sync();

  /// Flat storage: what lies in the place of parameter `number` is its gradient, though this
  /// process made none.
  void adopt_place(std::size_t number);

  /// Flat storage: where the gradient of parameter `number` lies in its bucket, laid out as it.
  const at::Tensor& place(std::size_t number) const { return slots_[number].place; }

  /// Backward passes so far, those that threw included: several at a time, one of which runs inside
  /// another, are one.
  int64_t passes() const noexcept { return passes_; }

  /// How many there are who make these gradients those of all ranks.
  void add_reductions(int change) noexcept { reductions_ += change; }
  /// Whether somebody makes the gradient of parameter `number` that of all ranks in other buckets.
  bool is_reduced_elsewhere(std::size_t number) const;

  /// From the hook of parameter `number`, on one of autograd's threads.
  void arrived(std::size_t number);

 private:
  bool is_flat() const noexcept { return options_.storage() == GradStorage::flat; }
  const at::Tensor& flat_of(const GradientSlot& slot) const { return buckets_[slot.bucket].flat; }

  // Layout (bucketed_gradients_layout.h)
  void check_parameters(const std::vector<at::Tensor>& parameters) const;
  void append_buckets(const std::vector<std::size_t>& order);
  void place_slots(const GradBucket& bucket, const std::vector<int64_t>& offsets);
  void install_hooks();
  void settle(std::size_t number);
  void move_to_place(std::size_t number);

  // Backward (bucketed_gradients_backward.h)
  void begin_pass();
  void end_pass(int pass);
  void finish_pass(std::vector<std::size_t>& ready);
  void forget_pass();
  void take(std::size_t number);
  void read_on_device(GradientSlot& slot, std::size_t number);
  void read_pending();
  bool count_arrival(std::size_t number);

  // Reads (bucketed_gradients_summary.h)
  GradientsToRead gradients_on(at::Device device);
  GradientSummary summarize_on_cpu(const GradientsToRead& to_read, const at::Tensor& inv_scale);
  GradientSummary summarize_on_cuda(const GradientsToRead& to_read, const at::Tensor& inv_scale);

  // Micro-batches (bucketed_gradients_micro_batch.h)
  void check_micro_batch(const std::vector<at::Tensor>& accumulated, bool on_host) const;
  std::vector<at::Device> devices() const;
  at::Tensor any_bad(const at::TensorOptions& flag) const;
  at::Tensor accumulate(std::vector<at::Tensor>& accumulated);

  /// A backward pass that has not ended: libtorch's number of it, and what expires with it, though
  /// it throws.
  struct ActivePass {
    int number;
    std::weak_ptr<void> life;
  };

  GradBucketsOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<GradientSlot> slots_;
  std::vector<GradBucket> buckets_;

  std::atomic<int> reductions_ = 0;
  std::atomic<int64_t> passes_ = 0;

  TableMemory table_memory_;  // of reading many at once on a device

  std::mutex mutex_;  // what follows, and the slots, while hooks run
  std::function<void(std::size_t)> on_ready_;
  int64_t ready_number_ = 0;               // of the callback
  int no_sync_ = 0;                        // how many NoSync guards there are
  std::vector<ActivePass> active_passes_;  // several where one runs inside another
  std::vector<std::size_t> missing_;       // a bucket: how many gradients are still to come
  std::vector<bool> was_ready_;        // a bucket: whether on_ready was called for it in this pass
  std::vector<std::size_t> arrivals_;  // in the order of the last pass
  std::vector<std::size_t> pending_;   // to be read together
  int64_t pending_bytes_ = 0;

  /// Of micro-batches: a bool on the first device, whether what is accumulated is a bad one.
  /// Undefined where it cannot be.
  at::Tensor holds_bad_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
