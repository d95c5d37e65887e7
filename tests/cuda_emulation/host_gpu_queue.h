// What host_gpu.cpp has for the memory and the ops of the devices that the host plays.
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

/// poison: the NaNs that memory holds when it is new or freed, which no GPU writes.
enum class Kind { launch, op, copy_from_host, copy_to_host, poison };

/// One lock for all; what runs, runs under it.
std::recursive_mutex& mutex();

c10::Stream current_stream(c10::Device device);

/// Puts `run` on the stream, or into the graph that it is captured into. `pinned`: host memory that
/// a replay needs, and that a launch or a copy to the host writes. The host sees such a write once
/// it knows by an event or a wait that the device is done with it, as CUDA promises no more.
void enqueue(const c10::Stream& stream, std::function<void()> run, Kind kind,
             std::vector<const void*> pinned = {});

/// The host's wait for a stream. \throws Fault during a capture
void wait_for(const c10::Stream& stream);

/// \throws Fault during a capture, unless this thread has an RelaxedCaptureModeGuard
void forbid_in_capture(const char* what);

/// Of the capture that the stream is part of; 0: of none.
uint64_t capture_of(const c10::Stream& stream);

/// Makes `later` wait for what `earlier` has now.
void order(const c10::Stream& earlier, const c10::Stream& later);

/// Whether all that the stream has now is done; false for one that is captured.
std::function<bool()> when_done(const c10::Stream& stream);

// host_gpu_memory.cpp
c10::Allocator* device_memory();
at::HostAllocator* pinned_memory();
bool is_pinned(const void* memory);
/// The allocation of pinned memory that `memory` lies in: begin and bytes; null if there is none.
std::pair<char*, std::size_t> pinned_block(const void* memory);
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);
void check_ends_of_memory();

}  // namespace emulated_gpu
