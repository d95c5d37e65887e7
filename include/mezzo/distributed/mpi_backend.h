/// \file
/// MPI as a backend of libtorch's c10d, for tensors on the CPU. Part of the target mezzo::mpi.
#pragma once

#if !__has_include(<mpi.h>)
#error "this header needs MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class MpiThread;
struct CollectiveCall;
}  // namespace detail

/// Initialises MPI with MPI_THREAD_MULTIPLE, unless the program has done so, and finalises MPI if
/// it initialised it. Put one at the top of main, before every group:
///
/// \code
///   int main() {
///     mezzo::MpiEnvironment mpi;
///     auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
/// \endcode
///
/// If an exception leaves the scope, the destructor does not finalise MPI, which would wait for
/// ranks that wait for this one. If the scope ends without an exception, and another rank calls a
/// collective of a group that this rank has ended (because it has one batch more, for example), or
/// a collective has not ended after 30 s, the destructor names the collective and calls MPI_Abort
/// with status 75.
class MpiEnvironment {
 public:
  /// \throws c10::Error if MPI has been finalised, or has no MPI_THREAD_MULTIPLE
  MpiEnvironment();
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Returns whether this object initialised MPI.
  bool initialised_it() const noexcept { return initialised_it_; }

 private:
  bool initialised_it_ = false;
  int exceptions_;
};

/// Options of MpiBackend.
struct MpiBackendOptions {
  /// Whether ranks compare their calls (collective, dtype, number of elements, reduction, root)
  /// before any data moves. If calls differ, each rank gets an error that names two ranks, and the
  /// group remains usable. The comparison is an all-gather of 48 bytes a rank for each collective.
  /// Without it, ranks whose calls differ hang or get each other's data, and a rank that waits
  /// keeps a core busy in MPI.
  bool check_calls = true;
  /// The most bytes that one call of MPI is given, 1 to 2^30. A larger collective takes several
  /// calls, so that tensors may have more than 2^31 elements.
  int64_t max_bytes = int64_t{1} << 30;
};

/// A c10d backend of the ranks of an MPI communicator. DataParallel and the other classes of mezzo
/// take it, and so does any libtorch program, directly or through a ProcessGroup:
///
/// \code
///   auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
///   group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::MPI, world);
///   group->setDefaultBackend(c10d::ProcessGroup::BackendType::MPI);
/// \endcode
///
/// Every rank makes the same calls in the same order, with tensors of the same dtype and number of
/// elements, from any thread. A call returns at once, and the backend's own thread does one
/// collective after another. Do not read or write the tensors of a collective before its work has
/// been waited for. Tensors are dense, contiguous, and on the CPU; the version counters of written
/// tensors go up.
///
/// Reductions are SUM, AVG (of floating dtypes: the sum, divided, and rounded once), MIN and MAX,
/// which keep a NaN; for bools MIN and MAX. bfloat16 and half are added up in float, in the order
/// of the ranks, and rounded once, which takes a second copy of their bytes.
///
/// Wrong arguments throw c10::Error at the call. Later errors are thrown by `wait`, and name rank
/// and collective. After an error of MPI the group refuses further calls. The backend communicates
/// on a duplicate of `communicator`. For a subgroup make a backend of a communicator that
/// MPI_Comm_split returns.
class MpiBackend final : public c10d::Backend {
 public:
  /// All ranks of `communicator` call this together.
  /// \throws c10::Error if MPI is not initialised with MPI_THREAD_MULTIPLE, or `options` are out of
  ///   range
  explicit MpiBackend(MPI_Comm communicator, const MpiBackendOptions& options = {});
  ~MpiBackend() override;

  /// Returns "mpi".
  const std::string getBackendName() const override { return "mpi"; }

  /// One collective under way.
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Each rank's tensor becomes the reduction of all ranks'. Takes one tensor.
  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options = {}) override;
  /// Each rank's tensor becomes the root's. Takes one tensor.
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options = {}) override;
  /// `outputs[0]`, a tensor a rank, becomes the ranks' `inputs[0]`.
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options = {}) override;
  /// `output` becomes the inputs in the order of the ranks. `input` may be a part of `output`.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options = {}) override;
  /// `output` becomes the reduction of the ranks' part number `rank` of `input`. `output` may be a
  /// part of `input`, whose other parts stay as they are.
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override;
  /// Part number r of `output` becomes rank r's part for this rank. Parts are equal; both lists of
  /// sizes are empty.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options = {}) override;
  /// The work is done when all ranks have called it.
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  MpiBackend(std::shared_ptr<detail::MpiThread> thread, const MpiBackendOptions& options);

  /// Calls `run(begin, length)` on the backend's thread for each run of elements that MPI takes at
  /// a time.
  template <class Run>
  WorkPtr launch(const detail::CollectiveCall& call, std::vector<at::Tensor> results, int64_t numel,
                 int64_t bytes_each, Run run);

  std::shared_ptr<detail::MpiThread> thread_;
  int64_t max_bytes_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/mpi_backend_impl.h>  // IWYU pragma: export
