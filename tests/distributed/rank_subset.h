/// \file
/// RankSubset: the first ranks of the world.
#pragma once

#include <mpi.h>

#include <vector>

#include "test_backends.h"

namespace distributed_test {

inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// A communicator of the first `size` ranks; the destructor is a barrier of all ranks.
class RankSubset {
 public:
  explicit RankSubset(int size) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &communicator_);
  }
  ~RankSubset() {
    if (communicator_ != MPI_COMM_NULL) MPI_Comm_free(&communicator_);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  RankSubset(const RankSubset&) = delete;
  RankSubset& operator=(const RankSubset&) = delete;

  bool contains_this_rank() const { return communicator_ != MPI_COMM_NULL; }
  BackendPtr backend() const { return make_backend(communicator_); }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

/// World sizes up to the current one for which averages are exact.
inline std::vector<int> available_world_sizes() {
  std::vector<int> all;
  for (const int size : {1, 2, 4}) {
    if (size <= world_size()) all.push_back(size);
  }
  return all;
}

}  // namespace distributed_test
