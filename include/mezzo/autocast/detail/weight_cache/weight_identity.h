/// \file
/// Whether a tensor can be held at all, and whether it still is what it was when it was cast.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/intrusive_ptr.h>
#include <mezzo/autocast/detail/weight_cache/unseen_writes.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
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

  void expect_graph(const std::shared_ptr<torch::autograd::Node>& grad_accumulator) {
    grad_accumulator_ = grad_accumulator;
  }

  bool is_dead() const { return tensor_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  WriteStamp written_;
  at::ScalarType dtype_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
  std::weak_ptr<torch::autograd::Node> grad_accumulator_;
  GradientStamp gradient_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
