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

TEST(Rendezvous, ARankOfAnotherNumberOfRanksIsTold) {
  const int port = free_port();
  std::string others;
  std::thread other(
      [&] { others = error_of([&] { mezzo::rendezvous(environment_of(1, 3, port), 20s); }); });
  EXPECT_THAT(error_of([&] { mezzo::rendezvous(environment_of(0, 2, port), 1s); }),
              HasSubstr("rank 1 has come with another number of ranks, 3"));
  other.join();
  EXPECT_THAT(others, HasSubstr("rank 0 has come with another number of ranks, 2"));
}

TEST(Rendezvous, UnderTorchrunProcessesThatAreStartedAnewSeeNothingOfEarlierOnes) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  // Of a change of membership the environment says nothing.
  std::vector<ProcessGroupEnvironment> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(environment_of(rank, 3, agent->getPort()));
    ranks.back().has_agent_store = true;
  }
  meet(ranks)[0]->set("key", std::string("stale"));
  EXPECT_THAT(error_of([&] { mezzo::rendezvous(ranks[1], 300ms); }),
              HasSubstr("no rank 0 has come"));
  EXPECT_THAT(error_of([&] { mezzo::rendezvous(ranks[0], 300ms); }),
              HasSubstr("no rank 1, 2 has come"));
  // A rank that comes before rank 0 finds the meeting that rank 0 waited in alone.
  StorePtr early;
  std::thread before([&] { early = mezzo::rendezvous(ranks[2], 20s); });
  std::this_thread::sleep_for(50ms);
  const auto again = [&] {
    std::vector<StorePtr> stores(2);
    std::thread other([&] { stores[1] = mezzo::rendezvous(ranks[1], 20s); });
    stores[0] = mezzo::rendezvous(ranks[0], 20s);
    other.join();
    return stores;
  }();
  before.join();
  EXPECT_FALSE(again[1]->check({"key"}));
  again[0]->set("key", std::string("new"));
  EXPECT_EQ(again[1]->get_to_str("key"), "new");
  EXPECT_EQ(early->get_to_str("key"), "new");
  // A rank that is slow does not miss a meeting that the next one follows at once.
  std::vector<StorePtr> second(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int call = 0; call < 20; ++call) second[i] = mezzo::rendezvous(ranks[i], 20s);
    });
  }
  for (auto& thread : threads) thread.join();
  second[0]->set("key", std::string("last"));
  EXPECT_EQ(second[1]->get_to_str("key"), "last");
  EXPECT_EQ(second[2]->get_to_str("key"), "last");
}

}  // namespace
