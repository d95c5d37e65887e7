/// \file
/// DistributedEnvironment: rank and world size from the launcher's environment variables.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Rank, world size and rendezvous address, as in torch's `env://` initialization.
struct DistributedEnvironment {
  int rank = 0;                   ///< 0 to world_size - 1
  int world_size = 1;             ///< number of processes
  int local_rank = 0;             ///< rank within the node, for the choice of a GPU
  std::string master_addr = {};   ///< host name or address of rank 0
  std::uint16_t master_port = 0;  ///< port of the store that rank 0 or torchrun's agent serves
  bool has_agent_store = false;   ///< TORCHELASTIC_USE_AGENT_STORE: torchrun serves the store
  int restart_count = 0;          ///< TORCHELASTIC_RESTART_COUNT: number of restarts by torchrun

  /// Reads MASTER_ADDR, MASTER_PORT and the variables of the first launcher that has set its rank:
  /// - torchrun and Kubernetes: RANK, WORLD_SIZE and LOCAL_RANK (default 0);
  /// - Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK;
  /// - Slurm: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
  /// \throws c10::Error naming a variable that is not set, not an integer or out of range
  static DistributedEnvironment from_env();
};

namespace detail {

/// Returns the value of an environment variable, or an empty string if it is not set.
inline std::string get_env(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

inline int get_env_int(const char* name, int min, int max) {
  const std::string text = get_env(name);
  TORCH_CHECK(!text.empty(), "DistributedEnvironment: ", name,
              " is not set; start the process with torchrun, mpirun or srun, or set RANK, "
              "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [read_to, error] = std::from_chars(text.data(), end, number);
  TORCH_CHECK(error == std::errc() && read_to == end && number >= min && number <= max,
              "DistributedEnvironment: ", name, " must be a number from ", min, " to ", max,
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
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  DistributedEnvironment environment;
  environment.world_size = detail::get_env_int(launcher.world_size, 1, kMaxInt);
  const int last = environment.world_size - 1;
  environment.rank = detail::get_env_int(launcher.rank, 0, last);
  if (is_set(launcher.local_rank)) {
    environment.local_rank = detail::get_env_int(launcher.local_rank, 0, last);
  }
  environment.master_addr = detail::get_env("MASTER_ADDR");
  TORCH_CHECK(!environment.master_addr.empty(),
              "DistributedEnvironment: MASTER_ADDR is not set; set it to the host of rank 0, and "
              "MASTER_PORT to a free port there");
  environment.master_port =
      static_cast<std::uint16_t>(detail::get_env_int("MASTER_PORT", 1, 65535));
  environment.has_agent_store = detail::get_env("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (is_set("TORCHELASTIC_RESTART_COUNT")) {
    environment.restart_count = detail::get_env_int("TORCHELASTIC_RESTART_COUNT", 0, kMaxInt);
  }
  return environment;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
