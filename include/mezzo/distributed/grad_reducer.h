/// \file
/// Gradients averaged over the ranks, bucket by bucket, under the rest of the backward pass.
#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

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

/// How gradients are reduced. All ranks have the same options; GradReducer's constructor compares
/// them.
struct GradReducerOptions {
  /// The most bytes of a bucket of gradients; > 0. A bucket is sent as soon as it is complete:
  /// smaller ones are sent earlier, larger ones cost fewer calls.
  int64_t bucket_cap_bytes = kDefaultBucketCapBytes;
  /// bfloat16 or half: gradients of float and double are sent in this dtype, divided by the number
  /// of ranks and rounded to nearest, so that only an average that the dtype cannot hold overflows.
  /// half needs a loss scale. Takes 2 bytes an element beside the buffer.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

namespace detail {

/// Reduces gradients during backward passes:
///
///   a gradient arrives          it goes to its place; its bucket has one fewer to wait for
///   a bucket waits for none     it is sent, after all buckets before it, alike on all ranks
///   the pass ends               the other buckets are sent with zeros for what has not arrived, and
///                               a map of which parameters have a gradient; all sums are awaited
class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(const std::vector<at::Tensor>& parameters, BackendPtr backend,
          const GradReducerOptions& options)
      : backend_(check_backend(std::move(backend), "GradReducer")),
        reduce_dtype_(options.reduce_dtype),
        backend_averages_(backend_->getBackendName() == "mpi"),
        buckets_(parameters, {.bucket_cap_bytes = options.bucket_cap_bytes}),
        bucket_of_(parameters.size()) {
    TORCH_CHECK(!reduce_dtype_ || *reduce_dtype_ == at::kBFloat16 || *reduce_dtype_ == at::kHalf,
                "GradReducer: `reduce_dtype` must be bfloat16 or half, but is ",
                reduce_dtype_.value_or(at::kFloat));
    for (std::size_t i = 0; i < buckets_.buckets().size(); ++i) {
      for (const std::size_t number : buckets_.buckets()[i].parameters) bucket_of_[number] = i;
    }
    if (backend_->getSize() > 1) {
      check_equal_on_all_ranks(backend_, "GradReducer", describe(),
                               "give all ranks the same parameters and options");
    }
  }

  GradBuckets& buckets() noexcept { return buckets_; }

  void install_hooks() {
    for (std::size_t number = 0; number < buckets_.parameters().size(); ++number) {
      const at::Tensor& parameter = buckets_.parameters()[number];
      torch::autograd::impl::materialize_autograd_meta(parameter);
      auto& previous = torch::autograd::impl::post_acc_grad_hooks(parameter);
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter, std::make_unique<Hook>(weak_from_this(), number, std::move(previous)));
    }
  }

  /// Takes the hooks away. A hook under another owner's stays, and only calls the one before it.
  void remove_hooks() {
    for (const at::Tensor& parameter : buckets_.parameters()) {
      auto* link = &torch::autograd::impl::post_acc_grad_hooks(parameter);
      while (auto* const hook = dynamic_cast<Hook*>(link->get())) {
        if (hook->reducer.lock().get() == this) {
          auto previous = std::move(hook->previous);
          *link = std::move(previous);
          break;
        }
        link = &hook->previous;
      }
    }
  }

  void add_no_sync(int change) {
    const std::lock_guard lock(mutex_);
    no_sync_ += change;
  }
  bool is_no_sync() {
    const std::lock_guard lock(mutex_);
    return no_sync_ > 0;
  }

 private:
  /// Hears that a gradient is there. A tensor has one slot for such a hook, so this hook keeps, and
  /// calls first, the one that it found there.
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    Hook(std::weak_ptr<Reducer> of, std::size_t of_number,
         std::unique_ptr<torch::autograd::PostAccumulateGradHook> found)
        : reducer(std::move(of)), number(of_number), previous(std::move(found)) {}

    void operator()(const at::Tensor& parameter) override {
      if (previous != nullptr) (*previous)(parameter);
      if (const auto alive = reducer.lock()) alive->mark_ready(number);
    }

