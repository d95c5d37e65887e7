#include <torch/torch.h>
//
#include <mezzo/distributed/rendezvous.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "../support/error_of.h"
#include "free_port.h"

// Where the processes of a job meet: threads stand for them here.
namespace {

using namespace std::chrono_literals;
using distributed_test::free_port;
using mezzo::ProcessGroupEnvironment;
using test_support::error_of;
using testing::AllOf;
using testing::HasSubstr;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

ProcessGroupEnvironment environment_of(int rank, int size, int port) {
  return {rank, size, rank, "127.0.0.1", static_cast<std::uint16_t>(port)};
}

std::vector<StorePtr> meet(std::vector<ProcessGroupEnvironment> ranks) {
  std::vector<StorePtr> stores(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] { stores[i] = mezzo::rendezvous(ranks[i], 20s); });
  }
  for (auto& thread : threads) thread.join();
  return stores;
}

TEST(Rendezvous, TwoOfOneProcessHaveStoresOfTheirOwn) {
  const int port = free_port();
  const auto first = meet({environment_of(0, 2, port), environment_of(1, 2, port)});
  const auto second = meet({environment_of(0, 2, port), environment_of(1, 2, port)});
  first[0]->set("key", std::string("one"));
  second[0]->set("key", std::string("two"));
  EXPECT_EQ(first[1]->get_to_str("key"), "one");
  EXPECT_EQ(second[1]->get_to_str("key"), "two");
}

TEST(Rendezvous, RanksThatDoNotComeAreNamedInTime) {
  const auto start = std::chrono::steady_clock::now();
  const auto environment = environment_of(0, 3, free_port());
  EXPECT_THAT(error_of([&] { mezzo::rendezvous(environment, 500ms); }),
              AllOf(HasSubstr("rank 0 of 3 at 127.0.0.1"), HasSubstr("no rank 1, 2 has come")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(Rendezvous, UnderTorchrunEachAttemptMeetsAnewInTheAgentsStore) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto ranks_of_attempt = [&](int attempt) {
    std::vector<ProcessGroupEnvironment> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(environment_of(rank, 2, agent->getPort()));
      ranks.back().has_agent_store = true;
      ranks.back().restart_count = attempt;
    }
    return ranks;
  };
  meet(ranks_of_attempt(0))[0]->set("key", std::string("stale"));
  const auto alone = ranks_of_attempt(1);
  EXPECT_THAT(error_of([&] { mezzo::rendezvous(alone[0], 300ms); }),
              HasSubstr("no rank 1 has come"));
  const auto again = meet(ranks_of_attempt(2));
  EXPECT_FALSE(again[1]->check({"key"}));
  again[0]->set("key", std::string("new"));
  EXPECT_EQ(again[1]->get_to_str("key"), "new");
}

}  // namespace
