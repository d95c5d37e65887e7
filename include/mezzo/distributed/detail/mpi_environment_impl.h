#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/mpi_calls.h>
#include <mezzo/distributed/mpi_environment.h>

#include <exception>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline MpiEnvironment::MpiEnvironment(int thread_level) : exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!detail::mpi_is_finalized(),
              "MpiEnvironment: MPI has been finalised in this process and cannot be initialised "
              "again; keep one MpiEnvironment for as long as main runs");
  if (detail::mpi_is_initialized()) return;
  int provided = MPI_THREAD_SINGLE;
  detail::check_mpi(MPI_Init_thread(nullptr, nullptr, thread_level, &provided), "MPI_Init_thread",
                    "MpiEnvironment");
  initialised_it_ = true;
  if (provided < thread_level) {
    MPI_Finalize();
    TORCH_CHECK(false, "MpiEnvironment: this MPI library allows thread level ", provided, " where ",
                thread_level, " was asked for; it must be built with threads");
  }
}

inline MpiEnvironment::~MpiEnvironment() {
  if (!initialised_it_ || std::uncaught_exceptions() > exceptions_) return;
  if (!detail::mpi_is_finalized()) MPI_Finalize();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
