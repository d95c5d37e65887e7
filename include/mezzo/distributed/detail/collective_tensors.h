#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/work.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>

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

/// Makes the ranks' sum what `reduction` wants: divided where it is an average. Divided, and not
/// multiplied by 1 / ranks, so that it is rounded once.
inline void finish_sum(const at::Tensor& sum, Reduction reduction, int64_t ranks) {
  const c10::NoGradGuard no_grad;
  if (reduction == Reduction::average && ranks > 1) sum.div_(ranks);
}

/// Received from each rank, a row a rank: added up in float in the order of the ranks, the average
/// of that, or their maximum.
inline at::Tensor reduce_rows(const at::Tensor& rows, Reduction reduction) {
  at::Tensor reduced = rows[0].to(at::kFloat);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows[rank].to(at::kFloat);
    if (reduction == Reduction::max) {
      at::maximum_out(reduced, reduced, row);
    } else {
      reduced.add_(row);
    }
  }
  finish_sum(reduced, reduction, rows.size(0));
  return reduced;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
