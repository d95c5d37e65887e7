#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/unflatten_dense_tensors.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gives all ranks the root's buffers, with one broadcast for each device and dtype: models have
/// hundreds of buffers of a few bytes each. All ranks call it. Returns when the buffers may be
/// read.
///
/// Version counters do not change, as they do not when modules write their running statistics: a
/// second forward may come before the first one's backward.
inline void broadcast_buffers(const NamedTensors& buffers, const GroupPtr& group, int root) {
  if (group->getSize() == 1) return;
  const c10::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> packs;
  for (const auto& [name, buffer] : buffers) {
    packs[{buffer.device().str(), buffer.scalar_type()}].push_back(buffer.variable_data());
  }
  std::vector<at::Tensor> flats;
  PendingRequests requests;
  for (const auto& [key, pack] : packs) {
    flats.push_back(at::flatten_dense_tensors(pack));
    requests.add(broadcast(group, flats.back(), root));
  }
  requests.wait();
  if (group->getRank() == root) return;
  auto flat = flats.begin();
  for (const auto& [key, pack] : packs) {
    const auto parts = at::unflatten_dense_tensors(*flat++, pack);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].is_alias_of(pack[i])) pack[i].copy_(parts[i]);
    }
  }
}

/// The part of DataParallel that does not depend on the model's type.
class Replica {
 public:
  Replica(const torch::nn::Module& module, const GroupPtr& group,
          const DataParallelOptions& options)
      : parameters_(once_.all(module.named_parameters())),
        module_buffers_(once_.all(module.named_buffers())),
        buckets_(broadcast_and_select_trained(group, options),
                 {.bucket_bytes = options.bucket_bytes}),
        all_reduce_(buckets_, group, options.all_reduce),
        group_(group),
        root_(options.root),
        broadcasts_(options.broadcast_buffers) {
    for (const auto& named : parameters_) {
      if (!named.second.requires_grad()) frozen_.push_back(named);
    }
  }

  GradBuckets& buckets() noexcept { return buckets_; }
  void broadcast_buffers() { detail::broadcast_buffers(module_buffers_, group_, root_); }
  std::vector<at::Tensor> residuals() const { return all_reduce_.residuals(); }

  void begin_forward(bool is_training) {
    if (!is_training || !c10::GradMode::is_enabled()) return;
    for (const auto& [name, parameter] : frozen_) {
      TORCH_CHECK(!parameter.requires_grad(), "DataParallel on rank ", group_->getRank(),
                  ": the parameter ", name,
                  " was frozen when this was made, and now requires grad; make a new "
                  "DataParallel, so that its gradients are reduced too");
    }
    if (broadcasts_ && !shared(buckets_)->is_no_sync()) broadcast_buffers();
  }

 private:
  /// Gives all ranks the root's values; returns the parameters that require grad.
  std::vector<at::Tensor> broadcast_and_select_trained(const GroupPtr& group,
                                                       const DataParallelOptions& options) const {
    NamedTensors all = parameters_;
    all.insert(all.end(), module_buffers_.begin(), module_buffers_.end());
    broadcast_alike(
        all, group, options.root,
        std::string("broadcast_buffers: ") + (options.broadcast_buffers ? "on\n" : "off\n"));
    std::vector<at::Tensor> trained;
    for (const auto& [name, parameter] : parameters_) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    TORCH_CHECK(!trained.empty(), "DataParallel on rank ", group->getRank(),
                ": no parameter of the model requires grad, so there is nothing to train together; "
                "call the model itself");
    return trained;
  }

  NamedOnce once_;  // has a tensor of several names under the first one
  NamedTensors parameters_;
  NamedTensors module_buffers_;
  GradBuckets buckets_;
  GradAllReduce all_reduce_;
  NamedTensors frozen_;
  GroupPtr group_;
  int root_;
  bool broadcasts_;
};

/// \throws c10::Error if the handle is empty
template <ModelHandle M>
const torch::nn::Module& module_of(const M& model) {
  const auto pointer = module_pointer(model);
  TORCH_CHECK(pointer != nullptr,
              "DataParallel: `model` is empty; construct the module before its holder is passed");
  return *pointer;
}

/// Calls the model's forward, or its call operator if forward takes more arguments:
/// AutocastModule's call operator knows the default ones.
template <ModelHandle M, class... Args>
decltype(auto) call_forward(M& model, Args&&... args) {
  if constexpr (requires { model->forward(std::forward<Args>(args)...); }) {
    return model->forward(std::forward<Args>(args)...);
  } else {
    return model(std::forward<Args>(args)...);
  }
}

}  // namespace detail

template <detail::ModelHandle M>
DataParallel<M>::DataParallel(M model, c10::intrusive_ptr<c10d::Backend> group,
                              const DataParallelOptions& options)
    : model_(std::move(model)),
      replica_(std::make_unique<detail::Replica>(detail::module_of(model_), group, options)) {}

template <detail::ModelHandle M>
GradBuckets& DataParallel<M>::buckets() noexcept {
  return replica_->buckets();
}

template <detail::ModelHandle M>
std::vector<at::Tensor> DataParallel<M>::residuals() const {
  return replica_->residuals();
}

template <detail::ModelHandle M>
void DataParallel<M>::broadcast_buffers() {
  replica_->broadcast_buffers();
}

template <detail::ModelHandle M>
template <class... Args>
decltype(auto) DataParallel<M>::operator()(Args&&... args) {
  replica_->begin_forward(detail::module_of(model_).is_training());
  return detail::call_forward(model_, std::forward<Args>(args)...);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
