/// \file
/// A GPU played by the host, for kernels written in the language of mezzo/kernels/cuda/device.h,
/// which includes this where MEZZO_CUDA_EMULATION names it.
///
/// A launch on the CPU runs at once, and one on a GPU of host_gpu.h's from its stream's queue.
/// Threads of a block are fibers: one runs until it waits or ends, and which
/// runs next is drawn from a seed; so is the order of blocks. Warps have no lockstep. Shared memory
/// begins as 0xFF bytes in each block (NaN as a number), so that what a thread reads too early
/// shows. What CUDA leaves undefined is a Fault: a barrier that not all threads of the block reach,
/// or not the same one, a shuffle that a lane of the warp misses, a launch without blocks.
#pragma once

#include <mezzo/base/version.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cuda_emulation {

/// What a kernel did that no GPU promises to survive.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Draws the order of blocks and threads from `seed` for launches from here on. It is 1 at first.
void set_seed(uint64_t seed);

/// Whether tensors of the CPU are the device's. False at first.
void set_is_on(bool is_on);

/// Whether mezzo's kernels run on `device` (mezzo/kernels/kernel_dispatch.h asks): the CPU where it
/// is the device, and the GPUs that host_gpu.h has unless MEZZO_TEST_KERNELS=aten in the
/// environment leaves those to ATen's kernels.
bool supports(c10::Device device);

class On {
 public:
  On() { set_is_on(true); }
  ~On() { set_is_on(false); }
  On(const On&) = delete;
  On& operator=(const On&) = delete;
};

/// How often each kernel was launched, by name and template arguments; those that this program can
/// launch and did not are there with 0.
const std::map<std::string, int64_t>& launches();

struct Index {
  unsigned x = 0;
};

// For what is below: the stream of a device that work goes to now, a launch on one of host_gpu.h's
// with the bytes of its arguments and the pointers among them, and the capture of the stream. The
// CPU has one stream.
c10::Stream current_stream(c10::Device device);
void put_launch(const c10::Stream& stream, std::size_t bytes, std::vector<const void*> pointers,
                std::function<void()> run);
uint64_t current_capture_id(c10::Device device);

/// How many things allow this thread what a capture forbids.
inline thread_local int allowances_in_captures = 0;
inline thread_local int capture_mode = 0;
/// How often the device's address of pinned memory was asked for.
inline std::atomic<int> address_lookups = 0;
/// As cudaThreadExchangeStreamCaptureMode: 2 is relaxed.
inline int exchange_capture_mode(int mode) {
  allowances_in_captures += (mode == 2) - (capture_mode == 2);
  return std::exchange(capture_mode, mode);
}
int64_t& register_kernel(const char* name);
void run_blocks(int64_t blocks, int threads, const std::function<void()>& thread);
void run_block(int64_t number, int threads, const std::function<void()>& thread, uint64_t seed = 1);
int wait_for_block(int flag, const std::source_location& where);
uint64_t wait_for_warp(unsigned mask, uint64_t word, int lanes, const std::source_location& where);
void add_shared(void* memory, std::size_t bytes);
void remove_shared(void* memory);

template <class Type>
struct Shared {
  Shared() { add_shared(bytes, sizeof(bytes)); }
  ~Shared() { remove_shared(bytes); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  static_assert(sizeof(Type) <= 49152, "a block has 48 KB");

  alignas(Type) unsigned char bytes[sizeof(Type)];
};

template <auto kKernel>
const char* name_of_kernel() {
  return __PRETTY_FUNCTION__;
}

/// Known before main, for each kernel that the program has a launch of.
template <auto kKernel>
struct Launches {
  static inline int64_t& count = register_kernel(name_of_kernel<kKernel>());
};

template <class... Parameters>
constexpr std::size_t bytes_of_parameters(void (*)(Parameters...)) {
  return (sizeof(Parameters) + ... + 0);
}

}  // namespace cuda_emulation

#define __device__
#define __global__
#define __launch_bounds__(...)

#define MEZZO_GRID_CONSTANT(Type) const Type&

#define MEZZO_UNROLL
#define MEZZO_NO_UNROLL

