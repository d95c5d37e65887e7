/// \file
/// NoSyncGuard: disables gradient synchronization in a scope.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/reducer.h>

#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// While a guard exists, backward passes accumulate gradients on this rank without averaging them,
/// as under DistributedDataParallel's `no_sync` in Python: for all micro-batches except the last.
/// Returned by the `no_sync()` methods. Guards nest, and may outlive the object that returned them.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) {
    reducer_->add_no_sync(1);
  }
  ~NoSyncGuard() {
    if (reducer_ != nullptr) reducer_->add_no_sync(-1);
  }
  NoSyncGuard(NoSyncGuard&&) noexcept = default;
  NoSyncGuard& operator=(NoSyncGuard&&) = delete;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
