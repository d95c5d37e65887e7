/// \file
/// Signs that somebody may write to a weight without a new version of it. To look at the values
/// instead would not pay: a fingerprint of a weight takes as long as its cast, and on CUDA a host
/// sync as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The node that collects the gradients of a leaf, empty if there never was one. Every graph that
/// leads to the leaf keeps it alive, and the first graph after its end makes another one. So equal
/// owners, expired at the first look, say that no gradient came between two looks. Where a graph
/// keeps the node alive they do not: see GradientStamp.
inline std::weak_ptr<torch::autograd::Node> grad_accumulator_of(const at::Tensor& leaf) {
  const auto* autograd = torch::autograd::impl::get_autograd_meta(leaf);
  if (autograd == nullptr) {
    return {};
  }
  const std::lock_guard lock(autograd->mutex_);
  return autograd->grad_accumulator_;
}

inline bool have_same_owner(const std::weak_ptr<torch::autograd::Node>& a,
                            const std::weak_ptr<torch::autograd::Node>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

std::mutex& mutex_of(torch::autograd::Node& node);

// An explicit instantiation may name the protected member that the engine locks while it adds to
// the gradient of a leaf.
template <auto mutex>
struct ReadNodeMutex {
  friend std::mutex& mutex_of(torch::autograd::Node& node) { return node.*mutex; }
};
template struct ReadNodeMutex<&torch::autograd::Node::mutex_>;

/// The gradient of a leaf at one moment. Each one that arrives is a new tensor or a new version.
class GradientStamp {
 public:
  static GradientStamp of(const at::Tensor& leaf) {
    const auto* autograd = torch::autograd::impl::get_autograd_meta(leaf);
    if (autograd == nullptr) {
      return GradientStamp(at::Tensor());
    }
    std::unique_lock no_new_graph(autograd->mutex_);
    const auto grad_accumulator = autograd->grad_accumulator_.lock();
    if (grad_accumulator == nullptr) {
      return GradientStamp(leaf.grad());
    }
    no_new_graph.unlock();
    // Without waiting: while another thread adds to the gradient, it is changing.
    const std::unique_lock unchanging(mutex_of(*grad_accumulator), std::try_to_lock);
    return unchanging.owns_lock() ? GradientStamp(leaf.grad()) : GradientStamp();
  }

  /// Whether the gradient of `leaf` is still the same, and not just changing.
  bool is_current(const at::Tensor& leaf) const {
    const GradientStamp now = of(leaf);
    return is_known_ && now.is_known_ && gradient_ == now.gradient_ && version_ == now.version_;
  }

 private:
  GradientStamp() = default;
  explicit GradientStamp(const at::Tensor& gradient)
      : is_known_(true),
        gradient_(gradient.getIntrusivePtr()),
        version_(gradient.defined() ? version_of(gradient) : 0) {}

  bool is_known_ = false;
  // Weak: the address of a gradient that is gone is not given to another.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  std::uint32_t version_ = 0;
};

/// Whether a step of torch::optim::SGD, which writes through data(), would change the weight, now
/// or after the backward pass of a graph that exists. It steps whatever has a gradient, be it
/// frozen.
inline bool may_be_stepped(const at::Tensor& weight) {
  return weight.requires_grad() || weight.grad().defined() ||
         !grad_accumulator_of(weight).expired();
}

std::size_t use_count_of(const c10::VariableVersion& version);

// libtorch tells only whether a version has one user. An explicit instantiation may name the
// private member that counts them.
template <auto counter>
struct ReadVersionCounter {
  friend std::size_t use_count_of(const c10::VariableVersion& version) {
    return (version.*counter).use_count();
  }
};
template struct ReadVersionCounter<&c10::VariableVersion::version_counter_>;

/// Whether the memory is also that of a tensor with another version, such as a flat buffer that
/// set_data gave to the weight, or what data() returns. Views and detach() share both. A graph that
/// saved the weight uses its version alone, and can so hide such a tensor.
inline bool shares_memory_unseen(const at::Tensor& weight) {
  const std::size_t users = weight.storage().use_count();
  return users > use_count_of(weight.unsafeGetTensorImpl()->version_counter());
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
