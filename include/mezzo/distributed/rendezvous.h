/// \file
/// Which process of the job this is, and the store in which the processes of a job meet.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// This process's place in the job, and the address where the processes meet, as torch's `env://`
/// has them.
struct DistributedEnvironment {
  int rank = 0;                  ///< 0 to world_size - 1, unlike any other process's
  int world_size = 1;            ///< processes of the job
  int local_rank = 0;            ///< among the processes on this machine: which of its GPUs to take
  std::string master_addr = {};  ///< host name or address of rank 0
  std::uint16_t master_port = 0;  ///< where rank 0, or torchrun's agent, serves a store
  bool has_agent_store = false;   ///< TORCHELASTIC_USE_AGENT_STORE: torchrun serves the store
  int restart_count = 0;          ///< TORCHELASTIC_RESTART_COUNT: how often torchrun began again

  /// Reads MASTER_ADDR, MASTER_PORT and, of the first launcher in this list that has set its rank,
  /// - torchrun and Kubernetes: RANK, WORLD_SIZE and LOCAL_RANK (0 if it is not set);
  /// - Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK;
  /// - SLURM: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
  /// \throws c10::Error naming a variable that is missing, is no number or is out of range
  static DistributedEnvironment from_env();
};

/// Returns a store in which the processes of a job meet. Rank 0 serves it and waits for the other
/// ranks, or torchrun's agent serves it. After a restart by torchrun the store has keys of its own.
/// Groups that share the store are each given a c10d::PrefixStore of it.
/// \param timeout  of the meeting, and of later calls of the store
/// \throws c10::Error, as libtorch's TCPStore, if the processes do not meet within `timeout`
inline c10::intrusive_ptr<c10d::Store> rendezvous_store(
    const DistributedEnvironment& environment,
    std::chrono::milliseconds timeout = std::chrono::minutes(5)) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0 && !environment.has_agent_store;
  options.numWorkers = static_cast<std::size_t>(environment.world_size);
  options.waitWorkers = !environment.has_agent_store;  // which other processes have used before
  options.multiTenant = true;  // a second call in this process finds the same server
  options.timeout = timeout;
  return c10::make_intrusive<c10d::PrefixStore>(
      "mezzo/attempt_" + std::to_string(environment.restart_count),
      c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options));
}

namespace detail {

/// Returns the value of an environment variable; empty if it is not set.
inline std::string get_env(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

inline int get_env_int(const char* name, int from, int to) {
  const std::string text = get_env(name);
  TORCH_CHECK(!text.empty(), "DistributedEnvironment: ", name,
              " is not set; start the process with torchrun, mpirun or srun, or set RANK, "
              "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [read_to, error] = std::from_chars(text.data(), end, number);
  TORCH_CHECK(error == std::errc() && read_to == end && number >= from && number <= to,
              "DistributedEnvironment: ", name, " must be a number from ", from, " to ", to,
              ", but is \"", text, "\"");
  return number;
}

}  // namespace detail

inline DistributedEnvironment DistributedEnvironment::from_env() {
  struct Launcher {
    const char *rank, *world_size, *local_rank;
  } launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK"};
  const auto is_set = [](const char* name) { return !detail::get_env(name).empty(); };
  for (const Launcher& other :
       {Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        Launcher{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}}) {
    if (!is_set(launcher.rank) && is_set(other.rank)) launcher = other;
  }
  constexpr int kMost = std::numeric_limits<int>::max();
  DistributedEnvironment environment;
  environment.world_size = detail::get_env_int(launcher.world_size, 1, kMost);
  const int last = environment.world_size - 1;
  environment.rank = detail::get_env_int(launcher.rank, 0, last);
  if (is_set(launcher.local_rank)) {
    environment.local_rank = detail::get_env_int(launcher.local_rank, 0, last);
  }
  environment.master_addr = detail::get_env("MASTER_ADDR");
  TORCH_CHECK(!environment.master_addr.empty(),
              "DistributedEnvironment: MASTER_ADDR is not set; set it to the host of rank 0, and "
              "MASTER_PORT to a port that is free there");
  environment.master_port =
      static_cast<std::uint16_t>(detail::get_env_int("MASTER_PORT", 1, 65535));
  environment.has_agent_store = detail::get_env("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (is_set("TORCHELASTIC_RESTART_COUNT")) {
    environment.restart_count = detail::get_env_int("TORCHELASTIC_RESTART_COUNT", 0, kMost);
  }
  return environment;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
