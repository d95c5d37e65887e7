/// \file
/// Collectives that libtorch renamed, of a process group in 2.13 and of a backend in 2.15, by the
/// newer name where there is one.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Group>
auto all_gather_single(Group& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <class Group>
auto reduce_scatter_single(Group& group, at::Tensor& output, at::Tensor& input,
                           const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
    return group.reduce_scatter_single(output, input, options);
  } else {
    return group._reduce_scatter_base(output, input, options);
  }
}

/// Parts of one size.
template <class Group>
auto all_to_all_single(Group& group, at::Tensor& output, at::Tensor& input) {
  std::vector<int64_t> sizes;
  if constexpr (requires { group.all_to_all_single(output, input, sizes, sizes); }) {
    return group.all_to_all_single(output, input, sizes, sizes);
  } else {
    return group.alltoall_base(output, input, sizes, sizes);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
