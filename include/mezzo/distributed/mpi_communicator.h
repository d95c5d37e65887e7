/// \file
/// MPI for as long as a scope lasts, and collectives of tensors on the CPU through it. Part of the
/// target mezzo::mpi.
#pragma once

#if !__has_include(<mpi.h>)
#error "this header needs MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/mpi_calls.h>

#include <c10/util/Exception.h>

#include <mpi.h>

#include <cstdint>
#include <exception>

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

struct MpiCommunicatorOptions {
  /// Compare the ranks' calls (collective, dtype, number of elements, reduction, root) before any
  /// data moves: where they differ, each rank gets an error that names two that do, and the
  /// communicator goes on. One all-gather of 48 bytes a rank for each collective; without it, ranks
  /// that disagree hang or get each other's data.
  bool check_calls = true;
  /// The most that one call of MPI is given, in bytes; what is larger goes in several, so that
  /// tensors of more than 2^31 elements need nothing of MPI. 1 to 2^30.
  int64_t max_bytes = int64_t{1} << 30;
};

/// The ranks of an MPI communicator.
///
/// float, double and integers are reduced by MPI; bfloat16 and half by an all-to-all, a sum in
/// float in the order of the ranks that is rounded once, and an all-gather, for a reduction of
/// MPI's would round each partial sum; for that they hold a second copy of their bytes until they
/// are done. Tensors that are not contiguous, and collectives of more than `max_bytes`, are copied.
///
/// All calls are MPI's non-blocking collectives, for which Open MPI 4 picks poor algorithms: with
/// large buckets set OMPI_MCA_coll_libnbc_iallreduce_algorithm=3 (benchmarks/results).
///
/// MPI moves data on when it is called: by `Work::ready` and `wait`, and by every
/// later collective. Calls may come from any thread where MPI was initialised with
/// MPI_THREAD_SERIALIZED or more (MpiEnvironment does), else from the thread that initialised it.
///
/// What MPI reports is thrown as c10::Error with its words, the rank and the collective; from then
/// on the communicator refuses further calls with the same words, for the ranks are no longer in
/// step. It communicates on duplicates of `communicator`, and never meets messages of others. A
/// communicator may outlive the MpiEnvironment, but can do nothing then.
class MpiCommunicator : public Communicator {
 public:
  /// All ranks of `communicator` call this together.
  /// \throws c10::Error if MPI is not initialised, or `options` are out of range
  explicit MpiCommunicator(MPI_Comm communicator, const MpiCommunicatorOptions& options = {});
};

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
                thread_level, " was asked for; use a library that is built with threads");
  }
}

inline MpiEnvironment::~MpiEnvironment() {
  if (!initialised_it_ || std::uncaught_exceptions() > exceptions_) return;
  if (!detail::mpi_is_finalized()) MPI_Finalize();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_backend.h>  // IWYU pragma: export
