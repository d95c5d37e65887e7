#include "cuda_emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;  // committed when touched
constexpr std::size_t kStackStride =
    kStackBytes + 4096 + 320;  // otherwise all tops share a cache set
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxBlocks = 2147483647;

#if defined(__x86_64__)

// Saves callee-saved registers on one stack and restores them from the other. swapcontext also
// makes a system call for the signal mask, which takes a hundred times as long.
extern "C" void mezzo_switch_fiber(void** from, void* to);
asm(".text\n"
    ".type mezzo_switch_fiber,@function\n"
    "mezzo_switch_fiber:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size mezzo_switch_fiber,.-mezzo_switch_fiber\n");

struct Context {
  void* stack_pointer = nullptr;

  void prepare(char* stack, void (*entry)()) {
    auto* top = reinterpret_cast<uint64_t*>(stack + kStackBytes);
    *--top = 0;                                  // return address of entry; 16-byte alignment
    *--top = reinterpret_cast<uint64_t>(entry);  // return address of the switch
    for (int i = 0; i < 6; ++i) *--top = 0;
    stack_pointer = top;
  }
  static void change(Context& from, Context& to) {
    mezzo_switch_fiber(&from.stack_pointer, to.stack_pointer);
  }
};

#else

struct Context {
  ucontext_t context{};

