/// \file
/// DistributedDataParallel: trains one model on all ranks.
#pragma once

#include <mezzo/base/model_refs.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/grad_reducer.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of DistributedDataParallel; equal on all ranks.
struct DistributedDataParallelOptions {
  /// Maximum size of a gradient bucket in bytes; see GradReducerOptions.
  int64_t bucket_cap_bytes = kDefaultBucketCapBytes;
  /// Broadcasts buffers (such as running statistics) from rank 0 before each training forward.
  bool broadcast_buffers = true;
  /// bfloat16 or float16: reduces gradients in this dtype; see GradReducerOptions.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

namespace detail {

/// Implementation of DistributedDataParallel that does not depend on the model's type.
class DdpState {
 public:
  DdpState(const torch::nn::Module& module, const BackendPtr& backend,
           const DistributedDataParallelOptions& options)
      : parameters_(collector_.collect(module.named_parameters())),
        buffers_(collector_.collect(module.named_buffers())),
        backend_(check_backend(backend, "DistributedDataParallel")),
        broadcasts_buffers_(options.broadcast_buffers),
        grad_reducer_(
            broadcast_and_get_trainable(), backend,
            {.bucket_cap_bytes = options.bucket_cap_bytes, .reduce_dtype = options.reduce_dtype}) {
    for (const auto& named : parameters_) {
      if (!named.second.requires_grad()) frozen_.push_back(named);
    }
  }

  GradReducer& grad_reducer() noexcept { return grad_reducer_; }

  /// Does not bump version counters, as modules do not when they update running statistics: a
  /// second forward may precede the backward of the first one.
  void broadcast_buffers() const {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, buffer] : buffers_) tensors.push_back(buffer.variable_data());
    broadcast(backend_, tensors, 0);
  }

  void begin_forward(bool is_training) const {
    if (!is_training || !c10::GradMode::is_enabled()) return;
    for (const auto& [name, parameter] : frozen_) {
      TORCH_CHECK(!parameter.requires_grad(), "DistributedDataParallel on rank ",
                  backend_->getRank(), ": the parameter ", name,
                  " was frozen at construction and requires grad now; construct a new "
                  "DistributedDataParallel, so that its gradient is reduced");
    }
    if (broadcasts_buffers_ && !grad_reducer_.is_no_sync()) broadcast_buffers();
  }

 private:
  /// Broadcasts parameters and buffers from rank 0. Returns the parameters that require grad.
  std::vector<at::Tensor> broadcast_and_get_trainable() const {
    TensorsByName all = parameters_;  // buffers are detached: they are not trainable
    for (const auto& [name, buffer] : buffers_) all.emplace_back(name, buffer.detach());
    auto trainable = verify_and_broadcast(
        all, backend_,
        broadcasts_buffers_ ? "broadcast_buffers: on\n" : "broadcast_buffers: off\n");
    TORCH_CHECK(!trainable.empty(), "DistributedDataParallel on rank ", backend_->getRank(),
                ": DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient; call the model directly");
    return trainable;
  }

  UniqueTensorCollector collector_;  // lists tensors once, under their first name
  TensorsByName parameters_, buffers_, frozen_;
  BackendPtr backend_;
  bool broadcasts_buffers_;
  GradReducer grad_reducer_;
};

}  // namespace detail

/// Data-parallel training as torch.nn.parallel.DistributedDataParallel. `backend` is an MpiBackend,
/// make_gloo_backend's, a ProcessGroupNCCL or `process_group->getBackend(torch::kCUDA)`, of all
/// ranks or of a subgroup.
///
/// \code
///   mezzo::DistributedDataParallel ddp(model, world);    // broadcasts rank 0's weights
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   mezzo::GradScaler scaler;
///   for (auto& batch : *rank_loader) {
///     ddp->zero_grad();
///     scaler.scale(criterion(ddp(batch.data), batch.target)).backward();  // averages gradients
///     scaler.step(optimizer, {.max_norm = 1.0});         // on all ranks, or on none
///     scaler.update();
///   }
/// \endcode
///
/// `M` is a module holder (torch::nn::Linear, any TORCH_MODULE, mezzo::AutocastModule) or a
/// std::shared_ptr to a module. The model is shared, not copied: `ddp->` accesses it, and its state
/// dict keeps its keys.
///
/// `backward()` returns scaled gradients that are averaged over the ranks and bitwise identical on
/// all of them, so that all ranks skip the same steps. Parameters that require grad at construction
/// are trained. See GradReducer for parameters that only some ranks use, and for errors. Not
/// thread-safe; `backward()` may run in any thread.
template <detail::ModelHandle M>
class DistributedDataParallel {
 public:
  /// Collective call of all ranks, with models of equal names, shapes, dtypes and requires_grad.
  /// Blocks until rank 0's parameters and buffers are broadcast.
  /// \throws c10::Error for an empty holder and for a model without trainable parameters; on all
  ///   ranks, naming the first rank and the difference, if models or options differ
  explicit DistributedDataParallel(M model, c10::intrusive_ptr<c10d::Backend> backend,
                                   const DistributedDataParallelOptions& options = {})
      : model_(std::move(model)), state_(get_module(), backend, options) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// Calls the model's forward, with its default arguments. Collective call in training (the
  /// module's `is_training()`, gradients enabled, no `no_sync()`), because buffers are broadcast.
  /// \throws c10::Error if a parameter that was frozen at construction requires grad
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    state_.begin_forward(get_module().is_training());
    // AutocastModule has default arguments in its call operator.
    if constexpr (requires { model_->forward(std::forward<Args>(args)...); }) {
      return model_->forward(std::forward<Args>(args)...);
    } else {
      return model_(std::forward<Args>(args)...);
    }
  }

  const M& module() const noexcept { return model_; }
  auto operator->() const { return detail::module_pointer(model_); }

  /// Returns the gradient buckets of the trainable parameters.
  GradBuckets& buckets() noexcept { return state_.grad_reducer().buckets(); }

  /// Returns a guard under which backward passes only accumulate on this rank, and buffers are not
  /// broadcast: for all micro-batches except the last.
  ///
  ///     {
  ///       const auto no_sync = ddp.no_sync();
  ///       criterion(ddp(first.data), first.target).backward();
  ///     }
  ///     criterion(ddp(last.data), last.target).backward();
  [[nodiscard]] NoSyncGuard no_sync() { return state_.grad_reducer().no_sync(); }

  /// Broadcasts buffers from rank 0, as every training forward does. Collective call. Use it before
  /// an evaluation, because the last training forward has changed the buffers of each rank. Does
  /// not bump version counters.
  void broadcast_buffers() { state_.broadcast_buffers(); }

 private:
  const torch::nn::Module& get_module() const {
    const auto pointer = detail::module_pointer(model_);
    TORCH_CHECK(pointer != nullptr,
                "DistributedDataParallel: `model` is empty; construct the module first");
    return *pointer;
  }

  M model_;
  detail::DdpState state_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
