#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Collectives under way, let go of without a warning where a pass threw.
class PendingRequests {
 public:
  PendingRequests() = default;
  ~PendingRequests() {
    for (Work& request : requests_) request.abandon();
  }
  PendingRequests(const PendingRequests&) = delete;
  PendingRequests& operator=(const PendingRequests&) = delete;

  void add(Work request) { requests_.push_back(std::move(request)); }
  void poll() {
    for (Work& request : requests_) request.ready();
  }
  /// For the one that was added as number `index`.
  void wait_for(std::size_t index) { requests_[index].wait(); }
  void wait() {
    for (Work& request : requests_) request.wait();
    requests_.clear();
  }

 private:
  std::vector<Work> requests_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
