/// \file
/// Gloo as c10d backend, for CPU tensors. Part of the target mezzo::gloo.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string>

#if !defined(USE_C10D_GLOO) || !__has_include(<gloo/context.h>)
#error "this header needs Gloo: link the target mezzo::gloo, find_package(mezzo COMPONENTS gloo)"
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns libtorch's Gloo backend.
///
/// \code
///   const auto environment = mezzo::DistributedEnvironment::from_env();  // torchrun, srun, mpirun
///   const auto world = mezzo::make_gloo_backend(mezzo::rendezvous_store(environment),
///                                               environment.rank, environment.world_size);
///   mezzo::DistributedDataParallel ddp(model, world);
/// \endcode
///
/// As in PyTorch, Gloo uses the network interfaces in GLOO_SOCKET_IFNAME, separated by commas, or
/// else the address of the host name. Set the variable for multi-node runs: the host name often
/// resolves to the loopback interface.
/// \param size  world size
/// \param timeout  of connecting, and of each collective
/// \throws c10::Error if ranks do not connect within `timeout`, or an interface does not exist
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::minutes(30)) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const char* const variable = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream interfaces(variable == nullptr ? "" : variable);
  for (std::string name; std::getline(interfaces, name, ',');) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (options->devices.empty()) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
