#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/data_parallel_options.h>
#include <mezzo/distributed/detail/buffer_broadcast.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/optim/grad_buckets.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A module's parameters, and then its buffers; what several names stand for under the first.
struct ReplicatedTensors {
  NamedTensors parameters;
  NamedTensors buffers;

  explicit ReplicatedTensors(const torch::nn::Module& module) {
    std::unordered_set<const c10::TensorImpl*> known;
    const auto add = [&](const auto& items, NamedTensors& to) {
      for (const auto& item : items) {
        const at::Tensor& tensor = item.value();
        if (!tensor.defined() || !known.insert(tensor.unsafeGetTensorImpl()).second) continue;
        to.emplace_back(item.key(), tensor);
      }
    };
    add(module.named_parameters(), parameters);
    add(module.named_buffers(), buffers);
  }

  NamedTensors all() const {
    NamedTensors both = parameters;
    both.insert(both.end(), buffers.begin(), buffers.end());
    return both;
  }
};

/// One rank's copy of the model: what of DataParallel does not depend on the model's type.
class Replica {
 public:
  Replica(const torch::nn::Module& module, AnyCommunicator communicator,
          const DataParallelOptions& options)
      : Replica(ReplicatedTensors(module), std::move(communicator), options) {}

  GradBuckets& buckets() noexcept { return buckets_; }
  void broadcast_buffers() { buffers_.run(); }
  std::vector<at::Tensor> residuals() const { return all_reduce_.residuals(); }

  void begin_forward(bool is_training) {
    if (!is_training || !c10::GradMode::is_enabled()) return;
    for (const auto& [name, parameter] : frozen_) {
      TORCH_CHECK(!parameter.requires_grad(), "DataParallel on rank ", rank_, ": the parameter ",
                  name,
                  " was frozen when this was made, and now requires grad; make a new "
                  "DataParallel, so that its gradients are reduced too");
    }
    if (broadcasts_ && !shared(buckets_)->is_no_sync()) buffers_.run();
  }

 private:
  Replica(const ReplicatedTensors& tensors, AnyCommunicator communicator,
          const DataParallelOptions& options)
      : buckets_(
            broadcast_and_select_trained(tensors, communicator, options),
            GradBucketsOptions().storage(GradStorage::flat).bucket_bytes(options.bucket_bytes)),
        all_reduce_(buckets_, communicator, options.all_reduce),
        buffers_(values(tensors.buffers), communicator, options.root),
        rank_(communicator.rank()),
        broadcasts_(options.broadcast_buffers) {
    for (const auto& item : tensors.parameters) {
      if (!item.second.requires_grad()) frozen_.push_back(item);
    }
  }

  static std::vector<at::Tensor> values(const NamedTensors& tensors) {
    std::vector<at::Tensor> values;
    for (const auto& item : tensors) values.push_back(item.second);
    return values;
  }

  /// Gives all ranks the root's values; returns the parameters that require grad.
  static std::vector<at::Tensor> broadcast_and_select_trained(const ReplicatedTensors& tensors,
                                                              const AnyCommunicator& communicator,
                                                              const DataParallelOptions& options) {
    broadcast_parameters(tensors.all(), communicator, options.root);
    std::vector<at::Tensor> trained;
    for (const auto& [name, parameter] : tensors.parameters) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    TORCH_CHECK(!trained.empty(), "DataParallel on rank ", communicator.rank(),
                ": no parameter of the model requires grad, so there is nothing to train together; "
                "call the model itself");
    return trained;
  }

  GradBuckets buckets_;
  GradAllReduce all_reduce_;
  BufferBroadcast buffers_;
  NamedTensors frozen_;
  int rank_;
  bool broadcasts_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
