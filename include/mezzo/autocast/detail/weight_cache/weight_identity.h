/// \file
/// Whether a tensor can be held at all, whether somebody may write to it unseen, and whether it
/// still is what it was when it was cast.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether the tensor's values are those in its memory, and no tangent goes with them.
inline bool is_as_stored(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet kOtherValues(
      {c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (tensor.layout() != at::kStrided || !tensor.has_storage() ||
      at::isTensorSubclassLike(tensor) || tensor.key_set().has_any(kOtherValues)) {
    return false;
  }
  const auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  return autograd == nullptr || autograd->fw_grad_ == nullptr;
}

/// Whether a copy of the tensor stands for it: it has a version that tells of writes, and no graph
/// behind it.
inline bool can_be_held(const at::Tensor& tensor) {
  return !tensor.is_inference() && is_as_stored(tensor) && tensor.is_leaf();
}

/// The tensor whose memory `tensor` shows: itself, or, where it is a view of all of another one's
/// memory, as `weight.t()` is, that one. Modules of libtorch's C++ compute with such views, which
/// are new tensors each time. A parameter stands for itself also where its memory is another's; a
/// view that NoGradGuard saw made is a leaf that requires grad as well, but so does its base.
inline c10::MaybeOwned<at::Tensor> shown_by(const at::Tensor& tensor) {
  if (!tensor.is_view() || !is_as_stored(tensor)) {
    return c10::MaybeOwned<at::Tensor>::borrowed(tensor);
  }
  at::Tensor base(tensor._base());
  const bool is_parameter = tensor.is_leaf() && tensor.requires_grad() && !base.requires_grad();
  const bool all = !is_parameter && is_as_stored(base) && tensor.is_alias_of(base) &&
                   tensor.numel() == base.numel() &&
                   tensor.storage_offset() == base.storage_offset() &&
                   tensor.scalar_type() == base.scalar_type() &&
                   tensor.is_non_overlapping_and_dense() && base.is_non_overlapping_and_dense();
  return all ? c10::MaybeOwned<at::Tensor>::owned(std::move(base))
             : c10::MaybeOwned<at::Tensor>::borrowed(tensor);
}

/// Whether `copy` has its elements in the order that a cast of `weight` would give them.
inline bool is_laid_out_as(const at::Tensor& copy, const at::Tensor& weight) {
  return copy.sizes() == weight.sizes() &&
         (copy.strides() == weight.strides() || !weight.is_non_overlapping_and_dense());
}

// Signs that somebody may write to a weight without a new version of it. To look at the values
// instead would not pay: a fingerprint of a weight takes as long as its cast, and on CUDA a host
// sync as well.

/// The node that collects the gradients of a leaf, empty if there never was one. Every graph that
/// leads to the leaf keeps it alive, and the first graph after its end makes another one. So equal
/// owners, expired at the first look, say that no gradient came between two looks. Where a graph
/// keeps the node alive they do not: see GradientStamp.
inline WeakNodePtr<torch::autograd::Node> grad_accumulator_of(const at::Tensor& leaf) {
  const auto* autograd = torch::autograd::impl::get_autograd_meta(leaf);
  if (autograd == nullptr) {
    return WeakNodePtr<torch::autograd::Node>(NodePtr<torch::autograd::Node>());
  }
  const std::lock_guard lock(autograd->mutex_);
  return autograd->grad_accumulator_;
}

/// Reaches the protected mutex that the engine locks while it adds to the gradient of a leaf, as a
/// derived class may.
struct NodeMutex : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) { return node.*(&NodeMutex::mutex_); }
};

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
    const std::unique_lock unchanging(NodeMutex::of(*grad_accumulator), std::try_to_lock);
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

struct VersionCounterMember {
  friend constexpr auto private_member(VersionCounterMember);
};
template struct PrivateMember<VersionCounterMember, &c10::VariableVersion::version_counter_>;

/// How many tensors, and graphs that saved them, share the version. libtorch tells only whether it
/// is one.
inline std::size_t use_count_of(const c10::VariableVersion& version) {
  return (version.*private_member(VersionCounterMember())).use_count();
}

/// Whether the memory is also that of a tensor with another version, such as a flat buffer that
/// set_data gave to the weight, or what data() returns. Views and detach() share both. A graph that
/// saved the weight uses its version alone, and can so hide such a tensor.
inline bool shares_memory_unseen(const at::Tensor& weight) {
  const std::size_t users = weight.storage().use_count();
  return users > use_count_of(weight.unsafeGetTensorImpl()->version_counter());
}

/// A weight at the moment when it was cast. Holds neither tensor nor memory alive, only their
/// addresses from being taken by others: equal addresses are the same object.
class WeightIdentity {
 public:
  explicit WeightIdentity(const at::Tensor& weight)
      : tensor_(weight.getIntrusivePtr()),
        written_(WriteStamp::of(weight)),
        dtype_(weight.scalar_type()),
        sizes_(weight.sizes()),
        strides_(weight.strides()),
        grad_accumulator_(grad_accumulator_of(weight)),
        gradient_(GradientStamp::of(weight)) {}

  /// Whether `weight`, the very tensor that this was made from, holds the same values in the same
  /// shape. Writes show in the version; set_data and resizing in memory and shape.
  bool is_current(const at::Tensor& weight) const {
    return written_.is_current(weight) && weight.scalar_type() == dtype_ &&
           weight.sizes() == c10::IntArrayRef(sizes_) &&
           weight.strides() == c10::IntArrayRef(strides_);
  }

  /// Whether there is no sign of a gradient since, which somebody could have stepped: no graph but
  /// the expected ones has led to the weight, and its gradient is what it was.
  bool has_no_new_gradient(const at::Tensor& weight) const {
    return have_same_owner(grad_accumulator_, grad_accumulator_of(weight)) &&
           gradient_.is_current(weight);
  }

  void expect_graph(const NodePtr<torch::autograd::Node>& grad_accumulator) {
    grad_accumulator_ = WeakNodePtr<torch::autograd::Node>(grad_accumulator);
  }

  bool is_dead() const { return tensor_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  WriteStamp written_;
  at::ScalarType dtype_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
  WeakNodePtr<torch::autograd::Node> grad_accumulator_;
  GradientStamp gradient_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
