#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `gradient` for a caller that keeps it while its parameter gets another: memory that
/// others hold too, as that of a bucket, is the next backward pass's to write to.
inline at::Tensor kept_gradient(const at::Tensor& gradient) {
  const bool owns_memory = gradient.layout() != at::kStrided || gradient.storage().use_count() == 1;
  return owns_memory ? gradient : gradient.clone();
}

/// Adds `more` to the parameter's gradient: sparse or dense, in float where one of the two is, and
/// in place where that can be, for a gradient may be a view into a bucket.
inline void add_gradient(const at::Tensor& parameter, const at::Tensor& more) {
  const at::Tensor gradient = parameter.grad();
  if (!gradient.defined()) {
    parameter.mutable_grad() = more;
  } else if (gradient.is_sparse() && !more.is_sparse()) {
    parameter.mutable_grad() = more.add(gradient);
  } else if (c10::promoteTypes(gradient.scalar_type(), more.scalar_type()) !=
             gradient.scalar_type()) {
    parameter.mutable_grad() = gradient.to(more.scalar_type()).add_(more);
  } else {
    gradient.add_(more);
  }
}

/// Parameters without gradients for the time of a scope: a backward pass that must not add to what
/// there is. At the end of the scope each parameter has exactly the gradient that it had, or none,
/// unless `add_back` was called.
class GradientsAside {
 public:
  explicit GradientsAside(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    aside_.reserve(parameters_.size());
    for (const at::Tensor& parameter : parameters_) {
      const at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
      aside_.push_back(gradient.defined() ? kept_gradient(gradient) : gradient);
    }
  }
  GradientsAside(GradientsAside&& other) noexcept
      : parameters_(std::exchange(other.parameters_, {})),
        aside_(std::exchange(other.aside_, {})) {}
  GradientsAside& operator=(GradientsAside&&) = delete;
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;
  ~GradientsAside() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = aside_[i];
  }

  /// Adds the gradients that were set aside to those that have come since.
  void add_back() {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (aside_[i].defined()) add_gradient(parameters_[i], aside_[i]);
    }
    parameters_.clear();
    aside_.clear();
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> aside_;  // undefined where there was no gradient
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