    std::weak_ptr<Reducer> reducer;
    std::size_t number;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous;
  };

  /// A backward pass that has not ended: libtorch's number of the pass, and a pointer that expires
  /// when the pass ends or throws.
  struct BackwardPass {
    int number;
    std::weak_ptr<void> life;
  };

  /// A bucket under way: what is sent of it, which is `flat` itself where nothing is compressed.
  struct InFlightBucket {
    at::Tensor flat, sent;
    WorkPtr work;
  };

  /// Returns a line for each thing in which ranks must not differ.
  std::string describe() const {
    std::ostringstream lines;
    lines << "reduce_dtype: ";
    reduce_dtype_ ? lines << *reduce_dtype_ : lines << "none";
    lines << '\n';
    for (std::size_t i = 0; i < buckets_.parameters().size(); ++i) {
      const at::Tensor& parameter = buckets_.parameters()[i];
      lines << "parameter " << i << ": " << parameter.scalar_type() << ' ' << parameter.sizes()
            << " in bucket " << bucket_of_[i] << '\n';
    }
    return lines.str();
  }

  /// Called by the hook of parameter `number`, on one of autograd's threads.
  void mark_ready(std::size_t number) {
    const std::lock_guard lock(mutex_);
    if (no_sync_ > 0) return;
    begin_backward_pass();
    const at::Tensor& parameter = buckets_.parameters()[number];
    TORCH_CHECK(!parameter.grad().requires_grad(), "GradReducer on rank ", backend_->getRank(),
                ": the gradient of ", describe_param(number, parameter),
                " has a history (create_graph), which ends with this process; run that backward "
                "pass without synchronisation (no_sync)");
    TORCH_CHECK(bucket_of_[number] >= next_, "GradReducer on rank ", backend_->getRank(),
                ": the gradient of ", describe_param(number, parameter),
                " came once more in one backward pass, after its bucket was sent: a pass inside of "
                "this one reached it; use mezzo::activation_checkpoint, which runs none over "
                "parameters, or call the shared layer outside of other checkpoints");
    buckets_.copy_grad_to_bucket(number);
    if (std::exchange(is_ready_[number], true)) return;
    --pending_grads_[bucket_of_[number]];
    while (next_ < pending_grads_.size() && pending_grads_[next_] == 0) all_reduce_bucket(next_++);
  }

  /// Throws where another reducer averages a gradient too. Called in the first pass, for a reducer
  /// may be made before the one that it replaces is destroyed.
  void check_no_other_reducer() const {
    for (std::size_t number = 0; number < bucket_of_.size(); ++number) {
      const at::Tensor& parameter = buckets_.parameters()[number];
      const auto* link = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
      while (const auto* const hook = dynamic_cast<const Hook*>(link)) {
        const auto alive = hook->reducer.lock();
        TORCH_CHECK(
            alive == nullptr || alive.get() == this, "GradReducer on rank ", backend_->getRank(),
            ": the gradient of ", describe_param(number, parameter),
            " is reduced by another DistributedDataParallel, GradReducer or ShardedOptimizer too; "
            "leave it to one of them, and destroy the other");
        link = hook->previous.get();
      }
    }
  }

  /// Called at each gradient. A pass that runs inside another, as a checkpoint's does, belongs to
  /// the outer one, unless it reaches the parameters first.
  void begin_backward_pass() {
    std::erase_if(passes_, [](const BackwardPass& pass) { return pass.life.expired(); });
    const int number = torch::autograd::get_current_graph_task_id();
    const auto is_this = [number](const BackwardPass& pass) { return pass.number == number; };
    if (std::any_of(passes_.begin(), passes_.end(), is_this)) return;
    if (passes_.empty()) {
      TORCH_CHECK(!is_running_ || backend_->getSize() == 1, "GradReducer on rank ",
                  backend_->getRank(),
                  ": an earlier backward pass did not end, so the ranks are no longer in step; "
                  "begin again from a checkpoint on all ranks");
      if (!checked_no_other_reducer_) check_no_other_reducer();
      checked_no_other_reducer_ = true;
      is_running_ = true;
      next_ = 0;
      is_ready_.assign(bucket_of_.size(), false);
      pending_grads_.assign(buckets_.buckets().size(), 0);
      for (std::size_t i = 0; i < bucket_of_.size(); ++i) {
        if (buckets_.parameters()[i].requires_grad()) ++pending_grads_[bucket_of_[i]];
      }
    }
    const auto life = std::make_shared<int>();
    passes_.push_back({number, life});
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this(), number, life] {
          if (const auto alive = weak.lock()) alive->finalize_backward(number);
        });
  }

  /// Begins to sum a bucket, whose `flat` no other code touches until the pass ends.
  void all_reduce_bucket(std::size_t bucket) {
    const c10::NoGradGuard no_grad;
    if (backend_->getSize() == 1) return;
    const at::Tensor& flat = buckets_.buckets()[bucket].buffer;
    const bool is_compressed = reduce_dtype_ && !is_low_precision(flat);
    const bool averages = backend_averages_ && !is_compressed;
    if (!averages) flat.div_(backend_->getSize());
    const at::Tensor sent = is_compressed ? flat.to(*reduce_dtype_) : flat;
    in_flight_.push_back(
        {flat, sent,
         all_reduce(backend_, sent, averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM)});
  }

  void finalize_backward(int number) {
    const std::lock_guard lock(mutex_);
    std::erase_if(passes_, [number](const BackwardPass& pass) { return pass.number == number; });
    if (!passes_.empty()) return;
    const c10::NoGradGuard no_grad;
    for (; next_ < pending_grads_.size(); ++next_) {
      for (const std::size_t parameter : buckets_.buckets()[next_].parameters) {
        if (!is_ready_[parameter]) buckets_.copy_grad_to_bucket(parameter);
      }
      all_reduce_bucket(next_);
    }
    if (backend_->getSize() > 1) wait_for_buckets();
    is_running_ = false;
  }

  /// Waits for the sums. A parameter whose gradient only other ranks have made gets its place as
  /// gradient. The host waits for a device only where this rank lacks a gradient.
  void wait_for_buckets() {
    const auto& parameters = buckets_.parameters();
    const at::Tensor has_gradient =
        at::ones({static_cast<int64_t>(parameters.size())},
                 at::TensorOptions(at::kByte).device(buckets_.buckets()[0].device));
    std::vector<std::size_t> lacking;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) continue;
      lacking.push_back(i);
      has_gradient[static_cast<int64_t>(i)].zero_();
    }
    const WorkPtr work = all_reduce(backend_, has_gradient, c10d::ReduceOp::MAX);
    for (const InFlightBucket& one : in_flight_) {
      one.work->wait();
      if (!one.sent.is_same(one.flat)) one.flat.copy_(one.sent);
    }
    in_flight_.clear();
    work->wait();
    if (lacking.empty()) return;
    const at::Tensor anywhere = has_gradient.cpu();
    for (const std::size_t i : lacking) {
      const bool is_elsewhere = anywhere.const_data_ptr<std::uint8_t>()[i] != 0;
      if (is_elsewhere && parameters[i].requires_grad()) {
        parameters[i].mutable_grad() = buckets_.bucket_view(i);
      }
    }
  }

  const BackendPtr backend_;
  const std::optional<at::ScalarType> reduce_dtype_;
  const bool backend_averages_;  // the backend rounds averages once; others divide before they add
  GradBuckets buckets_;
  std::vector<std::size_t> bucket_of_;  // of each parameter

  std::mutex mutex_;                        // guards what follows
  int no_sync_ = 0;                         // how many guards there are
  std::vector<BackwardPass> passes_;        // several where one runs inside another
  bool checked_no_other_reducer_ = false;   // no other reducer averages a gradient of these
  bool is_running_ = false;                 // a pass has begun and not ended well
  std::vector<char> is_ready_;              // a parameter, in this pass
  std::vector<std::size_t> pending_grads_;  // of each bucket: gradients that are still to come
  std::size_t next_ = 0;                    // the bucket to send next
  std::vector<InFlightBucket> in_flight_;
};

}  // namespace detail

