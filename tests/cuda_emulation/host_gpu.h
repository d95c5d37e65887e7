/// \file
/// Two GPUs' streams, events, memory and graphs, played by the host: libtorch's device PrivateUse1,
/// on which every op of ATen's and every kernel of mezzo's runs (host_device.h).
///
/// Nothing runs when it is called: it waits in its stream's queue. Which stream goes on, and when,
/// is drawn from a seed; the host's waits alone force it. Memory comes from a caching allocator as
/// CUDA's in libtorch: freed memory is its stream's again at once, a capture has a pool of its own,
/// and what is new or freed is NaN, in the order of its stream. What CUDA forbids is a Fault.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "host_device.h"

namespace emulated_gpu {

using cuda_emulation::Fault;

inline constexpr int kDevices = 2;
inline c10::Device device(int index = 0) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

/// Begins anew: runs what waits, and draws from `seed` from here on.
void begin(uint64_t seed);

/// Runs all that waits, which the host otherwise causes by waiting; and looks at the ends of all
/// memory. \throws Fault if somebody wrote past one
void run_all();

/// A stream of its own. The default one, like CUDA's, cannot be captured.
c10::Stream new_stream(int device_index = 0);

/// While it lives nothing of the stream runs that is put there now or later.
class Held {
 public:
  explicit Held(const c10::Stream& stream);
  ~Held() { end(); }
  void end();
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  std::shared_ptr<struct Marker> gate_;
};

/// What was asked of the devices since `begin`.
struct Counts {
  int64_t launches = 0;        ///< of mezzo's kernels
  int64_t argument_bytes = 0;  ///< of these launches
  int64_t ops = 0;             ///< of ATen's, copies on a device among them
  int64_t copies_from_host = 0;
  int64_t copies_to_host = 0;  ///< recorded ones count once
  int64_t waits = 0;           ///< of the host
};
Counts counts();

/// Work that is recorded, and runs when it is replayed: on the current stream and in any order that
/// its dependencies allow.
class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Of the current stream, and of those that wait for its events.
  void capture_begin();
  void capture_end();
  void replay();
  /// How many kernels of mezzo's it has.
  int64_t launches() const;

 private:
  struct Recording;
  friend struct Machine;
  std::shared_ptr<Recording> recording_;
};

/// Records what `work` does, on the current stream.
template <class Work>
void capture(Graph& graph, const Work& work) {
  graph.capture_begin();
  try {
    work();
  } catch (...) {
    graph.capture_end();
    throw;
  }
  graph.capture_end();
}

}  // namespace emulated_gpu
