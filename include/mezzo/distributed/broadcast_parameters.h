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

/// Gives every rank the values of `root`'s tensors, in place, once it has compared what the ranks
/// have: names, dtypes, shapes and whether gradients are wanted, in their order. All ranks call it.
/// Waits until the values are there.
/// \throws c10::Error, on every rank and before anything is written, naming the first rank that
/// differs from `root` and the tensor in which it does
void broadcast_parameters(const NamedTensors& tensors, c10::intrusive_ptr<c10d::Backend> group,
                          int root = 0);

/// Compares a number that is to be the same on all ranks, such as of an epoch's batches: a rank
/// with fewer would leave the others waiting, or meet them an epoch further. All ranks call it.
///
///     mezzo::require_equal(world, "batches", batches_of_this_rank);
///
/// \throws c10::Error, on every rank, naming the first rank whose number is not rank 0's
void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what, int64_t own);

namespace detail {

/// A line a tensor; a name with a line break of its own only makes a line more.
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

}  // namespace detail

inline void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what,
                          int64_t own) {
  detail::RankAgreement(detail::checked(std::move(group), "require_equal"))
      .check_alike("require_equal", std::to_string(own) + ' ' + what,
                   "give all ranks as many: DistributedRandomSampler deals samples so");
}

inline void broadcast_parameters(const NamedTensors& tensors,
                                 c10::intrusive_ptr<c10d::Backend> group, int root) {
  const int rank_here = detail::checked(group, "broadcast_parameters")->getRank();
  TORCH_CHECK(root >= 0 && root < group->getSize(), "broadcast_parameters on rank ", rank_here,
              ": `root` must be 0 to ", group->getSize() - 1, ", but is ", root);
  at::Device device = detail::device_of(*group);
  if (!tensors.empty() && tensors[0].second.defined()) device = tensors[0].second.device();
  detail::RankAgreement(group, device)
      .check_alike("broadcast_parameters", detail::describe(tensors),
                   "build the same model on all ranks", root);
  detail::PendingRequests requests;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) requests.add(detail::broadcast(group, tensor, root));
  }
  requests.wait();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
