/// \file
/// Detects whether a tensor has changed, without keeping it alive or reading its values.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/macros/Export.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the number of in-place modifications; 0 for an inference tensor, which has no version.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

/// Counts, in this process, the steps that wrote weights and left no version, as
/// torch::optim::SGD's do through `data()`: GradScaler notes those that it runs. The symbol is
/// exported, so that shared libraries agree on it.
C10_EXPORT inline std::atomic<uint64_t>& steps_without_version() {
  static constinit std::atomic<uint64_t> steps = 0;
  return steps;
}

/// Version and memory of a tensor at one moment. A write changes the version, set_data the memory.
/// Holds the storage weakly, since an allocator may reuse memory that set_data has freed for the
/// tensor's next storage.
struct WriteStamp {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  ///< none in a sparse tensor
  const void* data = nullptr;
  uint32_t version = 0;

  static WriteStamp of(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return {std::nullopt, nullptr, version_of(tensor)};
    return {tensor.storage().getWeakStorageImpl(), tensor.const_data_ptr(), version_of(tensor)};
  }

  bool has_memory_of(const at::Tensor& tensor) const {
    if (!tensor.has_storage() || !storage.has_value()) {
      return tensor.has_storage() == storage.has_value();
    }
    return tensor.const_data_ptr() == data &&
           tensor.storage().unsafeGetStorageImpl() == storage->_unsafe_get_target();
  }

  /// Whether the tensor has not been written since this stamp was made.
  bool is_current(const at::Tensor& tensor) const {
    return version_of(tensor) == version && has_memory_of(tensor);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
