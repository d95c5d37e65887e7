#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace bench {

class CountingAllocator;

/// Replaces libtorch's CPU allocator at the first call, which must precede all tensors. Never
/// destroyed.
CountingAllocator& counting_allocator();

/// Wraps libtorch's CPU allocator, and counts the allocated bytes.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    void* const data = inner_->raw_allocate(size);
    const std::lock_guard lock(mutex_);
    if (data != nullptr) sizes_[data] = static_cast<int64_t>(size);
    in_use_ += static_cast<int64_t>(size);
    peak_ = std::max(peak_, in_use_);
    return {data, data, &deallocate, at::kCPU};
  }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  int64_t in_use() const { return in_use_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = in_use_; }

 private:
  static void deallocate(void* data) {
    if (data == nullptr) return;
    CountingAllocator& self = counting_allocator();
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.sizes_.find(data);
      self.in_use_ -= found->second;
      self.sizes_.erase(found);
    }
    self.inner_->raw_deallocate(data);
  }

  c10::Allocator* inner_ = c10::GetCPUAllocator();
  std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
  int64_t in_use_ = 0;
  int64_t peak_ = 0;
};

inline CountingAllocator& counting_allocator() {
  static auto* const allocator = [] {
    auto* const counting = new CountingAllocator;
    c10::SetCPUAllocator(counting, /*priority=*/1);
    return counting;
  }();
  return *allocator;
}

}  // namespace bench
