/// \file
/// broadcast_parameters: copies rank 0's parameters and buffers to all ranks.
#pragma once

#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <sstream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Checks that `options`, names, dtypes, shapes and requires_grad are equal on all ranks, and
/// broadcasts the tensors from rank 0. Returns the tensors that require grad.
inline std::vector<at::Tensor> verify_and_broadcast(const TensorsByName& tensors,
                                                    const BackendPtr& backend,
                                                    const std::string& options) {
  check_backend(backend, "broadcast_parameters");
  std::ostringstream lines;
  lines << options;
  std::vector<at::Tensor> defined, trainable;
  for (const auto& [name, tensor] : tensors) {
    lines << name << ": ";
    if (!tensor.defined()) {
      lines << "undefined\n";
      continue;
    }
    lines << tensor.scalar_type() << ' ' << tensor.sizes()
          << (tensor.requires_grad() ? ", requires grad\n" : ", does not require grad\n");
    defined.push_back(tensor);
    if (tensor.requires_grad()) trainable.push_back(tensor);
  }
  check_equal_on_all_ranks(backend, "broadcast_parameters", lines.str(),
                           "construct the same model with the same options on all ranks");
  broadcast(backend, defined, 0);
  return trainable;
}

}  // namespace detail

/// Broadcasts `tensors` from rank 0 to all ranks, in place, after checking that names, dtypes,
/// shapes and requires_grad are equal on all ranks. Call it on all ranks. Blocks until completion.
/// \throws c10::Error on all ranks, before anything is written, naming the first rank and tensor
///   that differ from rank 0
inline void broadcast_parameters(const TensorsByName& tensors,
                                 c10::intrusive_ptr<c10d::Backend> backend) {
  detail::verify_and_broadcast(tensors, backend, "");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
