/// \file
/// MPI for as long as a scope lasts. Part of the target mezzo::mpi.
#pragma once

#include <mezzo/base/version.h>

#if !__has_include(<mpi.h>)
#error "this header needs MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif
#include <mpi.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Initialises MPI, unless the program has done so, and finalises it if it initialised it. Put one
/// at the top of main, before every communicator:
///
/// \code
///   int main() {
///     mezzo::MpiEnvironment mpi;
///     mezzo::MpiCommunicator world(MPI_COMM_WORLD);
/// \endcode
///
/// Left by an exception it does not finalise MPI, which would wait for ranks that wait for this
/// one: the exception goes its way, and when the process ends `mpirun` ends the others.
class MpiEnvironment {
 public:
  /// `thread_level` is asked of MPI where this initialises it. mezzo's own calls exclude one
  /// another, for which MPI_THREAD_SERIALIZED is enough; a program that calls MPI itself in other
  /// threads meanwhile asks for MPI_THREAD_MULTIPLE.
  /// \throws c10::Error if MPI gives less than it is asked for, or has been finalised
  explicit MpiEnvironment(int thread_level = MPI_THREAD_SERIALIZED);
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Did this object initialise MPI?
  bool initialised_it() const noexcept { return initialised_it_; }

 private:
  bool initialised_it_ = false;
  int exceptions_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_environment_impl.h>  // IWYU pragma: export
