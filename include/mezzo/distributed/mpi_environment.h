/// \file
/// MpiEnvironment: initializes and finalizes MPI. Part of the target mezzo::mpi.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/mpi_calls.h>

#include <c10/util/Exception.h>

#include <mpi.h>

#include <exception>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Initializes MPI with MPI_THREAD_MULTIPLE unless the program has done so, and finalizes MPI if it
/// has initialized it. Construct it at the top of main, before any backend:
///
/// \code
///   int main() {
///     mezzo::MpiEnvironment mpi;
///     auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
/// \endcode
///
/// The destructor does not finalize MPI during stack unwinding, because MPI_Finalize would block on
/// ranks that wait for this one. Let the exception terminate the process: mpirun then terminates
/// the other ranks.
class MpiEnvironment {
 public:
  /// \throws c10::Error if MPI has been finalized, or does not support MPI_THREAD_MULTIPLE
  MpiEnvironment() : uncaught_exceptions_(std::uncaught_exceptions()) {
    TORCH_CHECK(!detail::get_mpi_flag(&MPI_Finalized),
                "MpiEnvironment: MPI has been finalized in this process and cannot be initialized "
                "again; construct one MpiEnvironment in main");
    if (detail::get_mpi_flag(&MPI_Initialized)) return;
    int provided = MPI_THREAD_SINGLE;
    detail::check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
                      "MPI_Init_thread");
    owns_mpi_ = true;
    if (provided < MPI_THREAD_MULTIPLE) {
      MPI_Finalize();
      TORCH_CHECK(false,
                  "MpiEnvironment: this MPI library does not support MPI_THREAD_MULTIPLE; use a "
                  "library that is built with thread support");
    }
  }

  ~MpiEnvironment() {
    const bool is_unwinding = std::uncaught_exceptions() > uncaught_exceptions_;
    if (owns_mpi_ && !is_unwinding && !detail::get_mpi_flag(&MPI_Finalized)) MPI_Finalize();
  }

  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Returns whether this object initialized MPI, and will finalize it.
  bool owns_mpi() const noexcept { return owns_mpi_; }

 private:
  bool owns_mpi_ = false;
  int uncaught_exceptions_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
