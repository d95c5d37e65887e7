#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/pending_requests.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gives all ranks the root's buffers, those of one device and dtype in one broadcast: models have
/// hundreds, of a few bytes each.
class BufferBroadcast {
 public:
  BufferBroadcast(const std::vector<at::Tensor>& buffers, AnyCommunicator communicator, int root)
      : communicator_(std::move(communicator)), root_(root) {
    if (communicator_.size() == 1) return;
    for (const at::Tensor& buffer : buffers) group_for(buffer).buffers.push_back(buffer);
    for (Group& group : groups_) {
      int64_t count = 0;
      for (const at::Tensor& buffer : group.buffers) count += buffer.numel();
      group.packed = at::empty({count}, group.buffers.front().options().requires_grad(false));
    }
  }

  /// All ranks call it; returns when the buffers may be read.
  void run() {
    const c10::NoGradGuard no_grad;
    const bool is_root = communicator_.rank() == root_;
    PendingRequests requests;
    for (const Group& group : groups_) {
      if (is_root) copy(group, Direction::pack);
      requests.add(communicator_.broadcast(group.packed, root_));
    }
    requests.wait();
    if (is_root) return;
    for (const Group& group : groups_) copy(group, Direction::unpack);
  }

 private:
  enum class Direction : uint8_t { pack, unpack };

  struct Group {
    std::vector<at::Tensor> buffers;
    at::Tensor packed;
  };

  Group& group_for(const at::Tensor& buffer) {
    for (Group& group : groups_) {
      const at::Tensor& first = group.buffers.front();
      if (first.device() == buffer.device() && first.scalar_type() == buffer.scalar_type()) {
        return group;
      }
    }
    return groups_.emplace_back();
  }

  /// Written as modules write their running statistics, without a word to autograd: a second
  /// forward may come before the first one's backward.
  static void copy(const Group& group, Direction direction) {
    int64_t offset = 0;
    for (const at::Tensor& buffer : group.buffers) {
      const at::Tensor part = group.packed.narrow(0, offset, buffer.numel()).view(buffer.sizes());
      offset += buffer.numel();
      if (direction == Direction::pack) {
        part.copy_(buffer);
      } else {
        at::Tensor(buffer.variable_data()).copy_(part);
      }
    }
  }

  AnyCommunicator communicator_;
  int root_;
  std::vector<Group> groups_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
