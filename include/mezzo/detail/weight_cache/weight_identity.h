/// \file
/// Whether a tensor can be held at all, and whether it still is what it was when it was cast.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>
#include <mezzo/version.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether the tensor has memory of its own kind, a version that tells of writes, and no graph or
/// tangent behind it that a copy would leave out.
inline bool can_be_held(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet kNotPlain(
      {c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (tensor.is_inference() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
      at::isTensorSubclassLike(tensor) || tensor.key_set().has_any(kNotPlain)) {
    return false;
  }
  const auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  return autograd == nullptr || (autograd->fw_grad_ == nullptr && tensor.is_leaf());
}

/// A weight at the moment when it was cast. Holds neither tensor nor memory alive, only their
/// addresses from being taken by others: equal addresses are the same object.
class WeightIdentity {
 public:
  explicit WeightIdentity(const at::Tensor& weight)
      : tensor_(weight.getIntrusivePtr()),
        storage_(weight.storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        version_(weight._version()),
        dtype_(weight.scalar_type()),
        sizes_(weight.sizes()),
        strides_(weight.strides()) {}

  /// Whether `weight`, the very tensor that this was made from, holds the same values in the same
  /// shape. Writes show in the version; set_data and resizing in memory and shape.
  bool is_current(const at::Tensor& weight) const {
    return weight._version() == version_ && weight.const_data_ptr() == data_ &&
           weight.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target() &&
           weight.scalar_type() == dtype_ && weight.sizes() == c10::IntArrayRef(sizes_) &&
           weight.strides() == c10::IntArrayRef(strides_);
  }

  bool is_dead() const { return tensor_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* data_;
  std::int64_t version_;
  at::ScalarType dtype_;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
