#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sparse or dense, in place where that can be: a gradient may be a view into a bucket.
inline void add_gradient(const at::Tensor& holder, const at::Tensor& more) {
  const at::Tensor gradient = holder.grad();
  if (!gradient.defined()) {
    holder.mutable_grad() = more;
  } else if (gradient.is_sparse() && !more.is_sparse()) {
    holder.mutable_grad() = more.add(gradient);
  } else {
    gradient.add_(more);
  }
}

/// `gradient` for who keeps it while its holder gets another: memory that others hold too, as that
/// of a bucket, is the next backward pass's to write to.
inline at::Tensor kept_gradient(const at::Tensor& gradient) {
  const bool owns_memory = gradient.layout() != at::kStrided || gradient.storage().use_count() == 1;
  return owns_memory ? gradient : gradient.clone();
}

/// The unscaled gradients of an optimizer, which are kept aside while a backward pass brings
/// gradients that carry a scale.
class GradientsAside {
 public:
  explicit GradientsAside(AnyOptimizer optimizer) : optimizer_(optimizer) {}

  /// Where a parameter's own gradient has been cleared since it was unscaled onto a master, the
  /// master's is cleared too as far as who did it is concerned; and where it has gone, those of
  /// parameters that had none.
  void set_aside() {
    const std::vector<Held> all = everything_held();
    own_gradients_.resize(all.size());
    bool is_one_gone = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
      is_one_gone = is_one_gone || own_gradients_[i].is_gone_from(all[i].parameter);
    }
    aside_.assign(all.size(), at::Tensor());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [parameter, holder] = all[i];
      const OwnGradient& own = own_gradients_[i];
      const bool is_there = own.version && parameter.grad().defined();
      const bool is_given_up =
          !all[i].gradient_is_own() && (is_there ? own.is_zeroed_at(parameter) : is_one_gone);
      if (holder.grad().defined() && !is_given_up) aside_[i] = kept_gradient(holder.grad());
      holder.mutable_grad() = at::Tensor();
      parameter.mutable_grad() = at::Tensor();
    }
  }

  /// What was set aside joins the gradients that have been unscaled since.
  void add_back() {
    const c10::NoGradGuard no_grad;
    const std::vector<Held> all = everything_held();
    own_gradients_.clear();
    for (std::size_t i = 0; i < all.size(); ++i) {
      own_gradients_.emplace_back(all[i].parameter);
      if (i < aside_.size() && aside_[i].defined()) add_gradient(all[i].holder, aside_[i]);
    }
    aside_.clear();
  }

  /// What was set aside replaces what a pass that threw has left.
  void put_back() {
    const std::vector<Held> all = everything_held();
    for (const Held& held : all) held.parameter.mutable_grad() = at::Tensor();
    const std::vector<OwnGradient> were = own_gradients_;
    add_back();
    for (std::size_t i = 0; i < std::min(all.size(), were.size()); ++i) {
      const at::Tensor& parameter = all[i].parameter;
      if (!were[i].version || parameter.grad().defined()) continue;
      parameter.mutable_grad() = at::zeros_like(parameter);  // see set_aside for who looks at it
      own_gradients_[i] = OwnGradient(parameter);
    }
  }

  /// Clears the gradients where they stand, and the parameters' beside them.
  void zero_grad(bool set_to_none) {
    for (const Held& held : everything_held()) {
      if (!held.gradient_is_own()) held.holder.mutable_grad() = at::Tensor();
    }
    optimizer_.optimizer().zero_grad(set_to_none);
  }

 private:
  /// A parameter, and where its unscaled gradient stands: at its master, or at itself.
  struct Held {
    at::Tensor parameter;
    at::Tensor holder;
    bool gradient_is_own() const { return holder.is_same(parameter); }
  };

  std::vector<Held> everything_held() const {
    const StepTaker taker(optimizer_);
    std::vector<Held> all;
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      const bool has_master = taker.keeps_master(group, parameter);
      all.push_back({parameter, has_master ? taker.master_param(group, parameter) : parameter});
    });
    return all;
  }

  /// A parameter's gradient when it was unscaled onto a master, or where it stands.
  struct OwnGradient {
    std::optional<uint32_t> version;  // none: there was no gradient
    OwnGradient() = default;
    explicit OwnGradient(const at::Tensor& parameter) {
      if (parameter.grad().defined()) version = parameter.grad()._version();
    }
    bool is_gone_from(const at::Tensor& parameter) const {
      return version && !parameter.grad().defined();
    }
    /// By `zero_grad(false)`. Waits for the device, where it has been written at all.
    bool is_zeroed_at(const at::Tensor& parameter) const {
      const at::Tensor& gradient = parameter.grad();
      if (!version || !gradient.defined() || gradient._version() == *version) return false;
      return gradient.is_sparse() ? gradient._nnz() == 0 : !gradient.any().item<bool>();
    }
  };

  AnyOptimizer optimizer_;
  std::vector<at::Tensor> aside_;           // by parameter; empty for none
  std::vector<OwnGradient> own_gradients_;  // by parameter, when unscaled last
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
