// Internals of emulated_gpu.cpp for its memory and ops.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace emulated_gpu {

/// poison: writes NaN to new or freed memory, which no GPU does.
enum class Kind { launch, op, copy_from_host, copy_to_host, poison };

/// Guards all state; work runs under it.
std::recursive_mutex& mutex();

c10::Stream current_stream(c10::Device device);

/// Enqueues `run` on the stream, or adds it to the graph that captures the stream. `pinned`: host
/// memory that a replay needs, and that a launch or a copy to the host writes. The host sees the
/// write only after an event or a sync behind it, as CUDA specifies.
void enqueue(const c10::Stream& stream, std::function<void()> run, Kind kind,
             std::vector<const void*> pinned = {});

/// The host's wait for a stream. \throws CudaUsageError during a capture
void wait_for(const c10::Stream& stream);

/// \throws CudaUsageError during a capture, unless this thread has a RelaxedCaptureModeGuard
void check_not_capturing(const char* what);

/// Returns the id of the stream's capture, or 0.
uint64_t capture_id_of(const c10::Stream& stream);

/// Makes future work of `later` wait for present work of `earlier`.
void add_dependency(const c10::Stream& earlier, const c10::Stream& later);

/// Returns a function that reports whether the stream's present work has completed; always false
/// for a captured stream.
std::function<bool()> make_query(const c10::Stream& stream);

// emulated_gpu_memory.cpp
c10::Allocator* device_memory();
at::HostAllocator* pinned_memory();
bool is_pinned(const void* memory);
/// Returns begin and size of the pinned allocation that contains `memory`, or null.
std::pair<char*, std::size_t> pinned_block(const void* memory);
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);
void check_guard_bytes();

}  // namespace emulated_gpu
