/// \file
/// Emulates streams, events, memory and graphs of two GPUs on the host: libtorch's device
/// PrivateUse1, on which all ATen ops and all kernels of mezzo run (cuda_emulation.h).
///
/// Calls only enqueue work. Which stream's work runs next, and when, is drawn from a seed; only a
/// host sync forces it. The caching allocator works like libtorch's for CUDA: freed memory is
/// reused by its stream at once, and a capture has a private pool. New and freed memory is NaN, in
/// stream order. Calls that CUDA forbids throw a CudaUsageError.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "cuda_emulation.h"

namespace emulated_gpu {

using cuda_emulation::CudaUsageError;

inline constexpr int kDevices = 2;
inline c10::Device device(int index = 0) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

/// Runs all enqueued work, resets the counts, and seeds the scheduler.
void begin(uint64_t seed);

/// Runs all enqueued work and checks the guard bytes of all memory.
/// \throws CudaUsageError for an out-of-bounds write
void run_all();

/// Returns a new stream. The default stream cannot be captured, as in CUDA.
c10::Stream new_stream(int device_index = 0);

/// Blocks the stream's later work while it exists.
class StreamBlocker {
 public:
  explicit StreamBlocker(const c10::Stream& stream);
  ~StreamBlocker() { end(); }
  void end();
  StreamBlocker(const StreamBlocker&) = delete;
  StreamBlocker& operator=(const StreamBlocker&) = delete;

 private:
  std::shared_ptr<struct EventRecord> gate_;
};

/// Counts of calls since `begin`.
struct Counts {
  int64_t launches = 0;        ///< of mezzo's kernels
  int64_t argument_bytes = 0;  ///< of these launches
  int64_t ops = 0;             ///< of ATen, including copies on a device
  int64_t copies_from_host = 0;
  int64_t copies_to_host = 0;  ///< recorded ones count once
  int64_t syncs = 0;           ///< of the host with a device
};
Counts counts();

/// A captured graph. A replay runs its work on the current stream, in any order that its
/// dependencies allow.
class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Captures the current stream and those that wait for its events.
  void capture_begin();
  void capture_end();
  void replay();
  /// Returns the number of mezzo's kernels in the graph.
  int64_t launches() const;

 private:
  struct Recording;
  friend struct Machine;
  std::shared_ptr<Recording> recording_;
};

/// Captures `work` on the current stream.
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
