// Environment variables of launchers, and the rendezvous store, with threads as ranks.
#include <torch/torch.h>
//
#include <mezzo/distributed/broadcast_parameters.h>
#include <mezzo/distributed/rendezvous.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "../support/message_of.h"
#include "free_port.h"

namespace rendezvous_test {
namespace {

using namespace std::chrono_literals;
using distributed_test::free_port;
using mezzo::DistributedEnvironment;
using test_support::message_of;
using testing::HasSubstr;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Sets the variables of one launcher and unsets those of others in its scope.
class Variables {
 public:
  explicit Variables(const std::map<std::string, std::string>& values) {
    for (const char* name : kNames) {
      const char* const before = std::getenv(name);
      if (before != nullptr) before_[name] = before;
      ::unsetenv(name);
    }
    for (const auto& [name, value] : values) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "TORCHELASTIC_RESTART_COUNT"};
  std::map<std::string, std::string> before_;
};

using Values = std::map<std::string, std::string>;

Values with_master(Values values) {
  values.insert({{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29400"}});
  return values;
}

TEST(DistributedEnvironment, ReadsEveryLauncher) {
  const std::vector<Values> launchers = {
      {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}},
      {{"OMPI_COMM_WORLD_RANK", "5"},
       {"OMPI_COMM_WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
      {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}},
      // srun starts torchrun: the inner launcher takes precedence.
      {{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"SLURM_PROCID", "0"},
       {"SLURM_NTASKS", "2"}},
      // A WORLD_SIZE in the shell without RANK is ignored.
      {{"WORLD_SIZE", "3"}, {"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}}};
  for (const Values& values : launchers) {
    const Variables set(with_master(values));
    const auto environment = DistributedEnvironment::from_env();
    EXPECT_EQ(environment.rank, 5);
    EXPECT_EQ(environment.world_size, 8);
    EXPECT_EQ(environment.local_rank, 1);
    EXPECT_EQ(environment.master_addr, "10.0.0.7");
    EXPECT_EQ(environment.master_port, 29400);
    EXPECT_FALSE(environment.has_agent_store);
    EXPECT_EQ(environment.restart_count, 0);
  }
}

TEST(DistributedEnvironment, ReadsAgentStoreAndLocalRank) {
  const Variables set(with_master({{"RANK", "1"},
                                   {"WORLD_SIZE", "2"},
                                   {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                   {"TORCHELASTIC_RESTART_COUNT", "4"}}));
  const auto environment = DistributedEnvironment::from_env();
  EXPECT_EQ(environment.local_rank, 0);
  EXPECT_TRUE(environment.has_agent_store);
  EXPECT_EQ(environment.restart_count, 4);
}

TEST(DistributedEnvironment, ReportsMissingOrInvalidVariable) {
  const auto error_with = [](const Values& values) {
    const Variables set(values);
    return message_of([] { DistributedEnvironment::from_env(); });
  };
  EXPECT_THAT(error_with({}), testing::AllOf(HasSubstr("WORLD_SIZE is not set"),
                                             HasSubstr("torchrun, mpirun or srun")));
  EXPECT_THAT(error_with(with_master({{"RANK", "0"}})), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(error_with(with_master({{"RANK", "2"}, {"WORLD_SIZE", "2"}})),
              HasSubstr("RANK must be a number from 0 to 1, but is \"2\""));
  EXPECT_THAT(error_with(with_master({{"RANK", "0"}, {"WORLD_SIZE", "2x"}})),
              HasSubstr("WORLD_SIZE must be a number"));
  for (const std::string wrong : {"0", "-1", "99999999999", "x", " 2"}) {
    EXPECT_THAT(error_with(with_master({{"RANK", "0"}, {"WORLD_SIZE", wrong}})),
                HasSubstr("WORLD_SIZE must be a number"));
  }
  EXPECT_THAT(error_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
              HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(
      error_with(
          {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "70000"}}),
      HasSubstr("MASTER_PORT must be a number from 1 to 65535, but is \"70000\""));
}

DistributedEnvironment make_environment(int rank, int size, int port, int restarts = 0) {
  return {.rank = rank,
          .world_size = size,
          .local_rank = rank,
          .master_addr = "127.0.0.1",
          .master_port = static_cast<std::uint16_t>(port),
          .restart_count = restarts};
}

std::vector<StorePtr> meet(const std::vector<DistributedEnvironment>& ranks) {
  std::vector<StorePtr> stores(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] { stores[i] = mezzo::rendezvous_store(ranks[i], 20s); });
  }
  for (auto& thread : threads) thread.join();
  return stores;
}

TEST(RendezvousStore, ConnectsAllRanksToRank0) {
  const int port = free_port();
  const auto stores = meet(
      {make_environment(0, 3, port), make_environment(1, 3, port), make_environment(2, 3, port)});
  stores[1]->set("key", std::string("value"));
  EXPECT_EQ(stores[0]->get_to_str("key"), "value");
  EXPECT_EQ(stores[2]->get_to_str("key"), "value");
}

// Takes a second: the polling interval of c10d.
TEST(RendezvousStore, MissingRankThrowsWithinTimeout) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(
      message_of([&] { mezzo::rendezvous_store(make_environment(0, 2, free_port()), 500ms); }),
      "no error");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST(RendezvousStore, TorchrunRestartUsesFreshKeys) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto connect_to_agent = [&](int rank, int restarts) {
    auto environment = make_environment(rank, 2, agent->getPort(), restarts);
    environment.has_agent_store = true;
    return mezzo::rendezvous_store(environment, 20s);
  };
  connect_to_agent(0, 0)->set("key", std::string("stale"));
  const StorePtr first = connect_to_agent(0, 1), second = connect_to_agent(1, 1);
  EXPECT_FALSE(first->check({"key"}));
  first->set("key", std::string("new"));
  EXPECT_EQ(second->get_to_str("key"), "new");
}

TEST(BroadcastParameters, ThrowsForNullBackend) {
  const mezzo::TensorsByName tensors = {{"weight", at::zeros({2})}};
  EXPECT_THAT(message_of([&] { mezzo::broadcast_parameters(tensors, nullptr); }),
              HasSubstr("broadcast_parameters: `backend` is null"));
}

}  // namespace
}  // namespace rendezvous_test
