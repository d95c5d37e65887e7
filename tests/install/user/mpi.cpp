// Without mpirun, MPI starts a world of one rank.
#include <mezzo/distributed/mpi_backend.h>

#include <ATen/ops/ones.h>

#include <vector>

int main() {
  const mezzo::MpiEnvironment mpi;
  const auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
  std::vector<at::Tensor> ranks = {at::ones({3})};
  world->allreduce(ranks)->wait();
  return ranks[0].sum().item<int>() == 3 * world->getSize() ? 0 : 1;
}
