#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/optim/detail/trained_once.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gives every rank the values of rank 0's parameters; returns those that are to be trained, of all
/// groups in their order.
inline std::vector<at::Tensor> start_groups_alike(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const Communicator& communicator) {
  std::vector<at::Tensor> trained;
  NamedTensors named;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& parameter = groups[group].params()[i];
      TORCH_CHECK(communicator.serves(parameter.device().type()), "ShardedOptimizer: parameter ", i,
                  " of group ", group, " is on ", parameter.device(),
                  ", which `communicator` does not serve");
      named.emplace_back(c10::str("parameter ", i, " of group ", group), parameter);
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  }
  refuse_duplicates(trained, "ShardedOptimizer");
  broadcast_parameters(named, communicator);
  return trained;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
