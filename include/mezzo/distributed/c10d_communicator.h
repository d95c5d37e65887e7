/// \file
/// Collectives through libtorch's process groups: NCCL on GPUs, and whatever else speaks c10d.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/process_group_environment.h>

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <concepts>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Where the processes of `environment` meet: libtorch's TCPStore, whose server rank 0 is. Returns
/// when all have come.
/// \throws c10::Error naming rank and address, if they have not within `timeout`
c10::intrusive_ptr<c10d::Store> rendezvous(
    const ProcessGroupEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5));

/// A process group or a backend of c10d as a Communicator. distributed/nccl_communicator.h makes
/// one of NCCL's.
///
/// `wait` is c10d's: of tensors on a GPU the current stream waits, not the host. bfloat16 and half
/// are added up as the backend does it; only their reduce_scatter into float is an all-to-all and
/// a sum on each rank, for no backend reduces into another dtype. Whether all ranks call the same
/// is the backend's to check (NCCL's: TORCH_DISTRIBUTED_DEBUG=DETAIL), and so are timeouts. Tensors
/// with gaps are copied.
class C10dCommunicator : public Communicator {
 public:
  /// `devices`: those whose tensors the group can take, as the caller knows.
  /// \throws c10::Error if the group is null or `devices` is empty
  template <class Group>
  requires(std::derived_from<Group, c10d::ProcessGroup> || std::derived_from<Group, c10d::Backend>)
      C10dCommunicator(c10::intrusive_ptr<Group> group, std::vector<c10::DeviceType> devices);
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/c10d_backend.h>  // IWYU pragma: export
