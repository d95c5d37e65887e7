#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <mezzo/base/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor that a collective writes, and the contiguous memory that is written for it: its own or
/// a copy.
class WrittenTensor {
 public:
  enum class Contents : uint8_t { read, replaced };

  WrittenTensor(const at::Tensor& tensor, Contents contents, bool own_memory = true)
      : tensor_(tensor.detach()), original_(tensor) {
    if (tensor_.is_contiguous() && own_memory) {
      flat_ = tensor_.view({-1});
    } else if (contents == Contents::read) {
      flat_ = tensor_.clone(at::MemoryFormat::Contiguous).view({-1});
    } else {
      flat_ = at::empty({tensor_.numel()}, tensor_.options());
    }
  }

  const at::Tensor& flat() const { return flat_; }

  void finish() const {
    if (!flat_.is_alias_of(tensor_)) {
      tensor_.copy_(flat_.view(tensor_.sizes()));
    } else if (!original_.is_inference()) {
      original_.unsafeGetTensorImpl()->bump_version();  // nothing that autograd knows of wrote it
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor original_;
  at::Tensor flat_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