#define MEZZO_SHARED(Type, name)                                  \
  static thread_local cuda_emulation::Shared<Type> name##_shared; \
  Type& name = *reinterpret_cast<Type*>(name##_shared.bytes)

inline thread_local cuda_emulation::Index threadIdx;
inline thread_local cuda_emulation::Index blockIdx;
inline thread_local cuda_emulation::Index blockDim;

inline void __syncthreads(const std::source_location& where = std::source_location::current()) {
  cuda_emulation::wait_for_block(0, where);
}

inline int __syncthreads_or(int flag,
                            const std::source_location& where = std::source_location::current()) {
  return cuda_emulation::wait_for_block(flag, where);
}

template <class Word>
Word shuffle(unsigned mask, Word word, int lanes, const std::source_location& where) {
  static_assert(sizeof(Word) == 4 || sizeof(Word) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &word, sizeof(Word));
  bits = cuda_emulation::wait_for_warp(mask, bits, lanes, where);
  std::memcpy(&word, &bits, sizeof(Word));
  return word;
}

template <class Word>
Word __shfl_down_sync(unsigned mask, Word word, unsigned lanes,
                      const std::source_location& where = std::source_location::current()) {
  return shuffle(mask, word, static_cast<int>(lanes), where);
}

template <class Word>
Word __shfl_xor_sync(unsigned mask, Word word, int lanes,
                     const std::source_location& where = std::source_location::current()) {
  return shuffle(mask, word, -lanes, where);
}

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline bool supports(c10::Device device) { return cuda_emulation::supports(device); }
inline bool has_captures(c10::Device device) { return !device.is_cpu(); }

class DeviceGuard {
 public:
  explicit DeviceGuard(c10::Device device)
      : guard_(device), outer_(std::exchange(current(), device)) {}
  ~DeviceGuard() { current() = outer_; }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  static c10::Device& current() {
    static thread_local c10::Device device(c10::kCPU);
    return device;
  }

 private:
  c10::DeviceGuard guard_;
  c10::Device outer_;
};

inline c10::Device current_device() { return DeviceGuard::current(); }

/// What is launched on the CPU runs at once.
struct Stream {
  c10::Stream stream{c10::Stream::DEFAULT, c10::kCPU};
};

inline Stream current_stream() { return {cuda_emulation::current_stream(current_device())}; }
inline uint64_t capture_id() { return cuda_emulation::current_capture_id(current_device()); }

inline int exchange_thread_capture_mode(int mode) {
  return cuda_emulation::exchange_capture_mode(mode);
}

struct RelaxedCaptureModeGuard {
  RelaxedCaptureModeGuard() { ++cuda_emulation::allowances_in_captures; }
  ~RelaxedCaptureModeGuard() { --cuda_emulation::allowances_in_captures; }
  RelaxedCaptureModeGuard(const RelaxedCaptureModeGuard&) = delete;
  RelaxedCaptureModeGuard& operator=(const RelaxedCaptureModeGuard&) = delete;
};

inline void* device_address(void* pinned) {
  ++cuda_emulation::address_lookups;
  return pinned;
}

template <auto kKernel, class... Args>
void launch(int64_t blocks, int threads, Stream stream, const Args&... args) {
  constexpr std::size_t kBytes = cuda_emulation::bytes_of_parameters(kKernel);
  static_assert(kBytes <= 32764, "what a launch can carry");
  ++cuda_emulation::Launches<kKernel>::count;
  if (stream.stream.device_type() == c10::kCPU) {
    cuda_emulation::run_blocks(blocks, threads, [&] { kKernel(args...); });
    return;
  }
  std::vector<const void*> pointers;
  [[maybe_unused]] const auto add = [&]<class Arg>(const Arg& arg) {
    if constexpr (std::is_pointer_v<Arg>) pointers.push_back(arg);
  };
  (add(args), ...);
  cuda_emulation::put_launch(stream.stream, kBytes, pointers, [blocks, threads, args...] {
    cuda_emulation::run_blocks(blocks, threads, [&] { kKernel(args...); });
  });
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
