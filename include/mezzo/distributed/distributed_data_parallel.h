/// \file
/// A model that several processes train together, each on its part of the batch. They begin with
/// the same weights, and gradients are averaged while the backward pass makes them.
/// (grad_reducer.h does not include libtorch's modules, which take twelve seconds to compile.)
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

/// Options of DistributedDataParallel. All ranks have the same; the constructor compares them.
struct DistributedDataParallelOptions {
  /// The most bytes of a bucket of gradients, as in GradReducerOptions.
  int64_t bucket_cap_bytes = kDefaultBucketCapBytes;
  /// Whether the ranks get rank 0's buffers (running statistics and other registered buffers)
  /// before each training forward, so that the models stay equal.
  bool broadcast_buffers = true;
  /// bfloat16 or half: gradients are sent in this dtype, as in GradReducerOptions.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

namespace detail {

/// The part of DistributedDataParallel that does not depend on the model's type.
class DdpState {
 public:
  DdpState(const torch::nn::Module& module, const BackendPtr& backend,
           const DistributedDataParallelOptions& options)
      : parameters_(once_.collect(module.named_parameters())),
        buffers_(once_.collect(module.named_buffers())),
        backend_(check_backend(backend, "DistributedDataParallel")),
        broadcasts_(options.broadcast_buffers),
        all_reduce_(
            broadcast_and_select_trained(), backend,
            {.bucket_cap_bytes = options.bucket_cap_bytes, .reduce_dtype = options.reduce_dtype}) {
    for (const auto& named : parameters_) {
      if (!named.second.requires_grad()) frozen_.push_back(named);
    }
  }

  GradReducer& all_reduce() noexcept { return all_reduce_; }

  /// Version counters do not change, as they do not when modules write their running statistics: a
  /// second forward may come before the first one's backward.
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
                  " was frozen when this was made, and now requires grad; make a new "
                  "DistributedDataParallel, so that its gradients are reduced too");
    }
    if (broadcasts_ && !all_reduce_.is_no_sync()) broadcast_buffers();
  }

 private:
  /// Gives all ranks rank 0's values; returns the parameters that require grad.
  std::vector<at::Tensor> broadcast_and_select_trained() const {
    TensorsByName all = parameters_;  // a buffer is no parameter, though it may require grad
    for (const auto& [name, buffer] : buffers_) all.emplace_back(name, buffer.detach());
    auto trained = verify_and_broadcast(
        all, backend_, broadcasts_ ? "broadcast_buffers: on\n" : "broadcast_buffers: off\n");
    TORCH_CHECK(!trained.empty(), "DistributedDataParallel on rank ", backend_->getRank(),
                ": no parameter of the model requires grad, so there is nothing to train together; "
                "call the model itself");
    return trained;
  }

  UniqueTensorCollector once_;  // has a tensor of several names under the first one
  TensorsByName parameters_, buffers_, frozen_;
  BackendPtr backend_;
  bool broadcasts_;
  GradReducer all_reduce_;
};

}  // namespace detail

/// Trains one model on all ranks of a c10d backend, as torch's DistributedDataParallel does. The
/// backend is a backend: a MpiBackend, make_gloo_backend's, a ProcessGroupNCCL with the program's
/// own options and time-outs, or `process_group->getBackend(torch::kCUDA)`. A backend of some of
/// the ranks trains a model on those ranks alone.
///
/// \code
///   mezzo::DistributedDataParallel ddp(model, world);               // all ranks have rank 0's weights
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   mezzo::GradScaler scaler;
///   for (auto& batch : *part_of_this_rank) {
///     ddp->zero_grad();
///     scaler.scale(criterion(ddp(batch.data), batch.target)).backward();  // of all ranks now
///     scaler.step(optimizer, {.max_norm = 1.0});         // on all ranks, or on none
///     scaler.update();
///   }
/// \endcode
///
/// `M` is a module holder (torch::nn::Linear, any TORCH_MODULE, mezzo::AutocastModule) or a
/// std::shared_ptr to a module. The model is shared, not copied: `ddp->` is the model, and its
/// state dict has the model's own names.
///
/// When `backward()` returns, each gradient is the average over the ranks and still carries the
/// loss scale. All ranks have the same bits, so that they skip the same steps. Parameters that
/// require grad when the DistributedDataParallel is made are trained. GradReducer documents
/// parameters that only some ranks use, and errors. Use a DistributedDataParallel from one thread
/// at a time; `backward()` may run in any thread.
template <detail::ModelHandle M>
class DistributedDataParallel {
 public:
  /// All ranks call it together, with models of the same names, shapes, dtypes and frozen
  /// parameters. Waits until the ranks have rank 0's values.
  /// \throws c10::Error, on every rank, naming the first rank whose model or options differ and
  ///   where; for an empty holder, and for a model without a parameter to train
  explicit DistributedDataParallel(M model, c10::intrusive_ptr<c10d::Backend> backend,
                                   const DistributedDataParallelOptions& options = {})
      : model_(std::move(model)), state_(module_of_model(), backend, options) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// Calls the model's forward with its arguments, default ones included, and returns its result.
  /// In training (the module's `is_training()`, gradients enabled, no `no_sync()`) all ranks call
  /// it together, for buffers are broadcast before; otherwise a rank may call it alone.
  /// \throws c10::Error if a parameter that was frozen at the start requires grad now
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    state_.begin_forward(module_of_model().is_training());
    // AutocastModule's call operator knows the default arguments.
    if constexpr (requires { model_->forward(std::forward<Args>(args)...); }) {
      return model_->forward(std::forward<Args>(args)...);
    } else {
      return model_(std::forward<Args>(args)...);
    }
  }

  /// Returns the model.
  const M& module() const noexcept { return model_; }
  /// Returns the model.
  auto operator->() const { return detail::module_pointer(model_); }

  /// Returns the buckets of the trained parameters' gradients.
  GradBuckets& buckets() noexcept { return state_.all_reduce().buckets(); }

  /// Returns a guard under which backward passes only accumulate on this rank, and buffers are not
  /// broadcast: for all micro-batches of a step but the last.
  ///
  ///     {
  ///       const auto no_sync = ddp.no_sync();
  ///       criterion(ddp(first.data), first.target).backward();
  ///     }
  ///     criterion(ddp(last.data), last.target).backward();
  [[nodiscard]] NoSyncGuard no_sync() { return state_.all_reduce().no_sync(); }

  /// Gives all ranks rank 0's buffers, as every training forward does. All ranks call it. Call it
  /// before an evaluation, for the last training forward has changed the buffers of each rank. The
  /// buffers' version counters do not change, as they do not when modules write their statistics.
  void broadcast_buffers() { state_.broadcast_buffers(); }

 private:
  const torch::nn::Module& module_of_model() const {
    const auto pointer = detail::module_pointer(model_);
    TORCH_CHECK(pointer != nullptr,
                "DistributedDataParallel: `model` is empty; construct the module before its holder "
                "is passed");
    return *pointer;
  }

  M model_;
  detail::DdpState state_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
