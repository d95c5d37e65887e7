#include <torch/torch.h>
//
#include <mezzo/distributed/mpi_rendezvous.h>
#include <mezzo/distributed/watchdog.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ranks.h"

namespace {

using distributed_test::all_reduce;
using distributed_test::barrier;
using distributed_test::everyone;
using distributed_test::Ranks;
using distributed_test::ReduceOp;

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(MpiRendezvous, RanksFindEachOthersWordsInTheStore) {
  const Ranks world = everyone();
  const auto store = mezzo::rendezvous(MPI_COMM_WORLD);
  store->set("of " + std::to_string(world->getRank()),
             bytes("word " + std::to_string(world->getRank())));
  for (int rank = 0; rank < world->getSize(); ++rank) {
    EXPECT_EQ(store->get("of " + std::to_string(rank)), bytes("word " + std::to_string(rank)));
  }
  barrier(world);  // rank 0 serves until all have read
}

TEST(MpiRendezvous, JobsOnOneMachineHaveStoresOfTheirOwn) {
  const Ranks world = everyone();
  const auto store = mezzo::rendezvous(MPI_COMM_WORLD), other = mezzo::rendezvous(MPI_COMM_WORLD);
  const std::string own = "of " + std::to_string(world->getRank());
  store->set(own, bytes("one"));
  other->set(own, bytes("two"));
  EXPECT_EQ(store->get(own), bytes("one"));
  EXPECT_EQ(other->get(own), bytes("two"));
  barrier(world);
}

TEST(MpiRendezvous, AWatchdogStandsOnIt) {
  const Ranks world = everyone();
  mezzo::Watchdog watchdog(mezzo::rendezvous(MPI_COMM_WORLD), world->getRank(), world->getSize());
  auto watched = watchdog.watch(world);
  const at::Tensor one = torch::ones({3});
  all_reduce(watched, one, ReduceOp::SUM);
  EXPECT_EQ(one[0].item<float>(), static_cast<float>(world->getSize()));
}

}  // namespace
