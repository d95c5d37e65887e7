// Device memory and pinned memory. Nothing is returned to the system, so that a use after free is
// detected and harmless.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "emulated_gpu_queue.h"

namespace emulated_gpu {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kNumGuardBytes = 64;  // guard bytes after each block
constexpr int kGuardByte = 0xAB;
constexpr int kNan = 0xFF;

using Pool = std::tuple<c10::DeviceIndex, c10::StreamId, uint64_t>;  // device, stream, capture

struct Block {
  char* memory;
  std::size_t bytes;
  c10::Stream stream;
  uint64_t capture;
  std::set<c10::StreamId> users;                // besides its own stream
  std::vector<std::function<bool()>> are_done;  // queries of its streams, after it was freed

  Pool pool() const { return {stream.device_index(), stream.id(), capture}; }
};

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device on = current_device();
    if (bytes == 0) return {nullptr, on};
    const std::lock_guard lock(mutex());
    const c10::Stream stream = emulated_gpu::current_stream(on);
    process_events();
    Block* const block = get_block(stream, bytes);
    enqueue(
        stream, [block] { std::memset(block->memory, kNan, block->bytes); }, Kind::poison);
    return {block->memory, block, &DeviceMemory::free, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  static DeviceMemory& instance() {
    static auto* const memory = new DeviceMemory;
    return *memory;
  }
  static constexpr auto kDeleter() { return &DeviceMemory::free; }

  void check_guard_bytes() const {
    for (const Block* block : blocks_) {
      for (std::size_t i = 0; i < kNumGuardBytes; ++i) {
        if (static_cast<unsigned char>(block->memory[block->bytes + i]) != kGuardByte) {
          throw CudaUsageError("out-of-bounds write after an allocation of " +
                               std::to_string(block->bytes) + " bytes");
        }
      }
    }
  }

 private:
  static c10::Device current_device() {
    return c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->getDevice();
  }

  Block* get_block(const c10::Stream& stream, std::size_t bytes) {
    const uint64_t capture = capture_id_of(stream);
    std::vector<Block*>& free = free_[{stream.device_index(), stream.id(), capture}];
    for (auto at = free.rbegin(); at != free.rend(); ++at) {
      if ((*at)->bytes != bytes) continue;
      Block* const block = *at;
      free.erase(std::next(at).base());
      return block;
    }
    const std::size_t whole = (bytes + kNumGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* const memory = static_cast<char*>(std::aligned_alloc(kAlignment, whole));
    std::memset(memory + bytes, kGuardByte, whole - bytes);
    return blocks_.emplace_back(new Block{memory, bytes, stream, capture, {}, {}});
  }

  static void free(void* context) {
    auto* const block = static_cast<Block*>(context);
    const std::lock_guard lock(mutex());
    for (const c10::StreamId user : block->users) {
      block->are_done.push_back(
          make_query(c10::Stream(c10::Stream::UNSAFE, block->stream.device(), user)));
    }
    block->users.clear();
    if (!block->are_done.empty()) {
      instance().pending_.push_back(block);
    } else {
      instance().free_block(block);
    }
  }

  void free_block(Block* block) {
    const bool is_replayed = block->capture != 0 || capture_id_of(block->stream) != 0;
    if (!is_replayed) {
      enqueue(
          block->stream, [block] { std::memset(block->memory, kNan, block->bytes); }, Kind::poison);
    }
    free_[block->pool()].push_back(block);
  }

  void process_events() {
    std::vector<Block*> later;
    for (Block* const block : std::exchange(pending_, {})) {
      bool is_done = true;
      for (const auto& done : block->are_done) is_done = is_done && done();
      if (is_done) block->are_done.clear();
      is_done ? free_block(block) : later.push_back(block);
    }
    pending_.insert(pending_.end(), later.begin(), later.end());
  }

  std::vector<Block*> blocks_;
  std::map<Pool, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::lock_guard lock(mutex());
    check_not_capturing("allocation of pinned memory");
    auto* const memory = static_cast<char*>(std::malloc(bytes + 1));
    all_[memory] = {bytes + 1, false, {}, {}};
    return {memory, memory, &PinnedMemory::free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void* memory, void* /*context*/, c10::Stream stream) override {
    const std::lock_guard lock(mutex());
    const auto found = all_.find(static_cast<char*>(memory));
    if (found == all_.end()) return false;
    found->second.users.insert({stream.device_index(), stream.id()});
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  static PinnedMemory& instance() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }
  /// Returns begin and size of the allocation that contains `memory`, if it was not freed, or freed
  /// while a recorded stream used it.
  std::pair<char*, std::size_t> block_of(const void* memory) const {
    auto at = all_.upper_bound(const_cast<char*>(static_cast<const char*>(memory)));
    if (at == all_.begin()) return {nullptr, 0};
    --at;
    const Allocation& allocation = at->second;
    const bool is_around = static_cast<const char*>(memory) < at->first + allocation.bytes;
    const bool is_used = std::any_of(allocation.are_done.begin(), allocation.are_done.end(),
                                     [](const auto& is_done) { return !is_done(); });
    const bool is_there = is_around && (!allocation.is_freed || is_used);
    return is_there ? std::pair(at->first, allocation.bytes) : std::pair<char*, std::size_t>();
  }

 private:
  struct Allocation {
    std::size_t bytes;
    bool is_freed;
    std::set<std::pair<c10::DeviceIndex, c10::StreamId>> users;
    std::vector<std::function<bool()>> are_done;  // queries of its streams, after it was freed
  };

  static void free(void* memory) {
    const std::lock_guard lock(mutex());
    Allocation& allocation = instance().all_.at(static_cast<char*>(memory));
    allocation.is_freed = true;
    for (const auto& [index, id] : allocation.users) {
      allocation.are_done.push_back(
          make_query(c10::Stream(c10::Stream::UNSAFE, device(index), id)));
    }
  }

  std::map<char*, Allocation> all_;
};

}  // namespace

c10::Allocator* device_memory() { return &DeviceMemory::instance(); }
at::HostAllocator* pinned_memory() { return &PinnedMemory::instance(); }

std::pair<char*, std::size_t> pinned_block(const void* memory) {
  const std::lock_guard lock(mutex());
  return PinnedMemory::instance().block_of(memory);
}
bool is_pinned(const void* memory) { return pinned_block(memory).first != nullptr; }

void record_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  const std::lock_guard lock(mutex());
  if (memory.get() == nullptr || memory.get_deleter() != DeviceMemory::kDeleter()) return;
  auto* const block = static_cast<Block*>(memory.get_context());
  if (block->stream != stream) block->users.insert(stream.id());
}

void check_guard_bytes() { DeviceMemory::instance().check_guard_bytes(); }

}  // namespace emulated_gpu
