#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary_partial.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Which gradient a read was of, and in which state. Holds it weakly: its memory goes when the user
/// lets it go, and yet no other tensor can come to lie at the same address meanwhile.
class ReadMark {
 public:
  void set(const at::Tensor& gradient, const at::Tensor& flat) {
    if (gradient.is_inference()) return clear();  // whose changes nobody counts
    gradient_.emplace(gradient.getIntrusivePtr());
    data_ = gradient.const_data_ptr();
    version_ = gradient._version();
    flat_version_ = flat.defined() ? flat._version() : 0;
  }
  void clear() { gradient_.reset(); }

  bool holds_for(const at::Tensor& gradient, const at::Tensor& flat) const {
    return gradient_.has_value() && !gradient_->expired() &&
           gradient_->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
           data_ == gradient.const_data_ptr() && version_ == gradient._version() &&
           flat_version_ == (flat.defined() ? flat._version() : 0);
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::optional<WeakTensor> gradient_;
  const void* data_ = nullptr;
  int64_t version_ = 0;
  int64_t flat_version_ = 0;
};

/// A parameter and the place of its gradient.
struct GradientSlot {
  at::Tensor parameter;
  std::size_t bucket = 0;

  // Flat storage. The place has a version counter of its own: changing one gradient says nothing
  // of the others of its bucket.
  at::Tensor place;
  bool may_be_nonzero = false;

  bool is_hooked = false;
  bool has_arrived = false;  // in this backward pass
  bool is_pending = false;   // waits in the queue of those to be read

  ReadMark mark;               // of the read that the partial results come from
  GradientPartial partial;     // on the CPU
  at::Tensor device_partials;  // on CUDA, several as bytes

  const at::Tensor& gradient() const { return parameter.grad(); }
  bool has_dense_gradient() const {
    return gradient().defined() && gradient().layout() == at::kStrided;
  }
};

/// Whether the gradient's memory holds its elements in the order of the parameter's.
inline bool is_laid_out_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.is_non_overlapping_and_dense() && !gradient.is_neg() && !gradient.is_conj() &&
         !gradient._is_zerotensor() &&
         torch::autograd::utils::obeys_layout_contract(gradient, parameter);
}

inline bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

/// Whether a gradient of the parameter as it is now can lie in the place that was made for it.
inline bool fits_place(const GradientSlot& slot) {
  return slot.parameter.scalar_type() == slot.place.scalar_type() &&
         slot.parameter.device() == slot.place.device() &&
         slot.parameter.sizes() == slot.place.sizes();
}

/// Whether the slot's gradient is the memory that is meant for it, by whatever name.
inline bool is_in_place(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.gradient();
  return shares_storage(gradient, slot.place) &&
         gradient.storage_offset() == slot.place.storage_offset() &&
         is_laid_out_like(gradient, slot.parameter);
}

/// \throws c10::Error if the gradient, dense or sparse, cannot be its parameter's
inline void check_gradient(const GradientSlot& slot, std::size_t number) {
  const at::Tensor& gradient = slot.gradient();
  const at::Tensor& parameter = slot.parameter;
  TORCH_CHECK(gradient.layout() == at::kStrided || gradient.is_sparse(),
              "The gradient of parameter ", number, " has the layout ", gradient.layout(),
              "; GradBuckets takes dense (strided) and sparse (COO) gradients");
  TORCH_CHECK(gradient.scalar_type() == parameter.scalar_type() &&
                  gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              "The gradient of parameter ", number, " is of ", gradient.scalar_type(), ", ",
              gradient.sizes(), " on ", gradient.device(), " and the parameter of ",
              parameter.scalar_type(), ", ", parameter.sizes(), " on ", parameter.device(),
              "; set .grad to a tensor like the parameter, or to an undefined one");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
