/// \file
/// Which process of the job this is, read from the variables that launchers set.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// This process's place in the job, and the address where the processes meet. Launchers set the
/// rank, the world size and the local rank in variables of their own:
///
/// - torchrun, Kubernetes: RANK, WORLD_SIZE and LOCAL_RANK. If LOCAL_RANK is missing, as from
///   Kubernetes, whose processes have a machine each, the local rank is 0.
/// - Open MPI (mpirun): OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK.
/// - SLURM (srun): SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
///
/// If several launchers have set their rank, the first in this list counts, for it is the inner
/// one: Open MPI may itself be started by SLURM, and torchrun by both. A launcher that has not set
/// its rank does not count: a WORLD_SIZE may be left in the shell, and SLURM tells the number of
/// tasks to a shell in an allocation.
///
/// MASTER_ADDR and MASTER_PORT say where the processes meet; torchrun and Kubernetes set them. If
/// they are not set, the processes meet
///
/// - with Open MPI on this machine, if all ranks are on it, at port 29500;
/// - with SLURM on the first host of the step's node list, or else of the job's, at port
///   12000 + (31 * job id + step id) modulo 20000, so that steps of a job meet at different ports.
struct ProcessGroupEnvironment {
  int rank = 0;                  ///< 0 to world_size - 1, unlike any other process's
  int world_size = 1;            ///< processes of the job
  int local_rank = 0;            ///< among the processes on this machine: which of its GPUs to take
  std::string master_addr = {};  ///< host name or address of rank 0
  std::uint16_t master_port = 0;  ///< where rank 0, or torchrun's agent, serves a store
  bool has_agent_store = false;   ///< TORCHELASTIC_USE_AGENT_STORE: torchrun serves the store

  /// Returns whether all members are equal.
  bool operator==(const ProcessGroupEnvironment&) const = default;

  /// A function that returns the value of a variable, if it is set.
  using Variables = std::function<std::optional<std::string>(const char* name)>;

  /// Reads this process's environment, or other `variables`.
  /// \throws c10::Error naming the variable that is missing, is no number, is out of range or
  ///   contradicts another (RANK and OMPI_COMM_WORLD_RANK, for example, unless torchrun set the
  ///   former); and where none of these launchers has started this process
  static ProcessGroupEnvironment read(const Variables& variables = from_env);

  /// Returns whether one of these launchers has started this process.
  static bool is_launched(const Variables& variables = from_env);

  /// Returns the value of the environment variable `name`, if it is set.
  static std::optional<std::string> from_env(const char* name);
};

namespace detail {

/// The variables that one launcher sets.
struct LauncherVariables {
  const char* launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
};

inline constexpr LauncherVariables kTorchrun{"torchrun or Kubernetes", "RANK", "WORLD_SIZE",
                                             "LOCAL_RANK"};
inline constexpr LauncherVariables kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK",
                                            "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"};
inline constexpr LauncherVariables kSlurm{"SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};

/// Returns the first host of a list as SLURM writes it: "gpu[003-006,9],cpu1" begins with gpu003.
inline std::string first_host(std::string_view list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const std::size_t close = list.find(']', i);
    const std::size_t end = list.find_first_of("-,]", i);
    TORCH_CHECK(close != std::string_view::npos && end > i + 1,
                "ProcessGroupEnvironment: cannot read the node list \"", std::string(list),
                "\"; set MASTER_ADDR to the host of rank 0");
    host += list.substr(i + 1, end - i - 1);
    i = close;
  }
  TORCH_CHECK(!host.empty(), "ProcessGroupEnvironment: the node list \"", std::string(list),
              "\" begins with no host; set MASTER_ADDR to the host of rank 0");
  return host;
}

/// Reads the variables of a launcher; errors name the variable that is wrong.
class LaunchReader {
 public:
  using Variables = ProcessGroupEnvironment::Variables;

  explicit LaunchReader(const Variables& variables) : variables_(variables) {}

  /// Returns the value of a variable that is set and not empty: batch scripts clear variables by
  /// setting them to nothing.
  std::optional<std::string> find(const char* name) const {
    std::optional<std::string> value = variables_(name);
    return value && !value->empty() ? value : std::nullopt;
  }

  bool speaks(const LauncherVariables& launcher) const { return find(launcher.rank).has_value(); }

  /// Returns the launcher that has set its rank, or else a launcher other than SLURM that has only
  /// set the number of ranks, so that an error names what is missing. Null where there is none.
  const LauncherVariables* find_launcher() {
    for (const auto* each : {&kTorchrun, &kOpenMpi, &kSlurm}) {
      if (speaks(*each)) return launcher_ = each;
    }
    for (const auto* each : {&kTorchrun, &kOpenMpi}) {
      if (find(each->world_size)) return launcher_ = each;
    }
    return nullptr;
  }

