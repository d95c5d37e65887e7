#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/optim/detail/grad_hooks.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// All-reduces gradients during backward passes, as c10d's Reducer:
///
///   a gradient is accumulated    it moves to its bucket
///   a bucket is complete         it is all-reduced, in the order of the buckets
///   the backward pass ends       incomplete buckets are all-reduced, with zeros for missing
///                                gradients, and a map of the parameters that have a gradient;
///                                blocks until all collectives complete
class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(const std::vector<at::Tensor>& parameters, BackendPtr backend, int64_t bucket_cap_bytes,
          std::optional<at::ScalarType> reduce_dtype)
      : backend_(check_backend(std::move(backend), "GradReducer")),
        reduce_dtype_(reduce_dtype),
        backend_averages_(backend_->getBackendName() == "mpi"),
        buckets_(parameters, {.bucket_cap_bytes = bucket_cap_bytes}),
        bucket_indices_(parameters.size()) {
    TORCH_CHECK(!reduce_dtype_ || *reduce_dtype_ == at::kBFloat16 || *reduce_dtype_ == at::kHalf,
                "GradReducer: `reduce_dtype` must be bfloat16 or float16, but is ",
                reduce_dtype_.value_or(at::kFloat));
    for (std::size_t i = 0; i < buckets_.buckets().size(); ++i) {
      for (const std::size_t param : buckets_.buckets()[i].param_indices)
        bucket_indices_[param] = i;
    }
    if (backend_->getSize() > 1) {
      check_equal_on_all_ranks(backend_, "GradReducer", describe_config(),
                               "pass the same parameters and options on all ranks");
    }
  }

  GradBuckets& buckets() noexcept { return buckets_; }

  void install_hooks() {
    for (std::size_t i = 0; i < buckets_.parameters().size(); ++i) {
      install_grad_hook(buckets_.parameters()[i], std::make_unique<Hook>(weak_from_this(), i));
    }
  }

  /// Removes the hooks. A hook that another class has wrapped remains, and only calls the previous
  /// hook.
  void remove_hooks() {
    for (const at::Tensor& parameter : buckets_.parameters()) {
      remove_grad_hook(parameter, [this](const ChainedGradHook& hook) {
        const auto* const own = dynamic_cast<const Hook*>(&hook);
        return own != nullptr && own->reducer.lock().get() == this;
      });
    }
  }

  void add_no_sync(int change) {
    const std::lock_guard lock(mutex_);
    num_no_sync_ += change;
  }
  bool is_no_sync() {
    const std::lock_guard lock(mutex_);
    return num_no_sync_ > 0;
  }

 private:
  struct Hook final : ChainedGradHook {
    Hook(std::weak_ptr<Reducer> owner, std::size_t index)
        : reducer(std::move(owner)), param_index(index) {}

    void on_accumulated(const at::Tensor& /*parameter*/) override {
      if (const auto alive = reducer.lock()) alive->mark_ready(param_index);
    }
    bool completes_later() const override { return !reducer.expired(); }

    std::weak_ptr<Reducer> reducer;
    std::size_t param_index;
  };

  /// A running backward pass. `lifetime` expires when it ends or throws.
  struct BackwardPass {
    int graph_task_id;
    std::weak_ptr<void> lifetime;
  };

  /// A bucket in an all-reduce. `reduced` is `buffer`, or its copy in reduce_dtype.
  struct InFlightBucket {
    at::Tensor buffer, reduced;
    WorkPtr work;
  };

  /// Returns a line for each property that must be equal on all ranks.
  std::string describe_config() const {
    std::ostringstream lines;
    lines << "reduce_dtype: ";
    reduce_dtype_ ? lines << *reduce_dtype_ : lines << "none";
    lines << '\n';
    for (std::size_t i = 0; i < buckets_.parameters().size(); ++i) {
      const at::Tensor& parameter = buckets_.parameters()[i];
      lines << "parameter " << i << ": " << parameter.scalar_type() << ' ' << parameter.sizes()
            << " in bucket " << bucket_indices_[i] << '\n';
    }
    return lines.str();
  }

  /// Called by a parameter's hook, on a thread of autograd.
  void mark_ready(std::size_t param_index) {
    const std::lock_guard lock(mutex_);
    if (num_no_sync_ > 0) return;
    begin_backward_pass();
    const at::Tensor& parameter = buckets_.parameters()[param_index];
    const std::size_t bucket = bucket_indices_[param_index];
    TORCH_CHECK(
        !parameter.grad().requires_grad(), "GradReducer on rank ", backend_->getRank(),
        ": the gradient of ", describe_param(param_index, parameter),
        " requires grad (create_graph=true), but its graph ends with this process; run this "
        "backward pass under no_sync()");
    TORCH_CHECK(bucket >= next_bucket_, "GradReducer on rank ", backend_->getRank(),
                ": Expected to mark a variable ready only once: a nested backward pass accumulated "
                "the gradient of ",
                describe_param(param_index, parameter),
                " again after its bucket was all-reduced; use mezzo::activation_checkpoint, which "
                "runs no nested backward pass over parameters, or call the shared layer outside "
                "other checkpoints");
    buckets_.copy_grad_to_bucket(param_index);
    if (std::exchange(is_ready_[param_index], true)) return;
    --pending_grads_[bucket];
    while (next_bucket_ < pending_grads_.size() && pending_grads_[next_bucket_] == 0) {
      all_reduce_bucket(next_bucket_++);
    }
  }

  /// Throws if another reducer averages one of the gradients. Called in the first backward pass,
  /// because a reducer may be constructed before the one that it replaces is destroyed.
  void check_no_other_reducer() const {
    for (std::size_t i = 0; i < bucket_indices_.size(); ++i) {
      const at::Tensor& parameter = buckets_.parameters()[i];
      const auto is_other_reducer = [this](const ChainedGradHook& hook) {
        const auto* const other = dynamic_cast<const Hook*>(&hook);
        const auto alive = other != nullptr ? other->reducer.lock() : nullptr;
        return alive != nullptr && alive.get() != this;
      };
      TORCH_CHECK(
          find_grad_hook(parameter, is_other_reducer) == nullptr, "GradReducer on rank ",
          backend_->getRank(), ": the gradient of ", describe_param(i, parameter),
          " is reduced by another DistributedDataParallel, GradReducer or ShardedOptimizer too; "
          "use one of them, and destroy the other");
    }
  }

  /// Called for each gradient. A nested pass, as of a reentrant checkpoint, belongs to the outer
  /// one, unless it reaches the parameters first.
  void begin_backward_pass() {
    std::erase_if(passes_, [](const BackwardPass& pass) { return pass.lifetime.expired(); });
    const int id = torch::autograd::get_current_graph_task_id();
    const auto is_current = [id](const BackwardPass& pass) { return pass.graph_task_id == id; };
    if (std::any_of(passes_.begin(), passes_.end(), is_current)) return;
    if (passes_.empty()) {
      TORCH_CHECK(!is_running_ || backend_->getSize() == 1, "GradReducer on rank ",
                  backend_->getRank(),
                  ": Expected to have finished reduction in the prior iteration before starting a "
                  "new one: an earlier backward pass threw, so that the ranks are out of sync; "
                  "restart all ranks from a checkpoint");
      if (!checked_no_other_reducer_) check_no_other_reducer();
      checked_no_other_reducer_ = true;
      is_running_ = true;
      next_bucket_ = 0;
      is_ready_.assign(bucket_indices_.size(), false);
      pending_grads_.assign(buckets_.buckets().size(), 0);
      for (std::size_t i = 0; i < bucket_indices_.size(); ++i) {
        if (buckets_.parameters()[i].requires_grad()) ++pending_grads_[bucket_indices_[i]];
      }
    }
    const auto lifetime = std::make_shared<int>();
    passes_.push_back({id, lifetime});
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this(), id, lifetime] {
          if (const auto alive = weak.lock()) alive->finalize_backward(id);
        });
  }

  /// Starts the all-reduce of a bucket, whose buffer is not accessed until the pass ends.
  void all_reduce_bucket(std::size_t bucket) {
    const c10::NoGradGuard no_grad;
    if (backend_->getSize() == 1) return;
    const at::Tensor& buffer = buckets_.buckets()[bucket].buffer;
    const bool is_cast = reduce_dtype_ && !is_low_precision(buffer);
    const bool averages = backend_averages_ && !is_cast;
    if (!averages) buffer.div_(backend_->getSize());
    const at::Tensor reduced = is_cast ? buffer.to(*reduce_dtype_) : buffer;
    in_flight_.push_back(
        {buffer, reduced,
         all_reduce(backend_, reduced, averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM)});
  }

  void finalize_backward(int graph_task_id) {
    const std::lock_guard lock(mutex_);
    std::erase_if(passes_, [graph_task_id](const BackwardPass& pass) {
      return pass.graph_task_id == graph_task_id;
    });
    if (!passes_.empty()) return;
    const c10::NoGradGuard no_grad;
    for (; next_bucket_ < pending_grads_.size(); ++next_bucket_) {
      for (const std::size_t param : buckets_.buckets()[next_bucket_].param_indices) {
        if (!is_ready_[param]) buckets_.copy_grad_to_bucket(param);
      }
      all_reduce_bucket(next_bucket_);
    }
    if (backend_->getSize() > 1) {
      wait_for_buckets();
    } else {
      for (std::size_t i = 0; i < buckets_.buckets().size(); ++i) notify_bucket_complete(i);
    }
    is_running_ = false;
  }

  void notify_bucket_complete(std::size_t bucket) const {
    for (const std::size_t param : buckets_.buckets()[bucket].param_indices) {
      notify_grad_complete(buckets_.parameters()[param]);
    }
  }

  /// Waits for all collectives. A parameter that has a gradient only on other ranks gets its bucket
  /// view as gradient. Synchronizes with a device only if this rank lacks a gradient.
  void wait_for_buckets() {
    const auto& parameters = buckets_.parameters();
    const at::Tensor has_grad =
        at::ones({static_cast<int64_t>(parameters.size())},
                 at::TensorOptions(at::kByte).device(buckets_.buckets()[0].device));
    std::vector<std::size_t> params_without_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) continue;
      params_without_grad.push_back(i);
      has_grad[static_cast<int64_t>(i)].zero_();
    }
    const WorkPtr work = all_reduce(backend_, has_grad, c10d::ReduceOp::MAX);
    for (std::size_t i = 0; i < in_flight_.size(); ++i) {  // bucket i
      const InFlightBucket& bucket = in_flight_[i];
      bucket.work->wait();
      if (!bucket.reduced.is_same(bucket.buffer)) bucket.buffer.copy_(bucket.reduced);
      notify_bucket_complete(i);
    }
    in_flight_.clear();
    work->wait();
    if (params_without_grad.empty()) return;
    const at::Tensor has_grad_on_any_rank = has_grad.cpu();
    for (const std::size_t i : params_without_grad) {
      const bool has_average = has_grad_on_any_rank.const_data_ptr<std::uint8_t>()[i] != 0;
      if (has_average && parameters[i].requires_grad()) {
        parameters[i].mutable_grad() = buckets_.bucket_view(i);
        notify_grad_complete(parameters[i]);
      }
    }
  }

  const BackendPtr backend_;
  const std::optional<at::ScalarType> reduce_dtype_;
  const bool backend_averages_;  // rounds averages once; with other backends, divide before the sum
  GradBuckets buckets_;
  std::vector<std::size_t> bucket_indices_;  // by parameter

  std::mutex mutex_;  // guards the members below
  int num_no_sync_ = 0;
  std::vector<BackwardPass> passes_;  // several if nested
  bool checked_no_other_reducer_ = false;
  bool is_running_ = false;                 // a pass has begun and not completed
  std::vector<char> is_ready_;              // by parameter, in this pass
  std::vector<std::size_t> pending_grads_;  // by bucket
  std::size_t next_bucket_ = 0;             // to all-reduce
  std::vector<InFlightBucket> in_flight_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