/// A guard under which backward passes only accumulate on this rank: for all micro-batches but the
/// last, as DistributedDataParallel's `no_sync`. Copies guard together; any may outlive what made
/// it.
using NoSyncGuard = std::shared_ptr<void>;

/// Averages gradients over the ranks: while a GradReducer lives, every backward pass over its
/// parameters ends with the gradients in `.grad` that one process with the batches of all ranks
/// would have, as views of GradBuckets. Any code may read or clip them, or step with them.
///
/// \code
///   mezzo::GradReducer all_reduce(model->parameters(), world);
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   for (auto& batch : *part_of_this_rank) {
///     optimizer.zero_grad();
///     loss(model, batch).backward();                 // returns when all buckets have been reduced
///     optimizer.step();
///   }
/// \endcode
///
/// Each gradient is divided by the number of ranks, so that in half it overflows only where the
/// scaled average does, and buckets are summed in their order while the pass makes the other
/// gradients. Gradients that were accumulated before the pass are averaged with it. A parameter
/// that a pass reaches on some ranks only gets the average on all, with zeros from the other ranks;
/// a parameter that no rank has reached keeps its undefined gradient.
///
/// All ranks have the same parameters in the same order, the same options, and as many backward
/// passes. Each parameter gets a post-accumulate hook, which first calls the hook that was there.
/// Errors, also those of the backend, and a second one that reduces a parameter, are thrown by
/// `backward()`; the ranks are then out of step: begin again from a checkpoint. One backward pass
/// at a time may reach the parameters.
class GradReducer {
 public:
  /// All ranks call it together, and compare their parameters and options.
  /// \throws c10::Error if `backend` is null or an option is wrong; on all ranks, naming the first one
  ///   whose parameters or options differ
  GradReducer(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> backend,
              const GradReducerOptions& options = {})
      : reducer_(std::make_shared<detail::Reducer>(parameters, std::move(backend), options)) {
    reducer_->install_hooks();
  }
  /// Removes the hooks. Gradients stay where they are.
  ~GradReducer() { reducer_->remove_hooks(); }
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  /// Returns the buckets of the gradients.
  GradBuckets& buckets() noexcept { return reducer_->buckets(); }

  /// Returns a guard under which backward passes only accumulate on this rank.
  [[nodiscard]] NoSyncGuard no_sync() {
    reducer_->add_no_sync(1);
    return {reducer_.get(), [reducer = reducer_](void*) { reducer->add_no_sync(-1); }};
  }
  /// Returns whether there is such a guard.
  bool is_no_sync() const { return reducer_->is_no_sync(); }

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
