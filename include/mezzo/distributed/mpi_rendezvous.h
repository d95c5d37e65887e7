/// \file
/// A c10d store for the ranks of an MPI job. Part of the target mezzo::mpi.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/mpi_environment.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Where the ranks of `communicator` meet, for a Watchdog say: libtorch's TCPStore, which rank 0
/// serves on a port that is free there and that the others are told through MPI. So several jobs on
/// one machine are no trouble, as they are with a port from the environment. Ranks on one machine
/// use its loopback; on several, the name that MPI_Get_processor_name has for rank 0's.
///
/// All ranks call it together; it returns when all are connected.
/// \throws c10::Error, on every rank, naming one that could not serve or connect within `timeout`
c10::intrusive_ptr<c10d::Store> rendezvous(
    MPI_Comm communicator, std::chrono::milliseconds timeout = std::chrono::minutes(5));

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_rendezvous_impl.h>  // IWYU pragma: export
