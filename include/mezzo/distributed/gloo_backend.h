/// \file
/// Gloo for the processes of a job: tensors on the CPU, without MPI. Part of the target
/// mezzo::gloo.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string>

#if !defined(USE_C10D_GLOO) || !__has_include(<gloo/context.h>)
#error \
    "this header needs Gloo's headers: link the target mezzo::gloo, find_package(mezzo COMPONENTS gloo)"
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Returns libtorch's Gloo backend over `size` processes, of which this one is number `rank`.
/// Several groups may use one store, if each has a c10d::PrefixStore of its own.
///
/// \code
///   const auto environment = mezzo::ProcessGroupEnvironment::read();   // torchrun, srun, mpirun
///   const auto world = mezzo::gloo_backend(mezzo::rendezvous(environment), environment.rank,
///                                          environment.world_size);
///   mezzo::DataParallel ddp(model, world);
/// \endcode
///
/// Gloo listens at the address of this machine's name, or at the network interfaces that
/// GLOO_SOCKET_IFNAME lists, separated by commas (both as in PyTorch). Set this variable for ranks
/// on several machines: on many machines the own name stands for the loopback. Sums of bfloat16 and
/// half are rounded at each rank; averages are divided before they are added. Gloo does not compare
/// which collectives the ranks call. \param timeout of a collective
/// \throws c10::Error if the others do not come within the store's time-out, cannot be reached, or
///   there is no such interface
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::minutes(30)) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::min(timeout, store->getTimeout()));
  const std::string context = c10::str("mezzo::gloo_backend: rank ", rank, " of ", size,
                                       ", whose network interface GLOO_SOCKET_IFNAME names");
  return detail::with_context(context, [&] {
    const char* const variable = std::getenv("GLOO_SOCKET_IFNAME");
    std::istringstream interfaces(variable == nullptr ? "" : variable);
    for (std::string name; std::getline(interfaces, name, ',');) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
    if (options->devices.empty()) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    }
    auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
    group->setTimeout(timeout);
    return group;
  });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
