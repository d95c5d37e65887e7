/// \file
/// All ranks begin with the same model.
#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/rank_agreement.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Gives every rank the values of `root`'s tensors, in place, after it has compared what the ranks
/// have: `root`, names, dtypes, shapes and whether gradients are wanted, in their order. All ranks
/// call it. Waits until the values are there.
/// \throws c10::Error, on every rank and before anything is written, naming the first rank that
///   differs from `root` and the tensor in which it does
void broadcast_parameters(const NamedTensors& tensors, c10::intrusive_ptr<c10d::Backend> group,
                          int root = 0);

/// Compares a number that must be the same on all ranks, such as the number of batches of an epoch:
/// the other ranks would wait for a rank with fewer batches, or meet it in its next epoch. All
/// ranks call it.
///
///     mezzo::require_equal(world, "batches", batches_of_this_rank);
///
/// \throws c10::Error, on every rank, naming the first rank whose number is not rank 0's
void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what, int64_t own);

namespace detail {

/// Returns a line for each tensor. A line break in a name only makes one line more.
inline std::string describe(const NamedTensors& tensors) {
  std::ostringstream lines;
  for (const auto& [name, tensor] : tensors) {
    lines << name << ": ";
    if (tensor.defined()) {
      lines << tensor.scalar_type() << ' ' << tensor.sizes()
            << (tensor.requires_grad() ? ", trained\n" : ", not trained\n");
    } else {
      lines << "undefined\n";
    }
  }
  return lines.str();
}

/// Does what broadcast_parameters does, and compares lines of `options` before.
inline void broadcast_alike(const NamedTensors& tensors, const GroupPtr& group, int root,
                            const std::string& options) {
  const int rank_here = checked(group, "broadcast_parameters")->getRank();
  TORCH_CHECK(root >= 0 && root < group->getSize(), "broadcast_parameters on rank ", rank_here,
              ": `root` must be 0 to ", group->getSize() - 1, ", but is ", root);
  at::Device device = device_of(*group);
  if (!tensors.empty() && tensors[0].second.defined()) device = tensors[0].second.device();
  RankAgreement(group, device)
      .check_alike("broadcast_parameters",
                   "root: " + std::to_string(root) + '\n' + options + describe(tensors),
                   "build the same model on all ranks, and give them the same options", root);
  PendingRequests requests;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) requests.add(broadcast(group, tensor, root));
  }
  requests.wait();
}

}  // namespace detail

inline void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what,
                          int64_t own) {
  detail::RankAgreement(detail::checked(std::move(group), "require_equal"))
      .check_alike("require_equal", std::to_string(own) + ' ' + what,
                   "give all ranks as many: DistributedRandomSampler deals samples so");
}

inline void broadcast_parameters(const NamedTensors& tensors,
                                 c10::intrusive_ptr<c10d::Backend> group, int root) {
  detail::broadcast_alike(tensors, group, root, "");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
