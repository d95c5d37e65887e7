#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the sum of two gradients, sparse or dense: in the memory of `gradient` where that can
/// hold it, since a gradient may be a view into a bucket. The dtype is the wider of the two.
inline at::Tensor add_gradients(at::Tensor gradient, at::Tensor more) {
  const at::ScalarType dtype = c10::promoteTypes(gradient.scalar_type(), more.scalar_type());
  gradient = gradient.to(dtype);
  if (gradient.is_sparse() && !more.is_sparse()) return more.to(dtype).add(gradient);
  return gradient.add_(more);
}

/// Takes the gradients of parameters away for a scope, so that a backward pass inside begins with
/// none. What was set aside is added back, dropped, or otherwise, as when the pass throws, put back
/// exactly as it was. A parameter that is given twice has nothing to set aside the second time.
class GradientStash {
 public:
  explicit GradientStash(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters_) {  // what may throw, before any is taken
      tensors_.push_back(parameter.grad());
      values_.push_back(clone_if_shared(parameter.grad()));
    }
    for (std::size_t i = 0; i < values_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined()) tensors_[i] = values_[i] = at::Tensor();
      gradient = at::Tensor();
    }
  }
  ~GradientStash() {
    for (std::size_t i = values_.size(); i-- > 0;) restore(i);
  }
  GradientStash(const GradientStash&) = delete;
  GradientStash& operator=(const GradientStash&) = delete;

  /// Returns the gradients that were set aside; undefined where there was none.
  const std::vector<at::Tensor>& gradients() const noexcept { return values_; }

  /// Adds what was set aside to the gradients that have come since.
  /// \throws c10::Error if a gradient has come that cannot be added; the destructor then puts back
  ///   what was there
  void add_back() {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!values_[i].defined()) continue;
      if (gradient.defined()) {
        gradient = add_gradients(gradient, values_[i]);
      } else {
        restore(i);
      }
    }
    drop();
  }

  /// Releases what was set aside: the gradients that have come since stay.
  void drop() noexcept {
    values_.clear();
    tensors_.clear();
  }

 private:
  /// Returns `gradient`, or a copy of it if other tensors share its memory: the next backward pass
  /// writes into the memory of a bucket.
  static at::Tensor clone_if_shared(const at::Tensor& gradient) {
    const bool shares_memory = gradient.defined() && gradient.layout() == at::kStrided &&
                               gradient.has_storage() && gradient.storage().use_count() > 1;
    return shares_memory ? gradient.detach().clone() : gradient;
  }

  void restore(std::size_t i) noexcept {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    gradient = values_[i];
    if (values_[i].is_same(tensors_[i])) return;
    try {
      const c10::NoGradGuard no_grad;
      tensors_[i].copy_(values_[i]);
      gradient = tensors_[i];
    } catch (...) {  // the device is lost: the copy of the values stays
    }
  }

  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> tensors_;  // the tensors that were set aside
  std::vector<at::Tensor> values_;   // the same tensors, or copies where their memory is shared
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
