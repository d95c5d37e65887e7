/// \file
/// rendezvous_store: the c10d store through which the processes of a run connect.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/distributed_environment.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns the TCPStore that rank 0 serves, after all ranks have connected, or the store of
/// torchrun's agent. After a restart by torchrun its keys have a new prefix. Backends that share
/// the store each need a c10d::PrefixStore of it.
/// \param timeout  of the rendezvous, and of later calls of the store
/// \throws c10::Error, as libtorch's TCPStore, if not all ranks connect within `timeout`
inline c10::intrusive_ptr<c10d::Store> rendezvous_store(
    const DistributedEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5)) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0 && !environment.has_agent_store;
  options.numWorkers = static_cast<std::size_t>(environment.world_size);
  options.waitWorkers = !environment.has_agent_store;  // the agent's store has other clients
  options.multiTenant = true;  // a second call in this process reuses the server
  options.timeout = timeout;
  return c10::make_intrusive<c10d::PrefixStore>(
      "mezzo/attempt_" + std::to_string(environment.restart_count),
      c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
