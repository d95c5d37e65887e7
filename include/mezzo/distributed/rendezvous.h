/// \file
/// A c10d store for the processes of a job that a launcher has started.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/process_group_environment.h>

#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstddef>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns a TCPStore, whose server rank 0 of `environment` is, when all processes have come.
/// \throws c10::Error naming rank and address, if they have not come within `timeout`
inline c10::intrusive_ptr<c10d::Store> rendezvous(
    const ProcessGroupEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5)) {
  const std::string context =
      c10::str("mezzo::rendezvous: rank ", environment.rank, " of ", environment.world_size, " at ",
               environment.master_addr, ":", environment.master_port);
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0;
  options.numWorkers = static_cast<std::size_t>(environment.world_size);
  options.timeout = timeout;
  return detail::with_context(context, [&]() -> c10::intrusive_ptr<c10d::Store> {
    return c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
