#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/describe.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/grad_reducer.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Assigns parameters to ranks, averages gradients and broadcasts updated parameters.
class ParameterPartition {
 public:
  /// Broadcasts parameters from rank 0, and averages the gradients of those that require grad.
  /// Assigns these in order of decreasing size to the rank with the fewest elements.
  ParameterPartition(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     BackendPtr backend, const GradReducerOptions& options)
      : backend_(check_backend(std::move(backend), "ShardedOptimizer")),
        grad_reducer_(sync_initial_params(groups), backend_, options) {
    const std::vector<at::Tensor>& trainable = grad_reducer_.buckets().parameters();
    std::vector<std::size_t> order(trainable.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return trainable[a].numel() > trainable[b].numel();
    });
    std::vector<int64_t> num_elements(static_cast<std::size_t>(backend_->getSize()));
    for (const std::size_t i : order) {
      const auto owner = std::min_element(num_elements.begin(), num_elements.end());
      *owner += trainable[i].numel();
      owners_[trainable[i].unsafeGetTensorImpl()] = static_cast<int>(owner - num_elements.begin());
    }
  }

  GradReducer& grad_reducer() noexcept { return grad_reducer_; }
  const BackendPtr& backend() const noexcept { return backend_; }
  int rank() const { return backend_->getRank(); }

  /// \throws c10::Error for a parameter that did not require grad at construction
  int get_owner(const at::Tensor& parameter) const {
    const auto found = owners_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != owners_.end(), "ShardedOptimizer: a parameter (", describe(parameter),
                ") has a gradient, but was frozen or in no group at construction; construct a "
                "new ShardedOptimizer with all trainable parameters");
    return found->second;
  }
  bool is_owned_elsewhere(const void* parameter) const {
    return is_owned_elsewhere(parameter, rank());
  }
  bool is_owned_elsewhere(const void* parameter, int rank) const {
    const auto found = owners_.find(parameter);
    return found != owners_.end() && found->second != rank;
  }

  /// Broadcasts updated parameters from their owners. Blocks.
  void broadcast_updates(const std::vector<at::Tensor>& updated) const {
    std::vector<std::vector<at::Tensor>> params_by_owner(
        static_cast<std::size_t>(backend_->getSize()));
    for (const at::Tensor& parameter : updated) {
      params_by_owner[static_cast<std::size_t>(get_owner(parameter))].push_back(parameter);
    }
    for (std::size_t owner = 0; owner < params_by_owner.size(); ++owner) {
      broadcast(backend_, params_by_owner[owner], static_cast<int>(owner));
    }
  }

 private:
  std::vector<at::Tensor> sync_initial_params(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
    TensorsByName named;
    std::string options;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      torch::serialize::OutputArchive archive;
      groups[i].options().serialize(archive);
      std::ostringstream bytes;
      archive.save_to(bytes);
      const std::string text = bytes.str();
      options += c10::str("group ", i, ": lr ", groups[i].options().get_lr(),
                          ", CRC-32C of options ", crc32c_hex(text.data(), text.size()), "\n");
      for (std::size_t k = 0; k < groups[i].params().size(); ++k) {
        const at::Tensor& parameter = groups[i].params()[k];
        named.emplace_back(c10::str("parameter ", k, " of group ", i), parameter);
      }
    }
    return verify_and_broadcast(named, backend_, options);
  }

  BackendPtr backend_;
  GradReducer grad_reducer_;
  std::unordered_map<const void*, int> owners_;  // rank, by TensorImpl
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
