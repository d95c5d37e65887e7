#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the sum of two gradients, sparse or dense, in the promoted dtype. Adds in place if
/// possible, since `gradient` may be a view of a bucket.
inline at::Tensor add_gradients(at::Tensor gradient, at::Tensor other) {
  const at::ScalarType dtype = c10::promoteTypes(gradient.scalar_type(), other.scalar_type());
  gradient = gradient.to(dtype);
  if (gradient.is_sparse() && !other.is_sparse()) return other.to(dtype).add(gradient);
  return gradient.add_(other);
}

/// Removes the gradients of parameters, so that the next backward pass starts without any, as
/// Apex's stashed gradients. `add_back` adds them to the new gradients, `drop` releases them, and
/// the destructor otherwise restores them exactly, for example if the pass throws. A duplicate
/// parameter is stashed once.
class GradientStash {
 public:
  explicit GradientStash(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters_) {  // may throw: before any change
      original_grads_.push_back(parameter.grad());
      stashed_grads_.push_back(clone_if_shared(parameter.grad()));
    }
    for (std::size_t i = 0; i < stashed_grads_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined()) original_grads_[i] = stashed_grads_[i] = at::Tensor();
      gradient = at::Tensor();
    }
  }
  ~GradientStash() {
    for (std::size_t i = stashed_grads_.size(); i-- > 0;) restore(i);
  }
  GradientStash(const GradientStash&) = delete;
  GradientStash& operator=(const GradientStash&) = delete;

  /// Returns the stashed gradients; undefined for parameters without one.
  const std::vector<at::Tensor>& gradients() const noexcept { return stashed_grads_; }

  /// Adds the stashed gradients to the current ones.
  /// \throws c10::Error if two gradients cannot be added; the destructor then restores
  void add_back() {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < stashed_grads_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!stashed_grads_[i].defined()) continue;
      if (gradient.defined()) {
        gradient = add_gradients(gradient, stashed_grads_[i]);
      } else {
        restore(i);
      }
    }
    drop();
  }

  /// Releases the stashed gradients, and keeps the current ones.
  void drop() noexcept {
    stashed_grads_.clear();
    original_grads_.clear();
  }

 private:
  /// Returns `gradient`, or a copy if its storage is shared: the next backward pass may overwrite
  /// the storage, which may be a bucket.
  static at::Tensor clone_if_shared(const at::Tensor& gradient) {
    const bool shares_memory = gradient.defined() && gradient.layout() == at::kStrided &&
                               gradient.has_storage() && gradient.storage().use_count() > 1;
    return shares_memory ? gradient.detach().clone() : gradient;
  }

  void restore(std::size_t i) noexcept {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    gradient = stashed_grads_[i];
    if (stashed_grads_[i].is_same(original_grads_[i])) return;
    try {
      const c10::NoGradGuard no_grad;
      original_grads_[i].copy_(stashed_grads_[i]);
      gradient = original_grads_[i];
    } catch (...) {  // the device has failed: keep the copy
    }
  }

  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> original_grads_;  // the tensors that were in `.grad`
  std::vector<at::Tensor> stashed_grads_;  // the same tensors, or copies if their storage is shared
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
