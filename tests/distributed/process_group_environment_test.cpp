#include <torch/torch.h>
//
#include <mezzo/distributed/process_group_environment.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>

namespace {

using mezzo::ProcessGroupEnvironment;
using testing::AllOf;
using testing::HasSubstr;

using Environment = std::map<std::string, std::string>;

ProcessGroupEnvironment::Variables variables_of(const Environment& environment) {
  return [&environment](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? std::nullopt : std::optional(found->second);
  };
}

ProcessGroupEnvironment read(const Environment& environment) {
  return ProcessGroupEnvironment::read(variables_of(environment));
}

std::string error_in(const Environment& environment) {
  try {
    read(environment);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

Environment with(Environment environment, const Environment& changes) {
  for (const auto& [name, value] : changes) environment[name] = value;
  return environment;
}

Environment without(Environment environment, const std::string& name) {
  environment.erase(name);
  return environment;
}

const Environment kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"MASTER_ADDR", "node0.cluster"},
                               {"MASTER_PORT", "29400"}};
const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                              {"OMPI_COMM_WORLD_SIZE", "4"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Environment kSlurm = {{"SLURM_PROCID", "9"},
                            {"SLURM_NTASKS", "16"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_JOB_ID", "1234567"},
                            {"SLURM_JOB_NODELIST", "login1,gpu[003-004]"},
                            {"SLURM_STEP_NODELIST", "gpu[003-004]"}};

TEST(ProcessGroupEnvironment, ReadsWhatTorchrunSets) {
  EXPECT_EQ(read(kTorchrun), (ProcessGroupEnvironment{5, 8, 1, "node0.cluster", 29400}));
}

TEST(ProcessGroupEnvironment, TakesKubernetesProcessesToBeAloneOnTheirMachines) {
  EXPECT_EQ(read(without(kTorchrun, "LOCAL_RANK")),
            (ProcessGroupEnvironment{5, 8, 0, "node0.cluster", 29400}));
}

TEST(ProcessGroupEnvironment, ReadsWhatOpenMpiSets) {
  EXPECT_EQ(read(kOpenMpi), (ProcessGroupEnvironment{3, 4, 3, "127.0.0.1", 29500}));
  EXPECT_EQ(read(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                 {"MASTER_ADDR", "node7"},
                                 {"MASTER_PORT", "1024"}})),
            (ProcessGroupEnvironment{3, 4, 1, "node7", 1024}));
  EXPECT_THAT(error_in(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})),
              AllOf(HasSubstr("2 of 4 ranks on this machine"), HasSubstr("MASTER_ADDR")));
}

TEST(ProcessGroupEnvironment, ReadsWhatSlurmSets) {
  EXPECT_EQ(read(kSlurm), (ProcessGroupEnvironment{9, 16, 1, "gpu003", 12000 + 11577}));
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_STEP_ID", "0"}})), read(kSlurm));
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_STEP_ID", "2"}})).master_port, 12000 + 11579)
      << "two steps of a job meet at different ports";
  EXPECT_EQ(read(without(kSlurm, "SLURM_STEP_NODELIST")).master_addr, "login1");
  EXPECT_EQ(read(with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "65535"}})),
            (ProcessGroupEnvironment{9, 16, 1, "10.0.0.1", 65535}));
}

TEST(ProcessGroupEnvironment, FindsTheFirstHostOfEveryFormOfNodeList) {
  const std::map<std::string, std::string> firsts = {
      {"gpu7", "gpu7"},           {"gpu7,gpu9", "gpu7"},       {"gpu[3,5-9],cpu1", "gpu3"},
      {"gpu[007-012]", "gpu007"}, {"r[1-2]n[03-04]", "r1n03"}, {"gpu[4].site", "gpu4.site"}};
  for (const auto& [list, first] : firsts) {
    EXPECT_EQ(read(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})).master_addr, first) << list;
  }
  for (const char* list : {"gpu[3", "gpu[]", "gpu[-4]", ",gpu3"}) {
    EXPECT_THAT(error_in(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})),
                AllOf(HasSubstr(list), HasSubstr("MASTER_ADDR")));
  }
}

TEST(ProcessGroupEnvironment, TheInnermostLauncherCounts) {
  // srun starts mpirun's daemons: their tasks are not the ranks.
  EXPECT_EQ(read(with(kSlurm, kOpenMpi)).rank, 3);
  // Both start torchrun, once a machine.
  const Environment torchrun = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}});
  EXPECT_EQ(read(with(with(kSlurm, kOpenMpi), torchrun)).rank, 5);
}

