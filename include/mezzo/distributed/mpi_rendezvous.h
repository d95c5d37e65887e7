/// \file
/// A c10d store for the ranks of an MPI job. Part of the target mezzo::mpi.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/rank_agreement.h>
#include <mezzo/distributed/mpi_backend.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <chrono>
#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns a store in which the ranks of `communicator` meet, for a Watchdog say: libtorch's
/// TCPStore, which rank 0 serves on a port that is free there and that the others are told through
/// MPI. So several jobs on one machine are no trouble, as they are with a port from the
/// environment. Ranks on one machine use its loopback; on several, the name that
/// MPI_Get_processor_name has for rank 0's.
///
/// All ranks call it together; it returns when all are connected.
/// \throws c10::Error, on every rank, naming one that could not serve or connect within `timeout`
c10::intrusive_ptr<c10d::Store> rendezvous(
    MPI_Comm communicator, std::chrono::milliseconds timeout = std::chrono::minutes(5));

namespace detail {

/// How the ranks of `communicator` reach this process.
inline std::string address_for(MPI_Comm communicator) {
  MPI_Comm machine = MPI_COMM_NULL;
  int ranks = 1, ranks_here = 1, length = 0;
  std::string name(MPI_MAX_PROCESSOR_NAME, '\0');
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type", "mezzo::rendezvous");
  MPI_Comm_size(machine, &ranks_here);
  MPI_Comm_free(&machine);
  MPI_Comm_size(communicator, &ranks);
  if (ranks == ranks_here) return "127.0.0.1";
  check_mpi(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name",
            "mezzo::rendezvous");
  name.resize(static_cast<std::size_t>(length));
  return name;
}

}  // namespace detail

inline c10::intrusive_ptr<c10d::Store> rendezvous(MPI_Comm communicator,
                                                  std::chrono::milliseconds timeout) {
  constexpr const char* kCaller = "mezzo::rendezvous";
  const detail::RankAgreement ranks(c10::make_intrusive<MpiBackend>(communicator));
  const std::string address = detail::address_for(communicator);
  c10::intrusive_ptr<c10d::TCPStore> store;
  c10d::TCPStoreOptions options;
  options.timeout = timeout;
  options.waitWorkers = false;  // the exchange of words below does that
  options.port = 0;
  options.isServer = ranks.rank() == 0;
  const std::string at = ranks.from_rank_0(kCaller, [&] {
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    return std::to_string(store->getPort()) + ' ' + address;
  });
  ranks.check(kCaller, detail::failure_of([&] {
                if (options.isServer) return;
                const std::size_t space = at.find(' ');
                std::from_chars(at.data(), at.data() + space, options.port);
                store = c10::make_intrusive<c10d::TCPStore>(at.substr(space + 1), options);
              }));
  return store;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
