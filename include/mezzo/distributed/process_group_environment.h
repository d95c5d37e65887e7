/// \file
/// Which process of the job is this? As launchers say it in the environment.
#pragma once

#include <mezzo/base/version.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// This process's place in the job, and where its processes meet. Launchers say the rank, the world
/// size and the local rank in variables of their own:
///
/// - torchrun, Kubernetes: RANK, WORLD_SIZE and LOCAL_RANK. The last may be missing, as from
///   Kubernetes, whose processes have a machine each: it is 0 then.
/// - Open MPI (mpirun): OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK.
/// - SLURM (srun): SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
///
/// Of several launchers the first in this list counts, being the inner one: Open MPI may itself be
/// started by SLURM, and torchrun by both. One is there if it has set its rank or its world size;
/// SLURM if it has set its rank, for it tells a shell in an allocation the number of tasks too.
///
/// MASTER_ADDR and MASTER_PORT say where the processes meet; torchrun and Kubernetes set them.
/// Where they are not set, it is
///
/// - of Open MPI this machine, if all ranks are on it, and port 29500;
/// - of SLURM the first host of the step's node list, or else of the job's, and port
///   12000 + job id modulo 20000.
struct ProcessGroupEnvironment {
  int rank = 0;                  ///< 0 to world_size - 1, unlike any other process's
  int world_size = 1;            ///< processes of the job
  int local_rank = 0;            ///< among the processes on this machine: which of its GPUs to take
  std::string master_addr = {};  ///< host name or address of rank 0
  std::uint16_t master_port = 0;

  bool operator==(const ProcessGroupEnvironment&) const = default;

  /// The value of a variable, if it is set.
  using Variables = std::function<std::optional<std::string>(const char* name)>;

  /// Of this process's environment, or of any other.
  /// \throws c10::Error naming the variable that is missing, is no number, is out of range or
  /// contradicts another (RANK and OMPI_COMM_WORLD_RANK, say, unless torchrun set the former); and
  /// where none of these launchers has started this process
  static ProcessGroupEnvironment read(const Variables& variables = from_env);

  /// Has one of these launchers started this process?
  static bool is_launched(const Variables& variables = from_env);

  static std::optional<std::string> from_env(const char* name);
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/process_group_environment_impl.h>  // IWYU pragma: export