  void prepare(char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif

/// Unwinds the stacks of threads of a failed block.
struct BlockAborted {};

std::string to_string(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

bool is_same_location(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

enum class State : uint8_t { ready, at_barrier, at_shuffle, ended };

struct Thread {
  Context context;
  State state = State::ready;
  std::source_location where;
  uint64_t word = 0;
  int lanes = 0;
};

/// Fiber stacks of a host thread, reused by its blocks.
class Stacks {
 public:
  Stacks()
      : memory_(static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("mmap of fiber stacks failed");
  }
  ~Stacks() { munmap(memory_, kBytes); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* of(int thread) { return memory_ + static_cast<std::size_t>(thread) * kStackStride; }

 private:
  static constexpr std::size_t kBytes = kStackStride * kMaxThreads;
  char* memory_;
};

class Block;
thread_local Block* current_block = nullptr;

class Block {
 public:
  Block(int64_t number, int threads, const std::function<void()>& work, uint64_t seed,
        Stacks& stacks)
      : number_(number), work_(work), random_(seed), stacks_(stacks), threads_(as_size(threads)) {
    ready_.resize(threads_.size());
    std::iota(ready_.begin(), ready_.end(), 0);
  }

  void run() {
    current_block = this;
    blockIdx.x = static_cast<unsigned>(number_);
    blockDim.x = static_cast<unsigned>(threads_.size());
    for (int i = 0; i < size(); ++i) thread(i).context.prepare(stacks_.of(i), &Block::enter);
    while (failure_ == nullptr && ended_ < size()) {
      if (ready_.empty()) release_block();
      if (failure_ == nullptr) resume(next());
    }
    abort();
    current_block = nullptr;
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

  int block_barrier(int flag, const std::source_location& where) {
    any_flag_ = any_flag_ || flag != 0;
    wait(State::at_barrier, where);
    return released_flag_ ? 1 : 0;
  }

  uint64_t warp_shuffle(unsigned mask, uint64_t word, int lanes,
                        const std::source_location& where) {
    if (mask != 0xFFFFFFFFU)
      throw CudaUsageError("a shuffle with another mask than all lanes: " + to_string(where));
    Thread& self = thread(running_);
    self.word = word;
    self.lanes = lanes;
    wait(State::at_shuffle, where);
    return self.word;
  }

 private:
  static std::size_t as_size(int number) { return static_cast<std::size_t>(number); }
  int size() const { return static_cast<int>(threads_.size()); }
  Thread& thread(int number) { return threads_[as_size(number)]; }

  int next() {
    const std::size_t index =
        std::uniform_int_distribution<std::size_t>(0, ready_.size() - 1)(random_);
    std::swap(ready_[index], ready_.back());
    const int number = ready_.back();
    ready_.pop_back();
    return number;
  }

  void resume(int number) {
    running_ = number;
    threadIdx.x = static_cast<unsigned>(number);
#if defined(__SANITIZE_ADDRESS__)
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, stacks_.of(number), kStackBytes);
    Context::change(scheduler_, thread(number).context);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#else
    Context::change(scheduler_, thread(number).context);
#endif
    if (thread(number).state == State::ended) ++ended_;
    if (thread(number).state == State::at_shuffle) release_warp(number / kWarp);
  }

  void leave(int number) {
    [[maybe_unused]] const bool is_last = thread(number).state == State::ended;
#if defined(__SANITIZE_ADDRESS__)
    void* own = nullptr;
    __sanitizer_start_switch_fiber(is_last ? nullptr : &own, scheduler_stack_, scheduler_bytes_);
    Context::change(thread(number).context, scheduler_);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#else
    Context::change(thread(number).context, scheduler_);
#endif
  }

  static void enter() { current_block->run_thread(); }

  void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_bytes_);
#endif
    const int number = running_;
    try {
      work_();
    } catch (const BlockAborted&) {
    } catch (...) {
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
    thread(number).state = State::ended;
    leave(number);
  }

  void wait(State state, const std::source_location& where) {
    const int number = running_;
    Thread& self = thread(number);
    self.state = state;
    self.where = where;
    leave(number);
    if (is_aborted_) throw BlockAborted();
  }

  /// Executes the shuffle if all lanes of the warp have reached it.
  void release_warp(int warp) {
    const int first = warp * kWarp;
    if (first + kWarp > size()) return;  // an incomplete warp
    const Thread& model = thread(first);
    for (int i = first; i < first + kWarp; ++i) {
      const Thread& other = thread(i);
      const bool has_arrived = other.state == State::at_shuffle && other.lanes == model.lanes &&
                               is_same_location(other.where, model.where);
      if (!has_arrived) return;
    }
    uint64_t words[kWarp];
    for (int i = 0; i < kWarp; ++i) words[i] = thread(first + i).word;
    for (int i = 0; i < kWarp; ++i) {
      Thread& lane = thread(first + i);
      const int from = lane.lanes < 0 ? i ^ -lane.lanes : i + lane.lanes;
      lane.word = words[from < kWarp ? from : i];
      make_ready(first + i);
    }
  }

  /// Called if no thread can run: all must wait at one barrier, otherwise the block is deadlocked.
  void release_block() {
    int waiting = 0;
    while (thread(waiting).state == State::ended) ++waiting;
    const Thread& model = thread(waiting);
    for (int i = 0; i < size(); ++i) {
      const Thread& other = thread(i);
      const bool has_arrived =
          other.state == model.state && is_same_location(other.where, model.where);
      if (!has_arrived) return fail(i, waiting);
    }
    if (model.state == State::at_shuffle) return fail(waiting, waiting);
    released_flag_ = std::exchange(any_flag_, false);
    for (int i = 0; i < size(); ++i) make_ready(i);
  }

  void make_ready(int number) {
    thread(number).state = State::ready;
    ready_.push_back(number);
  }

  void fail(int number, int other) {
    const auto describe = [&](int i) {
      const Thread& one = thread(i);
      const std::string name = "thread " + std::to_string(i);
      if (one.state == State::ended) return name + " has ended";
      return name + (one.state == State::at_barrier ? " waits at the barrier " : " shuffles at ") +
             to_string(one.where);
    };
    failure_ = std::make_exception_ptr(CudaUsageError("block " + std::to_string(number_) +
                                                      " is deadlocked: " + describe(number) + ", " +
                                                      describe(other)));
  }

  /// Unwinds the stacks of a failed block's threads that began.
  void abort() {
    is_aborted_ = true;
    for (int i = 0; i < size(); ++i) {
      if (thread(i).where.line() != 0 && thread(i).state != State::ended) resume(i);
    }
  }

  int64_t number_;
  const std::function<void()>& work_;
  std::mt19937_64 random_;
  Stacks& stacks_;
  std::vector<Thread> threads_;
  std::vector<int> ready_;
  Context scheduler_;
  int running_ = 0;
  int ended_ = 0;
  bool any_flag_ = false;
  bool released_flag_ = false;
  bool is_aborted_ = false;
  std::exception_ptr failure_;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_bytes_ = 0;
#endif
};

struct SharedMemory {
  void* memory;
  std::size_t bytes;
};

/// Shared memory of all kernels that ran on this host thread.
std::vector<SharedMemory>& shared_memories() {
  static thread_local std::vector<SharedMemory> memories;
  return memories;
}

uint64_t current_seed = 1;
bool cpu_is_device = false;

std::map<std::string, int64_t>& all_launches() {
  static std::map<std::string, int64_t> launches;
  return launches;
}

}  // namespace

void set_seed(uint64_t seed) { current_seed = seed; }
void set_cpu_is_device(bool on) { cpu_is_device = on; }
bool supports(c10::Device device) {
  static const char* const kernels = std::getenv("MEZZO_TEST_KERNELS");
  static const bool is_aten = kernels != nullptr && std::strcmp(kernels, "aten") == 0;
  return (device.is_privateuseone() && !is_aten) || (device.is_cpu() && cpu_is_device);
}
const std::map<std::string, int64_t>& launches() { return all_launches(); }

int64_t& register_kernel(const char* name) { return all_launches()[name]; }

void register_shared(void* memory, std::size_t bytes) {
  std::memset(memory, 0xFF, bytes);
  shared_memories().push_back({memory, bytes});
}

void unregister_shared(void* memory) {
  std::erase_if(shared_memories(),
                [memory](const SharedMemory& shared) { return shared.memory == memory; });
}

int block_barrier(int flag, const std::source_location& where) {
  return current_block->block_barrier(flag, where);
}

uint64_t warp_shuffle(unsigned mask, uint64_t word, int lanes, const std::source_location& where) {
  return current_block->warp_shuffle(mask, word, lanes, where);
}

void run_grid(int64_t blocks, int threads, const std::function<void()>& thread) {
  if (blocks < 1 || blocks > kMaxBlocks || threads < 1 || threads > kMaxThreads) {
    throw CudaUsageError("a launch of " + std::to_string(blocks) + " blocks of " +
                         std::to_string(threads) + " threads");
  }
  std::mt19937_64 random(current_seed);
  std::vector<int64_t> order(static_cast<std::size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const uint64_t seed = random();
  for (const int64_t number : order) {
    run_block(number, threads, thread, seed + static_cast<uint64_t>(number));
  }
}

void run_block(int64_t number, int threads, const std::function<void()>& thread, uint64_t seed) {
  static thread_local Stacks stacks;
  for (const SharedMemory& shared : shared_memories()) {
    std::memset(shared.memory, 0xFF, shared.bytes);
  }
  Block(number, threads, thread, seed, stacks).run();
}

}  // namespace cuda_emulation
