/// \file
/// check_equal_on_all_ranks: throws on all ranks if a number differs between them.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Checks that `value` is equal on all ranks. Call it on all ranks, for example before an epoch: a
/// rank with more batches than others would block in a collective.
///
///     mezzo::check_equal_on_all_ranks(world, "batches", num_batches);
///
/// \param name  names the value in the error message
/// \throws c10::Error on all ranks, naming the first rank whose value differs from rank 0's
inline void check_equal_on_all_ranks(c10::intrusive_ptr<c10d::Backend> backend,
                                     const std::string& name, int64_t value) {
  constexpr const char* kCaller = "check_equal_on_all_ranks";
  detail::check_equal_on_all_ranks(
      detail::check_backend(std::move(backend), kCaller), kCaller,
      std::to_string(value) + ' ' + name,
      "pass the same value on all ranks; DistributedRandomSampler yields equally many batches");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
