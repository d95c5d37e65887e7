/// \file
/// Whether a tensor still is what it was, without keeping it alive or looking at its values.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How often the tensor was modified in place; 0 for one of inference mode, which does not count.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

/// Version and memory of a tensor at one moment. A write shows in the version, set_data in the
/// memory. Knows the storage itself, weakly: an allocator may give memory that set_data let go to
/// the tensor's next storage.
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

  /// Whether nobody wrote to the tensor that this was made of.
  bool is_current(const at::Tensor& tensor) const {
    return version_of(tensor) == version && has_memory_of(tensor);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
