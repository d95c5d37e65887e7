/// \file
/// All ranks begin with the same model.
#pragma once

#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Compares names, dtypes, shapes and whether gradients are wanted, and lines of `options` before;
/// then gives every rank rank 0's values. Returns the tensors that want gradients.
inline std::vector<at::Tensor> verify_and_broadcast(const TensorsByName& tensors,
                                                    const BackendPtr& backend,
                                                    const std::string& options) {
  check_backend(backend, "broadcast_parameters");
  std::ostringstream lines;
  lines << options;
  std::vector<at::Tensor> defined, trained;
  for (const auto& [name, tensor] : tensors) {
    lines << name << ": ";
    if (!tensor.defined()) {
      lines << "undefined\n";
      continue;
    }
    lines << tensor.scalar_type() << ' ' << tensor.sizes()
          << (tensor.requires_grad() ? ", trained\n" : ", not trained\n");
    defined.push_back(tensor);
    if (tensor.requires_grad()) trained.push_back(tensor);
  }
  check_equal_on_all_ranks(backend, "broadcast_parameters", lines.str(),
                           "build the same model on all ranks, and give them the same options");
  broadcast(backend, defined, 0);
  return trained;
}

}  // namespace detail

/// Gives every rank the values of rank 0's tensors, in place, after it has compared what the ranks
/// have: names, dtypes, shapes and whether gradients are wanted, in their order. All ranks call it.
/// Waits until the values are there.
/// \throws c10::Error, on every rank and before anything is written, naming the first rank that
///   differs from rank 0 and the tensor in which it does
inline void broadcast_parameters(const TensorsByName& tensors,
                                 c10::intrusive_ptr<c10d::Backend> backend) {
  detail::verify_and_broadcast(tensors, backend, "");
}

/// Compares a number that must be the same on all ranks, such as the number of batches of an epoch:
/// the other ranks would wait for a rank with fewer batches, or meet it in its next epoch. All
/// ranks call it.
///
///     mezzo::check_equal_on_all_ranks(world, "batches", batches_of_this_rank);
///
/// \throws c10::Error, on every rank, naming the first rank whose number is not rank 0's
inline void check_equal_on_all_ranks(c10::intrusive_ptr<c10d::Backend> backend,
                                     const std::string& what, int64_t own) {
  detail::check_equal_on_all_ranks(
      detail::check_backend(std::move(backend), "check_equal_on_all_ranks"),
      "check_equal_on_all_ranks", std::to_string(own) + ' ' + what,
      "give all ranks as many: DistributedRandomSampler deals samples so");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
