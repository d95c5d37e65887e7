/// \file
/// Collectives of tensors on the CPU through MPI. Part of the target mezzo::mpi.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/mpi_environment.h>

#include <cstdint>
#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

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

namespace detail {
class MpiCollectives;
}

/// The ranks of an MPI communicator, as a Communicator (distributed/communicator.h says what its
/// collectives do).
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
class MpiCommunicator {
 public:
  /// All ranks of `communicator` call this together.
  /// \throws c10::Error if MPI is not initialised, or `options` are out of range
  explicit MpiCommunicator(MPI_Comm communicator, const MpiCommunicatorOptions& options = {});

  int rank() const noexcept;
  int size() const noexcept;
  bool serves(c10::DeviceType device) const noexcept { return device == c10::kCPU; }

  Work all_reduce(const at::Tensor& tensor, Reduction reduction);
  Work broadcast(const at::Tensor& tensor, int root);
  Work all_gather(const at::Tensor& output, const at::Tensor& input);
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduction reduction);
  Work barrier();

 private:
  std::shared_ptr<detail::MpiCollectives> collectives_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_communicator_impl.h>  // IWYU pragma: export
