/// \file
/// A model that several processes train together, each on its part of the batch: the same weights
/// to begin with, and gradients averaged as the backward pass makes them. (grad_all_reduce.h stays
/// without libtorch's modules, which take twelve seconds to compile.)
#pragma once

#include <mezzo/base/model_list.h>
#include <mezzo/base/script_module.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The same on all ranks.
struct DataParallelOptions {
  /// Gradients are sent in pieces of so many bytes, each as soon as it is complete; > 0. Smaller
  /// ones begin earlier, larger ones cost fewer calls.
  int64_t bucket_bytes = kDefaultBucketBytes;
  /// Before each training forward the ranks get the root's buffers (running statistics, and what
  /// else the modules registered), so that they stay one model.
  bool broadcast_buffers = true;
  /// Whose weights and buffers the others get.
  int root = 0;
  /// How gradients are reduced.
  GradAllReduceOptions all_reduce = {};
};

namespace detail {
class Replica;
}

/// Trains one model on all ranks of a c10d group, as torch's DistributedDataParallel does. The
/// group is a backend: a MpiBackend, gloo_backend's, a ProcessGroupNCCL with the program's own
/// options and time-outs, or `process_group->getBackend(torch::kCUDA)`. A group of some of the
/// ranks trains a model on those ranks alone.
///
/// \code
///   mezzo::DataParallel ddp(model, world);               // all ranks have rank 0's weights
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
/// std::shared_ptr to a module; of a torch::jit::Module it is ScriptModule. It is shared, not
/// copied: `ddp->` is the model, with its own names in its state dict.
///
/// When `backward()` returns, each gradient is the average over the ranks and still carries the
/// loss scale; all ranks have the same bits, so that they skip the same steps. Parameters that
/// require grad when it is made are trained. See GradAllReduce for those that only some ranks use,
/// and for errors. One thread at a time; `backward()` may run in any.
template <detail::ModelHandle M>
class DataParallel {
 public:
  /// All ranks call it together, with models of the same names, shapes, dtypes and frozen
  /// parameters. Waits until the ranks have `root`'s values.
  /// \throws c10::Error, on every rank, naming the first rank whose model is another and where; for
  ///   an empty holder, and for a model without a parameter to train
  explicit DataParallel(M model, c10::intrusive_ptr<c10d::Backend> group,
                        const DataParallelOptions& options = {});
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// The model's own forward: its arguments, default ones included, and its result. In training
  /// (the module's `is_training()`, gradients enabled, no `no_sync()`) all ranks call it together,
  /// for buffers are broadcast before; otherwise a rank may call it alone.
  /// \throws c10::Error if a parameter that was frozen at the start has come to require grad
  template <class... Args>
  decltype(auto) operator()(Args&&... args);
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  /// Returns the model.
  const M& module() const noexcept { return model_; }
  /// Returns the model.
  auto operator->() const { return detail::module_pointer(model_); }

  /// The trained parameters' gradients.
  GradBuckets& buckets() noexcept;

  /// While what it returns lives, backward passes only accumulate on this rank, and buffers are not
  /// broadcast: for all micro-batches of a step but the last.
  ///
  ///     {
  ///       const auto no_sync = ddp.no_sync();
  ///       criterion(ddp(first.data), first.target).backward();
  ///     }
  ///     criterion(ddp(last.data), last.target).backward();
  [[nodiscard]] GradBuckets::NoSync no_sync() { return buckets().no_sync(); }

  /// With error feedback: this rank's part of what rounding lost; as GradAllReduce::residuals.
  std::vector<at::Tensor> residuals() const;

  /// Gives all ranks the root's buffers, as every training forward does; all ranks call it. Before
  /// an evaluation, that is: the last training forward has changed each rank's on its own. Autograd
  /// is not told, as it is not of what the modules themselves write there.
  void broadcast_buffers();

 private:
  M model_;
  std::unique_ptr<detail::Replica> replica_;
};

template <class M>
DataParallel(M, c10::intrusive_ptr<c10d::Backend>) -> DataParallel<M>;
template <class M>
DataParallel(M, c10::intrusive_ptr<c10d::Backend>, DataParallelOptions) -> DataParallel<M>;
DataParallel(torch::jit::Module, c10::intrusive_ptr<c10d::Backend>)->DataParallel<ScriptModule>;
DataParallel(torch::jit::Module, c10::intrusive_ptr<c10d::Backend>, DataParallelOptions)
    ->DataParallel<ScriptModule>;

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/data_parallel_impl.h>  // IWYU pragma: export