TEST(ProcessGroupEnvironment, AWorldSizeThatIsLeftInTheShellIsNoLauncher) {
  EXPECT_EQ(read(with(kSlurm, {{"WORLD_SIZE", "4"}})), read(kSlurm));
  EXPECT_EQ(read(with(kOpenMpi, {{"WORLD_SIZE", "8"}})), read(kOpenMpi));
  EXPECT_FALSE(ProcessGroupEnvironment::is_launched(variables_of({{"WORLD_SIZE", "4"}})));
}

TEST(ProcessGroupEnvironment, ReadsWhetherTorchrunsAgentServesTheStore) {
  EXPECT_TRUE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).has_agent_store);
  EXPECT_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).has_agent_store);
}

TEST(ProcessGroupEnvironment, RanksThatContradictEachOtherAreNamed) {
  // As in `RANK=0 WORLD_SIZE=1 mpirun -np 4`.
  const Environment of_the_shell =
      with(kTorchrun, {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}});
  EXPECT_THAT(error_in(with(of_the_shell, kOpenMpi)),
              AllOf(HasSubstr("RANK and WORLD_SIZE say rank 0 of 4"),
                    HasSubstr("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE rank 3 of 4")));
  EXPECT_EQ(read(with(with(of_the_shell, {{"RANK", "3"}}), kOpenMpi)).rank, 3);
}

TEST(ProcessGroupEnvironment, WhatIsMissingIsNamed) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(error_in(without(kTorchrun, name)), HasSubstr(std::string(name) + " is not set"));
    EXPECT_THAT(error_in(with(kTorchrun, {{name, ""}})),
                HasSubstr(std::string(name) + " is not set"));
  }
  for (const auto& [name, value] : kOpenMpi) {
    EXPECT_THAT(error_in(without(kOpenMpi, name)), HasSubstr(name + " is not set"));
  }
  for (const char* name : {"SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"}) {
    EXPECT_THAT(error_in(without(kSlurm, name)), HasSubstr(std::string(name) + " is not set"));
  }
  EXPECT_THAT(error_in({}), AllOf(HasSubstr("no launcher"), HasSubstr("torchrun, mpirun or srun")));
}

TEST(ProcessGroupEnvironment, WhatIsNoNumberOrOutOfRangeIsNamedWithItsRange) {
  const auto expect = [](const char* name, const char* value, const std::string& range) {
    EXPECT_THAT(error_in(with(kTorchrun, {{name, value}})),
                HasSubstr(std::string(name) + " must be a number from " + range + ", but is \"" +
                          value + "\""));
  };
  for (const char* value : {"8", "-1", "five", "5x", " 5", "5.", "99999999999999999999"}) {
    expect("RANK", value, "0 to 7");
    expect("LOCAL_RANK", value, "0 to 7");
  }
  for (const char* value : {"0", "-8", "2147483648"}) {
    expect("WORLD_SIZE", value, "1 to 2147483647");
  }
  for (const char* value : {"0", "65536", "http"}) expect("MASTER_PORT", value, "1 to 65535");
}

TEST(ProcessGroupEnvironment, KnowsWhetherALauncherStartedTheProcess) {
  for (const Environment& environment : {kTorchrun, kOpenMpi, kSlurm, Environment{{"RANK", "0"}}}) {
    EXPECT_TRUE(ProcessGroupEnvironment::is_launched(variables_of(environment)));
  }
  // A shell in an allocation of SLURM's has a job, but is no task.
  EXPECT_FALSE(ProcessGroupEnvironment::is_launched(
      variables_of({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}})));
}

TEST(ProcessGroupEnvironment, ReadsThisProcessesEnvironmentByDefault) {
  ::setenv("MEZZO_TEST_OF_THIS_PROCESS", "there", 1);
  EXPECT_EQ(ProcessGroupEnvironment::from_env("MEZZO_TEST_OF_THIS_PROCESS"), "there");
  ::unsetenv("MEZZO_TEST_OF_THIS_PROCESS");
  EXPECT_EQ(ProcessGroupEnvironment::from_env("MEZZO_TEST_OF_THIS_PROCESS"), std::nullopt);
}

}  // namespace
