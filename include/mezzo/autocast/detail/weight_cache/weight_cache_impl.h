/// \file
/// The ops that ask a WeightCache, and the cache's members.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/op_overrides.h>
#include <mezzo/autocast/detail/weight_cache/weight_store.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/base/detail/tensor_words.h>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The ops that ask caches, by their full names. A device that does not lower one of them, as the
/// CPU does not lower the cells, leaves it alone: the ops that it is made of meet the cache.
inline constexpr std::array<const char*, 24> kCachedOps = {
    "aten::linear",
    "aten::mm",
    "aten::matmul",
    "aten::bmm",
    "aten::addmm",
    "aten::addbmm",
    "aten::baddbmm",
    "aten::conv1d",
    "aten::conv1d.padding",
    "aten::conv2d",
    "aten::conv2d.padding",
    "aten::conv3d",
    "aten::conv3d.padding",
    "aten::conv_tbc",
    "aten::conv_transpose1d",
    "aten::conv_transpose2d.input",
    "aten::conv_transpose3d.input",
    "aten::_convolution",
    "aten::prelu",
    "aten::lstm_cell",
    "aten::gru_cell",
    "aten::rnn_tanh_cell",
    "aten::rnn_relu_cell",
    "aten::mkldnn_rnn_layer",
};

inline void install_cache_kernels() {
  if (cache_ops_are_installed()) return;
  for (const char* name : kCachedOps) {
    const auto op = find_op(name);
    TORCH_CHECK(op.has_value(), "install_op_overrides: this libtorch (", TORCH_VERSION,
                ") has no operator ", name, "; use libtorch 2.11, or leave the WeightCache out");
    check_no_other_mezzo_overrides(*op);
  }
  for (const char* name : kCachedOps) override_registry().install_for_caches(*find_op(name));
  cache_ops_are_installed() = true;
}

inline void check_can_be_held(const at::Tensor& weight) {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; construct the module before its parameters are passed");
  TORCH_CHECK(weight.is_floating_point(), "weight: ", tensor_words(weight),
              " is never cast by autocast; pass a parameter of a floating dtype");
  TORCH_CHECK(!weight.is_inference(), "weight: ", tensor_words(weight),
              " was made in inference mode, and has no version that tells "
              "when it changes; make or load the model outside of c10::InferenceMode");
  TORCH_CHECK(can_be_held(weight), "weight: ", tensor_words(weight),
              " is no dense leaf without forward gradient; pass the "
              "parameter itself, not what is computed from it");
  TORCH_CHECK(shown_by(weight)->is_same(weight), "weight: ", tensor_words(weight),
              " is a view of the whole of another tensor; pass that "
              "tensor, under which regions look the copy up");
}

inline void check_low_precision(const at::Tensor& weight, at::ScalarType dtype, const char* what) {
  TORCH_CHECK(c10::isFloatingType(dtype) && dtype != weight.scalar_type(), what, " is ",
              dtype_name(dtype), ", which is no low precision of the weight (",
              tensor_words(weight), "); use torch::kHalf or torch::kBFloat16");
}

inline void check_copy(const at::Tensor& weight, const at::Tensor& copy) {
  TORCH_CHECK(copy.defined(), "copy is undefined; pass what buffer_for(weight, dtype) returned");
  check_low_precision(weight, copy.scalar_type(), "copy");
  TORCH_CHECK(copy.sizes() == weight.sizes(), "copy is ", tensor_words(copy), ", and the weight ",
              tensor_words(weight), "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(is_laid_out_as(copy, weight), "copy has the strides ", copy.strides(),
              ", and the weight ", weight.strides(),
              "; give both the same memory format, as buffer_for does");
  TORCH_CHECK(copy.device() == weight.device(), "copy is on ", copy.device(),
              ", and the weight on ", weight.device(),
              "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(!copy.is_inference() && can_be_held(copy) && !copy.requires_grad(),
              "copy requires grad, is not dense, or was made in inference mode; pass what "
              "buffer_for(weight, dtype) returned");
}

}  // namespace detail

MEZZO_INLINE WeightCache::WeightCache() : store_(std::make_shared<detail::WeightStore>()) {}

MEZZO_INLINE void WeightCache::pin(const std::vector<at::Tensor>& weights) const {
  std::vector<at::Tensor> shown;
  for (const auto& weight : weights) {
    TORCH_CHECK(weight.defined(),
                "weight is undefined; construct the module before its parameters are passed");
    if (!weight.is_floating_point()) continue;
    shown.push_back(*detail::shown_by(weight));
    detail::check_can_be_held(shown.back());
  }
  store_->pin(shown);
}

MEZZO_INLINE void WeightCache::unpin(const std::vector<at::Tensor>& weights) const {
  for (const auto& weight : weights) {
    if (weight.defined()) store_->unpin(detail::shown_by(weight)->unsafeGetTensorImpl());
  }
}

MEZZO_INLINE void WeightCache::unpin() const { store_->unpin(nullptr); }

MEZZO_INLINE at::Tensor WeightCache::buffer_for(const at::Tensor& weight,
                                                at::ScalarType dtype) const {
  detail::check_can_be_held(weight);
  detail::check_low_precision(weight, dtype, "dtype");
  return store_->buffer_for(weight, dtype);
}

MEZZO_INLINE void WeightCache::publish(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& published) const {
  detail::WriteEvents events;
  for (const auto& [weight, copy] : published) {
    detail::check_can_be_held(weight);
    detail::check_copy(weight, copy);
    store_->publish(weight, copy, events);
  }
}

MEZZO_INLINE bool WeightCache::holds(const at::Tensor& weight, at::ScalarType dtype) const {
  if (!weight.defined()) return false;
  const auto shown = detail::shown_by(weight);
  return detail::can_be_held(*shown) && store_->holds(*shown, dtype);
}

MEZZO_INLINE bool WeightCache::is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const {
  return weight.defined() && store_->is_asked_for(weight, dtype);
}

MEZZO_INLINE void WeightCache::forget(const at::Tensor& weight) const {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; pass a parameter, or call clear() for all of them");
  store_->forget(detail::shown_by(weight)->unsafeGetTensorImpl());
}

MEZZO_INLINE void WeightCache::clear() const { store_->forget(nullptr); }

MEZZO_INLINE WeightCacheStatistics WeightCache::statistics() const { return store_->statistics(); }

MEZZO_INLINE void WeightCache::reset_statistics() const { store_->reset_statistics(); }

MEZZO_INLINE WeightCache::operator WeightCacheRef() const { return WeightCacheRef(store_); }

MEZZO_INLINE WeightCache install_op_overrides(WeightCache cache) {
  detail::install_cache_kernels();
  return cache;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream,
                                      const WeightCacheStatistics& statistics) {
  return stream << "weight cache: " << statistics.hits << " hits, " << statistics.casts
                << " casts, " << statistics.published << " published; " << statistics.bytes_saved
                << " bytes saved, " << statistics.bytes_cast << " cast, " << statistics.bytes_held
                << " held in " << statistics.copies_held << " copies";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