  std::string text(const char* name) const {
    const std::optional<std::string> value = find(name);
    TORCH_CHECK(value, "ProcessGroupEnvironment: ", launcher_->launcher,
                " started this process, but ", name,
                " is not set; start it with torchrun, mpirun or srun, or set the variable");
    return *value;
  }

  int64_t number(const char* name, int64_t from, int64_t to) const {
    const std::string value = text(name);
    int64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto [read_to, error] = std::from_chars(value.data(), end, number);
    TORCH_CHECK(error == std::errc() && read_to == end && number >= from && number <= to,
                "ProcessGroupEnvironment: ", name, " must be a number from ", from, " to ", to,
                ", but is \"", value, "\"");
    return number;
  }

  /// Returns rank, world size and local rank.
  ProcessGroupEnvironment ranks(const LauncherVariables& from, bool local_rank_needed) const {
    constexpr int kMost = std::numeric_limits<int>::max();
    ProcessGroupEnvironment environment;
    environment.world_size = static_cast<int>(number(from.world_size, 1, kMost));
    const int last = environment.world_size - 1;
    environment.rank = static_cast<int>(number(from.rank, 0, last));
    if (local_rank_needed || find(from.local_rank)) {
      environment.local_rank = static_cast<int>(number(from.local_rank, 0, last));
    }
    return environment;
  }

  std::string address(int world_size) const {
    if (launcher_ == &kOpenMpi && !find("MASTER_ADDR")) {
      const int64_t here = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, world_size);
      TORCH_CHECK(here == world_size, "ProcessGroupEnvironment: Open MPI runs ", here, " of ",
                  world_size,
                  " ranks on this machine, so MASTER_ADDR must say where rank 0 is: mpirun -x "
                  "MASTER_ADDR=host ...");
      return "127.0.0.1";
    }
    if (launcher_ == &kSlurm && !find("MASTER_ADDR")) {
      const bool step = find("SLURM_STEP_NODELIST").has_value();
      return first_host(text(step ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST"));
    }
    return text("MASTER_ADDR");
  }

  std::uint16_t port() const {
    if (launcher_ == &kOpenMpi && !find("MASTER_PORT")) return 29500;
    if (launcher_ == &kSlurm && !find("MASTER_PORT")) {
      // Jobs, and steps of a job, that share a machine meet at different ports, below those that
      // systems give away.
      constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
      const int64_t job = number("SLURM_JOB_ID", 0, kMost);
      const int64_t step = find("SLURM_STEP_ID") ? number("SLURM_STEP_ID", 0, kMost) : 0;
      return static_cast<std::uint16_t>(12000 + (31 * (job % 20000) + step) % 20000);
    }
    return static_cast<std::uint16_t>(number("MASTER_PORT", 1, 65535));
  }

  /// Throws where RANK is not Open MPI's rank: the shell may have set one RANK for all processes.
  void check_that_open_mpi_agrees(const ProcessGroupEnvironment& environment) const {
    if (!speaks(kOpenMpi) || find("TORCHELASTIC_RUN_ID")) return;
    const ProcessGroupEnvironment other = ranks(kOpenMpi, false);
    TORCH_CHECK(environment.rank == other.rank && environment.world_size == other.world_size,
                "ProcessGroupEnvironment: RANK and WORLD_SIZE say rank ", environment.rank, " of ",
                environment.world_size, ", but OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE rank ",
                other.rank, " of ", other.world_size,
                "; unset the former, or those of Open MPI if it only started another launcher");
  }

 private:
  const Variables& variables_;
  const LauncherVariables* launcher_ = nullptr;
};

}  // namespace detail

inline std::optional<std::string> ProcessGroupEnvironment::from_env(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

inline bool ProcessGroupEnvironment::is_launched(const Variables& variables) {
  detail::LaunchReader reader(variables);
  const detail::LauncherVariables* const launcher = reader.find_launcher();
  return launcher != nullptr && reader.speaks(*launcher);
}

inline ProcessGroupEnvironment ProcessGroupEnvironment::read(const Variables& variables) {
  detail::LaunchReader reader(variables);
  const detail::LauncherVariables* const launcher = reader.find_launcher();
  TORCH_CHECK(launcher != nullptr,
              "ProcessGroupEnvironment: no launcher has started this process; start it with "
              "torchrun, mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
              "MASTER_PORT");
  const bool is_torchrun = launcher == &detail::kTorchrun;
  ProcessGroupEnvironment environment = reader.ranks(*launcher, /*local_rank_needed=*/!is_torchrun);
  environment.master_addr = reader.address(environment.world_size);
  environment.master_port = reader.port();
  if (is_torchrun) {
    reader.check_that_open_mpi_agrees(environment);
    environment.has_agent_store = reader.find("TORCHELASTIC_USE_AGENT_STORE") == "True";
  }
  return environment;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
