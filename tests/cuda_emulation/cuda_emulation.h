/// \file
/// Emulates the CUDA subset of mezzo/kernels/cuda/device.h on the host. device.h includes this
/// header if MEZZO_CUDA_EMULATION names it.
///
/// A launch on the CPU runs at once, and one on an emulated GPU (emulated_gpu.h) from its stream's
/// queue. Threads of a block are fibers: one runs until it waits or ends. The order of threads and
/// blocks is drawn from a seed, and warps have no lockstep. Shared memory is 0xFF bytes (NaN) at
/// the start of each block, so that premature reads show. Undefined behavior throws a
/// CudaUsageError: a barrier that not all threads of the block reach, a shuffle that a lane of the
/// warp misses, a launch without blocks.
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

/// Undefined behavior of a kernel or of a call.
struct CudaUsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Seeds the order of blocks and threads of later launches; initially 1.
void set_seed(uint64_t seed);

/// Sets whether CPU tensors are the device's; initially false.
void set_cpu_is_device(bool is_on);

/// Returns whether mezzo's kernels support `device`: the CPU while it is the device, and emulated
/// GPUs, unless the environment variable MEZZO_TEST_KERNELS is aten.
bool supports(c10::Device device);

/// Makes CPU tensors the device's.
class CpuDeviceGuard {
 public:
  CpuDeviceGuard() { set_cpu_is_device(true); }
  ~CpuDeviceGuard() { set_cpu_is_device(false); }
  CpuDeviceGuard(const CpuDeviceGuard&) = delete;
  CpuDeviceGuard& operator=(const CpuDeviceGuard&) = delete;
};

/// Returns the launch count of each kernel instantiation that this program can launch.
const std::map<std::string, int64_t>& launches();

struct Index {
  unsigned x = 0;
};

// Used below. A launch carries the bytes of its arguments and the pointers among them. The CPU has
// one stream.
c10::Stream current_stream(c10::Device device);
void enqueue_launch(const c10::Stream& stream, std::size_t bytes, std::vector<const void*> pointers,
                    std::function<void()> run);
uint64_t current_capture_id(c10::Device device);

/// Number of guards that permit this thread calls that a capture forbids.
inline thread_local int relaxed_guards = 0;
inline thread_local int capture_mode = 0;
/// Number of calls of device_address.
inline std::atomic<int> address_lookups = 0;
/// cudaThreadExchangeStreamCaptureMode; 2 is relaxed.
inline int exchange_capture_mode(int mode) {
  relaxed_guards += (mode == 2) - (capture_mode == 2);
  return std::exchange(capture_mode, mode);
}
int64_t& register_kernel(const char* name);
void run_grid(int64_t blocks, int threads, const std::function<void()>& thread);
void run_block(int64_t number, int threads, const std::function<void()>& thread, uint64_t seed = 1);
int block_barrier(int flag, const std::source_location& where);
uint64_t warp_shuffle(unsigned mask, uint64_t word, int lanes, const std::source_location& where);
void register_shared(void* memory, std::size_t bytes);
void unregister_shared(void* memory);

template <class Type>
struct Shared {
  Shared() { register_shared(bytes, sizeof(bytes)); }
  ~Shared() { unregister_shared(bytes); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  static_assert(sizeof(Type) <= 49152, "shared memory of a block");

  alignas(Type) unsigned char bytes[sizeof(Type)];
};

template <auto kKernel>
const char* kernel_name() {
  return __PRETTY_FUNCTION__;
}

/// Registers each kernel that the program can launch, before main.
template <auto kKernel>
struct Launches {
  static inline int64_t& count = register_kernel(kernel_name<kKernel>());
};

template <class... Parameters>
constexpr std::size_t parameter_bytes(void (*)(Parameters...)) {
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
  cuda_emulation::block_barrier(0, where);
}

inline int __syncthreads_or(int flag,
                            const std::source_location& where = std::source_location::current()) {
  return cuda_emulation::block_barrier(flag, where);
}

template <class Word>
Word shuffle(unsigned mask, Word word, int lanes, const std::source_location& where) {
  static_assert(sizeof(Word) == 4 || sizeof(Word) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &word, sizeof(Word));
  bits = cuda_emulation::warp_shuffle(mask, bits, lanes, where);
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

struct Stream {
  c10::Stream stream{c10::Stream::DEFAULT, c10::kCPU};
};

inline Stream current_stream() { return {cuda_emulation::current_stream(current_device())}; }
inline uint64_t capture_id() { return cuda_emulation::current_capture_id(current_device()); }

inline int exchange_thread_capture_mode(int mode) {
  return cuda_emulation::exchange_capture_mode(mode);
}

struct RelaxedCaptureModeGuard {
  RelaxedCaptureModeGuard() { ++cuda_emulation::relaxed_guards; }
  ~RelaxedCaptureModeGuard() { --cuda_emulation::relaxed_guards; }
  RelaxedCaptureModeGuard(const RelaxedCaptureModeGuard&) = delete;
  RelaxedCaptureModeGuard& operator=(const RelaxedCaptureModeGuard&) = delete;
};

inline void* device_address(void* pinned) {
  ++cuda_emulation::address_lookups;
  return pinned;
}

template <auto kKernel, class... Args>
void launch(int64_t blocks, int threads, Stream stream, const Args&... args) {
  constexpr std::size_t kBytes = cuda_emulation::parameter_bytes(kKernel);
  static_assert(kBytes <= 32764, "limit of kernel arguments");
  ++cuda_emulation::Launches<kKernel>::count;
  if (stream.stream.device_type() == c10::kCPU) {
    cuda_emulation::run_grid(blocks, threads, [&] { kKernel(args...); });
    return;
  }
  std::vector<const void*> pointers;
  [[maybe_unused]] const auto add = [&]<class Arg>(const Arg& arg) {
    if constexpr (std::is_pointer_v<Arg>) pointers.push_back(arg);
  };
  (add(args), ...);
  cuda_emulation::enqueue_launch(stream.stream, kBytes, pointers, [blocks, threads, args...] {
    cuda_emulation::run_grid(blocks, threads, [&] { kKernel(args...); });
  });
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
