/// \file
/// All ranks begin with the same model.
#pragma once

#include <ATen/core/Tensor.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Parameters and buffers under the names that errors call them by, such as
/// `model->named_parameters().pairs()`.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Gives every rank the values of `root`'s tensors, in place, once it has compared what the ranks
/// have: names, dtypes, shapes and whether gradients are wanted, in their order. All ranks call it.
/// Waits until the values are there.
/// \throws c10::Error, on every rank and before anything is written, naming the first rank that
/// differs from `root` and the tensor in which it does
void broadcast_parameters(const NamedTensors& tensors, AnyCommunicator communicator, int root = 0);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/broadcast_parameters_impl.h>  // IWYU pragma: export
