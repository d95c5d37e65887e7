/// \file
/// Thread-local state that outlives the thread's other thread_locals.
#pragma once

#include <mezzo/base/version.h>

#include <cstddef>
#include <new>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A T that is made at first use and never destroyed. The main thread destroys its thread_locals
/// before static objects: a guard with static lifetime reads and writes this one afterwards. What
/// guards put in they take out, so nothing is left in it when a thread ends.
template <class T>
class NeverDestroyed {
 public:
  T& get() {
    if (value_ == nullptr) value_ = ::new (static_cast<void*>(memory_)) T();
    return *value_;
  }

 private:
  T* value_ = nullptr;
  alignas(T) std::byte memory_[sizeof(T)] = {};
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
