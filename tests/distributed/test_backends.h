/// \file
/// Backends of the multi-process tests, and blocking collectives.
#pragma once

#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/mpi_backend.h>
#if defined(USE_C10D_GLOO)
#include <mezzo/distributed/gloo_backend.h>
#endif

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string>

namespace distributed_test {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using c10d::ReduceOp;

/// Whether MEZZO_TEST_TRANSPORT is "gloo"; the default is "mpi". mpirun starts the ranks in both
/// cases.
inline bool is_over_gloo() {
  const char* const transport = std::getenv("MEZZO_TEST_TRANSPORT");
  return transport != nullptr && transport == std::string("gloo");
}

#if defined(USE_C10D_GLOO)
/// A store that rank 0 serves on a free port.
inline c10::intrusive_ptr<c10d::Store> get_world_store() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = rank == 0;
  options.waitWorkers = false;
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (rank == 0) {
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    options.port = store->getPort();
  }
  MPI_Bcast(&options.port, 1, MPI_UINT16_T, 0, MPI_COMM_WORLD);
  return rank == 0 ? store : c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}
#endif

/// Collective call: a new backend over `communicator`.
inline BackendPtr make_backend(MPI_Comm communicator) {
  if (!is_over_gloo()) return c10::make_intrusive<mezzo::MpiBackend>(communicator);
#if defined(USE_C10D_GLOO)
  // One store for all backends: a new connection occasionally takes a DNS timeout (5 s).
  static const auto store = get_world_store();
  static int groups_made = 0;
  int rank = 0, size = 0, in_world = 0;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &in_world);
  std::array<int, 2> name{in_world, ++groups_made};  // of the group: its first rank's
  MPI_Bcast(name.data(), 2, MPI_INT, 0, communicator);
  const auto own = c10::make_intrusive<c10d::PrefixStore>(
      std::to_string(name[0]) + "/" + std::to_string(name[1]), store);
  const auto group = mezzo::make_gloo_backend(own, rank, size, std::chrono::minutes(2));
  group->barrier()->wait();  // a rank that skips its test would leave while others still connect
  return group;
#else
  TORCH_CHECK(false, "the tests were built without Gloo");
#endif
}

inline BackendPtr make_world_backend() { return make_backend(MPI_COMM_WORLD); }

// Blocking collectives; all_reduce accepts any memory format.

inline void all_reduce(const BackendPtr& backend, const at::Tensor& tensor,
                       ReduceOp::RedOpType op) {
  const c10::NoGradGuard no_grad;
  const at::Tensor flat = tensor.contiguous();
  mezzo::detail::all_reduce(backend, flat, op)->wait();
  if (!flat.is_same(tensor)) at::Tensor(tensor).copy_(flat);
}
inline void broadcast(const BackendPtr& backend, const at::Tensor& tensor, int root) {
  mezzo::detail::broadcast(backend, {tensor}, root);
}
inline void all_gather(const BackendPtr& backend, const at::Tensor& output,
                       const at::Tensor& input) {
  mezzo::detail::all_gather(backend, output, input);
}
inline void barrier(const BackendPtr& backend) { backend->barrier()->wait(); }

}  // namespace distributed_test
