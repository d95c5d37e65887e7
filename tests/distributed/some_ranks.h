/// \file
/// Fewer ranks than there are.
#pragma once

#include <mpi.h>

#include <vector>

#include "ranks.h"

namespace distributed_test {

inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// The first ranks of the world; the others have no part in it.
class SomeRanks {
 public:
  explicit SomeRanks(int size) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &communicator_);
  }
  ~SomeRanks() {
    if (communicator_ != MPI_COMM_NULL) MPI_Comm_free(&communicator_);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  SomeRanks(const SomeRanks&) = delete;
  SomeRanks& operator=(const SomeRanks&) = delete;

  bool has_this() const { return communicator_ != MPI_COMM_NULL; }
  Ranks ranks() const { return ranks_of(communicator_); }

 private:
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

/// Those that the world has room for, of which none rounds an average.
inline std::vector<int> numbers_of_ranks() {
  std::vector<int> all;
  for (const int size : {1, 2, 4}) {
    if (size <= world_size()) all.push_back(size);
  }
  return all;
}

}  // namespace distributed_test
