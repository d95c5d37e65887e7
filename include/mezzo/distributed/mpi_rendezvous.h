/// \file
/// A c10d store for the ranks of an MPI job. Part of the target mezzo::mpi.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/mpi_thread.h>
#include <mezzo/distributed/mpi_backend.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <vector>

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

/// Calls `attempt` on this rank; throws on all ranks if it threw on one.
inline void on_all_ranks(const GroupPtr& ranks, const std::function<void()>& attempt) {
  std::string words;
  try {
    attempt();
  } catch (const std::exception& error) {
    words = error.what();
    words = words.substr(0, words.find('\n'));
  }
  const std::vector<std::string> all = gather_texts(words, ranks, at::kCPU);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK(all[rank].empty(), "mezzo::rendezvous on rank ", ranks->getRank(), " of ",
                ranks->getSize(), ": rank ", rank, " could not ", rank == 0 ? "serve" : "connect",
                ": ", all[rank]);
  }
}

}  // namespace detail

inline c10::intrusive_ptr<c10d::Store> rendezvous(MPI_Comm communicator,
                                                  std::chrono::milliseconds timeout) {
  const detail::GroupPtr ranks = c10::make_intrusive<MpiBackend>(communicator);
  const std::string address = detail::address_for(communicator);
  c10::intrusive_ptr<c10d::TCPStore> store;
  c10d::TCPStoreOptions options;
  options.timeout = timeout;
  options.waitWorkers = false;  // the exchange of words below does that
  options.port = 0;
  options.isServer = ranks->getRank() == 0;
  detail::on_all_ranks(ranks, [&] {
    if (options.isServer) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  });
  const std::string port = store ? std::to_string(store->getPort()) : "";
  const std::string at = detail::gather_texts(port + ' ' + address, ranks, at::kCPU)[0];
  detail::on_all_ranks(ranks, [&] {
    if (options.isServer) return;
    const std::size_t space = at.find(' ');
    std::from_chars(at.data(), at.data() + space, options.port);
    store = c10::make_intrusive<c10d::TCPStore>(at.substr(space + 1), options);
  });
  return store;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
