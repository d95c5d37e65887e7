/// \file
/// A c10d store for the processes of a job that a launcher has started.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/process_group_environment.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns a store in which the processes of a job meet, when all of them have come. Rank 0 of
/// `environment` serves it, or torchrun's agent where that does. All ranks call it alike; each call
/// of an attempt makes a store of its own: one for a Watchdog, say, and one for Gloo or NCCL.
///
/// torchrun's agent keeps its store when it starts the processes anew (`--max-restarts`), with what
/// earlier ones have written there; each attempt's keys have a prefix of their own.
/// \param timeout of the meeting, and then of all calls of the store: of the groups that are made
///   through it too
/// \throws c10::Error naming the ranks that have not come within `timeout`
inline c10::intrusive_ptr<c10d::Store> rendezvous(
    const ProcessGroupEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5));

namespace detail {

/// Waits until all ranks have come to `store`; the server, until all of them know.
inline void meet(c10d::Store& store, const ProcessGroupEnvironment& environment, bool is_server,
                 std::chrono::steady_clock::time_point deadline) {
  const auto wait_for_all = [&](const std::string& what) {
    store.set(what + std::to_string(environment.rank), std::string("1"));
    if (what == "knows/" && !is_server) return;
    std::vector<std::string> keys;
    for (int rank = 0; rank < environment.world_size; ++rank) {
      keys.push_back(what + std::to_string(rank));
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    try {
      store.wait(keys, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      std::string missing;
      for (int rank = 0; rank < environment.world_size; ++rank) {
        if (store.check({keys[static_cast<std::size_t>(rank)]})) continue;
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
      TORCH_CHECK(!missing.empty(), error.what());
      TORCH_CHECK(false, "no rank ", missing,
                  " has come in time; look at what it says, or give rendezvous a longer timeout");
    }
  };
  wait_for_all("here/");
  wait_for_all("knows/");
}

}  // namespace detail

inline c10::intrusive_ptr<c10d::Store> rendezvous(const ProcessGroupEnvironment& environment,
                                                  std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const std::string context =
      c10::str("mezzo::rendezvous: rank ", environment.rank, " of ", environment.world_size, " at ",
               environment.master_addr, ":", environment.master_port);
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0 && !environment.has_agent_store;
  options.waitWorkers = false;
  options.multiTenant = true;  // a second call in this process finds the same server
  options.timeout = timeout;
  return detail::with_context(context, [&]() -> c10::intrusive_ptr<c10d::Store> {
    const auto served = c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
    const auto attempt = c10::make_intrusive<c10d::PrefixStore>(
        "mezzo/attempt " + std::to_string(environment.restart_count), served);
    const int64_t call = attempt->add("calls of " + std::to_string(environment.rank), 1);
    auto store = c10::make_intrusive<c10d::PrefixStore>("call " + std::to_string(call), attempt);
    detail::meet(*store, environment, options.isServer, deadline);
    return store;
  });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
