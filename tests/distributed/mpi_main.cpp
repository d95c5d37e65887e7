// Runs the tests on each rank that mpirun starts. A failed test aborts all ranks, because others
// may wait for this rank in a collective. With --external-mpi-init, MPI is initialized without
// MpiEnvironment.

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "test_backends.h"

namespace {

using distributed_test::BackendPtr;
using distributed_test::barrier;
using distributed_test::make_world_backend;

class AbortOnFailureListener : public testing::EmptyTestEventListener {
 public:
  explicit AbortOnFailureListener(int rank) : rank_(rank) {}

  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + '.' + test.name();
  }

  // GoogleTest holds a lock here, so the current test cannot be queried.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::cerr << "rank " << rank_ << ": " << test_ << '\n'
              << result.file_name() << ':' << result.line_number() << ": " << result.message()
              << std::endl;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

 private:
  int rank_;
  std::string test_;
};

int run_tests() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new AbortOnFailureListener(rank));
  return RUN_ALL_TESTS();
}

int throw_on_last_rank() {
  try {
    const mezzo::MpiEnvironment mpi;
    const BackendPtr world = make_world_backend();
    if (world->getRank() == world->getSize() - 1)
      throw std::runtime_error("exception on the last rank");
    barrier(world);
    std::cerr << "rank " << world->getRank() << " passed the barrier, which one rank did not enter"
              << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}

int construct_backend_without_threads() {
  MPI_Init(nullptr, nullptr);
  int status = 1;
  try {
    const mezzo::MpiBackend world(MPI_COMM_WORLD);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    status = 0;
  }
  MPI_Finalize();
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1 && argv[1] == std::string("--throw-on-last-rank")) return throw_on_last_rank();
  if (argc > 1 && argv[1] == std::string("--mpi-without-threads")) {
    return construct_backend_without_threads();
  }
  if (argc > 1 && argv[1] == std::string("--external-mpi-init")) {
    int level = MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    const int failed = run_tests();
    MPI_Finalize();
    return failed;
  }
  const mezzo::MpiEnvironment mpi;
  return run_tests();
}
