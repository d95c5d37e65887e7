#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/detail/bucket_hook.h>
#include <mezzo/optim/detail/gradient_slot.h>
#include <mezzo/optim/grad_bucket.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gradients of one device for a summary, with the numbers of their parameters.
struct GradientsToRead {
  std::vector<std::size_t> numbers;
  std::vector<at::Tensor> tensors;
};

/// What GradBuckets holds, at an address that hooks can refer to.
class BucketedGradients : public std::enable_shared_from_this<BucketedGradients> {
 public:
  explicit BucketedGradients(const GradBucketsOptions& options) : options_(options) {}
  BucketedGradients(const BucketedGradients&) = delete;
  BucketedGradients& operator=(const BucketedGradients&) = delete;
  ~BucketedGradients() = default;

  const GradBucketsOptions& options() const noexcept { return options_; }
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  const std::vector<GradBucket>& buckets() const noexcept { return buckets_; }

  void add_parameters(const std::vector<at::Tensor>& parameters);
  void remove_hooks();
  void reattach_gradients();
  std::vector<BucketGradient> gradients();
  std::vector<std::size_t> sparse_gradients();
  GradientSummary summarize(const at::Tensor& inv_scale);
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
