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
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns a store in which the processes of a job meet, when all of them have come. Rank 0 serves
/// the store, or torchrun's agent if `environment` says so. All ranks make the same calls. Each
/// call returns another store: one for a Watchdog, for example, and one for Gloo or NCCL. If
/// torchrun starts processes again, after a failure or a change of membership, its agent keeps the
/// keys of earlier processes, and the new ones see none of them. \param timeout of the meeting, and
/// of later calls of the store, also by groups that are made
///   through it
/// \throws c10::Error naming the ranks that have not come within `timeout`, or one that has come with
///   another world size
inline c10::intrusive_ptr<c10d::Store> rendezvous(
    const ProcessGroupEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5));

namespace detail {

/// The key under which a store says that torchrun's agent serves it, and no rank.
inline constexpr const char* kAgentServes = "mezzo/agent serves";

/// Returns a prefix for the keys of the processes that are here now, when all of them have come; on
/// rank 0, when all of them know, so that its next meeting is not taken for this one. `store` may
/// hold what earlier processes have written.
///
///     rank 0:  set "rank 0" to a name that no process has had (the meeting)
///              wait for "meeting/r" of all ranks r, and set "meeting/all" to their values
///     rank r:  read the meeting, and set "meeting/r" to a name that no process has had
///              begin again unless "meeting/all" has that name: an earlier rank 0 may have left both
///
/// A name ends with the world size that its process was given.
inline std::string meet(c10d::Store& store, const ProcessGroupEnvironment& environment,
                        std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  std::random_device random;
  const std::string own = c10::str(random(), '-', random(), '-', environment.world_size);
  const bool is_first = environment.rank == 0;
  std::string meeting;
  const auto keys_of = [&](const std::string& what) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < environment.world_size; ++rank) {
      keys.push_back(meeting + what + std::to_string(rank));
    }
    return keys;
  };
  const auto refuse = [&](const std::string& what) {
    std::string missing;
    const std::vector<std::string> keys = keys_of(what);
    for (std::size_t rank = 0; rank < keys.size() && !meeting.empty(); ++rank) {
      if (!store.check({keys[rank]}))
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (missing.empty() && is_first) return;  // the last one has come just now
    TORCH_CHECK(false, "no rank ", missing.empty() ? "0" : missing,
                " has come in time; look at what it says, or give rendezvous a longer timeout");
  };
  const auto wait_for_all = [&](const std::string& what) {
    const auto left = deadline - std::chrono::steady_clock::now();
    try {
      store.wait(keys_of(what),
                 std::max(std::chrono::duration_cast<milliseconds>(left), milliseconds(1)));
    } catch (const std::exception&) {
      refuse(what);
    }
  };
  std::vector<std::vector<uint8_t>> names;  // of the ranks that this one compares with its own
  if (is_first) {
    store.set("rank 0", own);
    meeting = own + '/';
    store.set(meeting + '0', own);
    wait_for_all("");
    names = store.multiGet(keys_of(""));
    std::string all;
    for (const auto& name : names) all.append(name.begin(), name.end()) += ' ';
    store.set(meeting + "all", all);
  }
  for (milliseconds pause(2); !is_first; pause = std::min(2 * pause, milliseconds(250))) {
    if (store.check({"rank 0"})) {
      meeting = store.get_to_str("rank 0") + '/';
      store.set(meeting + std::to_string(environment.rank), own);
      if (store.check({meeting + "all"}) &&
          store.get_to_str(meeting + "all").find(own) != std::string::npos) {
        names = {store.get(meeting + '0')};
        break;
      }
    }
    if (std::chrono::steady_clock::now() >= deadline) refuse("");
    std::this_thread::sleep_for(pause);
  }
  store.set(meeting + "knows/" + std::to_string(environment.rank), std::string("1"));
  if (is_first) wait_for_all("knows/");
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    const std::string name(names[rank].begin(), names[rank].end());
    const std::string size = name.substr(name.rfind('-') + 1);
    TORCH_CHECK(size == std::to_string(environment.world_size), "rank ", rank,
                " has come with another number of ranks, ", size,
                "; start all ranks with the same WORLD_SIZE");
  }
  return meeting;
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
    const auto all = c10::make_intrusive<c10d::PrefixStore>("mezzo", served);
    auto store =
        c10::make_intrusive<c10d::PrefixStore>(detail::meet(*all, environment, deadline), all);
    if (environment.has_agent_store) store->set(detail::kAgentServes, std::string("1"));
    return store;
  });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
