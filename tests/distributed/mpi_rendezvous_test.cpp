#include <torch/torch.h>
//
#include <mezzo/distributed/mpi_communicator.h>
#include <mezzo/distributed/mpi_rendezvous.h>
#include <mezzo/distributed/watchdog.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

TEST(MpiRendezvous, RanksFindEachOthersWordsInTheStore) {
  mezzo::MpiCommunicator world(MPI_COMM_WORLD);
  const auto store = mezzo::rendezvous(MPI_COMM_WORLD);
  store->set("of " + std::to_string(world.rank()), bytes("word " + std::to_string(world.rank())));
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(store->get("of " + std::to_string(rank)), bytes("word " + std::to_string(rank)));
  }
  world.barrier().wait();  // rank 0 serves until all have read
}

TEST(MpiRendezvous, JobsOnOneMachineHaveStoresOfTheirOwn) {
  mezzo::MpiCommunicator world(MPI_COMM_WORLD);
  const auto store = mezzo::rendezvous(MPI_COMM_WORLD), other = mezzo::rendezvous(MPI_COMM_WORLD);
  const std::string own = "of " + std::to_string(world.rank());
  store->set(own, bytes("one"));
  other->set(own, bytes("two"));
  EXPECT_EQ(store->get(own), bytes("one"));
  EXPECT_EQ(other->get(own), bytes("two"));
  world.barrier().wait();
}

TEST(MpiRendezvous, AWatchdogStandsOnIt) {
  mezzo::MpiCommunicator world(MPI_COMM_WORLD);
  mezzo::Watchdog watchdog(mezzo::rendezvous(MPI_COMM_WORLD), world.rank(), world.size());
  auto watched = watchdog.watch(world);
  const at::Tensor one = torch::ones({3});
  watched.all_reduce(one, mezzo::Reduction::sum).wait();
  EXPECT_EQ(one[0].item<float>(), static_cast<float>(world.size()));
}

}  // namespace
