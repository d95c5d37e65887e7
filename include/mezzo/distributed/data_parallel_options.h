/// \file
/// What a DataParallel is made with.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/optim/grad_bucket.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The same on all ranks.
struct DataParallelOptions {
  /// Gradients are sent in pieces of so many bytes, each as soon as it is complete; > 0. Smaller
  /// ones begin earlier, larger ones cost fewer calls.
  int64_t bucket_bytes = kDefaultBucketBytes;
  /// Before each training forward the ranks get the root's buffers (running statistics, and what
  /// else the modules registered), so that they stay one model.
  bool broadcast_buffers = true;
  /// Whose weights and buffers the others get.
  int root = 0;
  /// How gradients are reduced. Without `average` they are plain sums, which nobody divides.
  GradAllReduceOptions all_reduce = {};
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
