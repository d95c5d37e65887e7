// A user's program, one process of it: MPI makes a world of one rank for whoever starts alone.
#include <mezzo/distributed/mpi_communicator.h>

#include <ATen/ops/ones.h>

int main() {
  const mezzo::MpiEnvironment mpi;
  mezzo::MpiCommunicator world(MPI_COMM_WORLD);
  const at::Tensor ranks = at::ones({3});
  world.all_reduce(ranks, mezzo::Reduction::sum).wait();
  return ranks.sum().item<int>() == 3 * world.size() ? 0 : 1;
}
