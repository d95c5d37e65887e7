/// \file
/// Which process of the job is this? As launchers say it in the environment.
#pragma once

#include <mezzo/version.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// This process's place in the job, and where its processes meet.
///
/// | from | rank, world_size, local_rank | master_addr, master_port |
/// |---|---|---|
/// | torchrun, Kubernetes | RANK, WORLD_SIZE, LOCAL_RANK | MASTER_ADDR, MASTER_PORT |
/// | Open MPI | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK | the same if set; else this machine if
/// all ranks are on it, and port 29500 | | SLURM (srun) | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID
/// | the same if set; else the first host of the step's node list, and port 12000 + job id modulo
/// 20000 |
///
/// The first launcher of these that has set its rank (but for SLURM, or size) is the one that
/// counts: it is the inner one, since Open MPI may itself be started by SLURM, and torchrun by
/// both. LOCAL_RANK may be missing, as from Kubernetes, whose processes have a machine each: it is
/// 0 then.
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
  static ProcessGroupEnvironment read(const Variables& variables = of_this_process);

  /// Has one of these launchers started this process?
  static bool is_there(const Variables& variables = of_this_process);

  static std::optional<std::string> of_this_process(const char* name);
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/detail/distributed/process_group_environment_impl.h>  // IWYU pragma: export
