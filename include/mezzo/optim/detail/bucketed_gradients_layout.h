#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/bucket_layout.h>
#include <mezzo/optim/detail/bucketed_gradients.h>
#include <mezzo/optim/detail/bucketed_gradients_backward.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void BucketedGradients::check_parameters(const std::vector<at::Tensor>& parameters) const {
  std::unordered_set<const at::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters_) seen.insert(parameter.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    TORCH_CHECK(parameter.defined(), "GradBuckets: parameter ", i, " is undefined; leave it out");
    const at::ScalarType dtype = parameter.scalar_type();
    TORCH_CHECK(parameter.layout() == at::kStrided && is_training_dtype(dtype),
                "GradBuckets: ", parameter_words(i, parameter),
                " should be dense, and of float32, float64, bfloat16 or float16; leave it out");
    TORCH_CHECK(parameter.is_leaf() && !parameter.is_inference(),
                "GradBuckets: ", parameter_words(i, parameter),
                " is no leaf, or was made under c10::InferenceMode; give the tensor that the "
                "module registered, made outside of inference mode");
    TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second,
                "GradBuckets: ", parameter_words(i, parameter),
                " is given twice, as model->parameters() gives a weight that two modules share; "
                "give it once");
  }
}

inline void BucketedGradients::add_parameters(const std::vector<at::Tensor>& parameters) {
  check_parameters(parameters);
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.rbegin(), order.rend(), parameters_.size());
  const std::lock_guard lock(mutex_);
  for (const at::Tensor& parameter : parameters) {
    parameters_.push_back(parameter);
    slots_.emplace_back().parameter = parameter;
  }
  append_buckets(order);
  if (is_flat() || options_.check_during_backward() || on_ready_ != nullptr) install_hooks();
}

/// Buckets for the parameters of these numbers, whose slots then belong to them.
inline void BucketedGradients::append_buckets(const std::vector<std::size_t>& order) {
  std::vector<std::pair<at::Device, at::ScalarType>> groups;
  std::vector<LayoutItem> items;
  for (const std::size_t number : order) {
    const at::Tensor& parameter = parameters_[number];
    const std::pair group(parameter.device(), parameter.scalar_type());
    const auto found = std::find(groups.begin(), groups.end(), group);
    items.push_back({static_cast<std::size_t>(found - groups.begin()), parameter.numel(),
                     static_cast<int64_t>(parameter.element_size())});
    if (found == groups.end()) groups.push_back(group);
  }
  for (const BucketLayout& layout : lay_out(items, options_.bucket_bytes())) {
    const auto& [device, dtype] = groups[items[layout.items.front()].group];
    GradBucket& bucket = buckets_.emplace_back(GradBucket{device, dtype, {}, {}});
    for (const std::size_t item : layout.items) {
      bucket.parameters.push_back(order[item]);
      slots_[order[item]].bucket = buckets_.size() - 1;
    }
    if (!is_flat()) continue;
    const c10::InferenceMode no_inference(false);
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t count = padded_count(layout.count, element_size, options_.parts());
    bucket.flat = at::zeros({count}, at::TensorOptions().device(device).dtype(dtype));
    place_slots(bucket, layout.offsets);
  }
  active_passes_.clear();  // whatever was counted was counted of other buckets
}

inline void BucketedGradients::place_slots(const GradBucket& bucket,
                                           const std::vector<int64_t>& offsets) {
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    GradientSlot& slot = slots_[bucket.parameters[i]];
    const at::Tensor& parameter = slot.parameter;
    std::vector<int64_t> strides = parameter.strides().vec();
    if (!parameter.is_non_overlapping_and_dense()) {
      int64_t stride = 1;
      for (int64_t dim = parameter.dim(); dim-- > 0;) {
        strides[static_cast<std::size_t>(dim)] = stride;
        stride *= std::max<int64_t>(parameter.size(dim), 1);
      }
    }
    slot.place = at::empty({0}, bucket.flat.options());
    slot.place.set_(bucket.flat.storage(), offsets[i], parameter.sizes(), strides);
    slot.may_be_nonzero = false;
  }
}

inline void BucketedGradients::install_hooks() {
  for (std::size_t number = 0; number < slots_.size(); ++number) {
    if (slots_[number].is_hooked) continue;
    BucketHook<BucketedGradients>::install(shared_from_this(), number, parameters_[number]);
    slots_[number].is_hooked = true;
  }
}

inline void BucketedGradients::remove_hooks() {
  for (const GradientSlot& slot : slots_) {
    if (slot.is_hooked) BucketHook<BucketedGradients>::remove(this, slot.parameter);
  }
}

inline int64_t BucketedGradients::on_ready(std::function<void(std::size_t)> callback) {
  const std::lock_guard lock(mutex_);
  on_ready_ = std::move(callback);
  if (on_ready_ != nullptr) install_hooks();
  return ++ready_number_;
}

inline void BucketedGradients::end_ready(int64_t callback) {
  const std::lock_guard lock(mutex_);
  if (callback == ready_number_) on_ready_ = nullptr;
}

inline bool BucketedGradients::is_reduced_elsewhere(std::size_t number) const {
  return BucketHook<BucketedGradients>::any_of(
      parameters_[number],
      [this](const BucketedGradients& other) { return &other != this && other.reductions_ > 0; });
}

/// Brings one gradient to where the storage wants it, whatever became of it.
inline void BucketedGradients::settle(std::size_t number) {
  GradientSlot& slot = slots_[number];
  const at::Tensor& gradient = slot.gradient();
  if (gradient.defined()) check_gradient(slot, number);
  if (!slot.has_dense_gradient()) {
    if (is_flat() && slot.may_be_nonzero) {
      slot.place.zero_();
      slot.may_be_nonzero = false;
    }
  } else if (is_flat()) {
    if (!is_in_place(slot)) move_to_place(number);
    slot.may_be_nonzero = true;
  } else if (!is_laid_out_like(gradient, slot.parameter)) {
    slot.parameter.mutable_grad() =
        torch::autograd::utils::clone_obey_contract(gradient, slot.parameter);
  }
}

inline void BucketedGradients::move_to_place(std::size_t number) {
  GradientSlot& slot = slots_[number];
  const at::Tensor& gradient = slot.gradient();
  TORCH_CHECK(fits_place(slot), "GradBuckets: ", parameter_words(number, slot.parameter), " was ",
              tensor_words(slot.place), " when these GradBuckets (or the DataParallel that ",
              "made them) were made; cast and move the model first, then make them");
  // One that is another part of the buffer, or this one seen otherwise, must not be overwritten
  // while it is read.
  const bool overlaps = shares_storage(gradient, slot.place);
  slot.place.copy_(overlaps ? gradient.detach().clone() : gradient.detach());
  slot.parameter.mutable_grad() = slot.place;
}

inline void BucketedGradients::adopt_place(std::size_t number) {
  const std::lock_guard lock(mutex_);
  GradientSlot& slot = slots_[number];
  slot.parameter.mutable_grad() = slot.place;
  slot.may_be_nonzero = true;
}

inline void BucketedGradients::reattach_gradients() {
  const std::lock_guard lock(mutex_);
  const c10::NoGradGuard no_grad;
  forget_pass();
  read_pending();
  for (std::size_t number = 0; number < slots_.size(); ++number) settle(number);
}

inline std::vector<BucketGradient> BucketedGradients::gradients() {
  reattach_gradients();
  std::vector<BucketGradient> all;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (const std::size_t number : buckets_[bucket].parameters) {
      if (!slots_[number].has_dense_gradient()) continue;
      all.push_back({number, bucket, slots_[number].gradient()});
    }
  }
  return all;
}

inline std::vector<std::size_t> BucketedGradients::sparse_gradients() {
  reattach_gradients();
  std::vector<std::size_t> numbers;
  for (std::size_t number = 0; number < slots_.size(); ++number) {
    const at::Tensor& gradient = slots_[number].gradient();
    if (gradient.defined() && gradient.is_sparse()) numbers.push_back(number);
  }
  return numbers;
}

inline void BucketedGradients::zero_grad(bool set_to_none) {
  const std::lock_guard lock(mutex_);
  const c10::NoGradGuard no_grad;
  forget_pass();
  for (const std::size_t number : std::exchange(pending_, {})) slots_[number].is_pending = false;
  pending_bytes_ = 0;
  holds_bad_.reset();
  if (!set_to_none && is_flat()) {
    for (const GradBucket& bucket : buckets_) bucket.flat.zero_();
  }
  for (GradientSlot& slot : slots_) {
    if (!slot.gradient().defined()) continue;
    at::Tensor& gradient = slot.parameter.mutable_grad();
    if (set_to_none) {
      gradient.reset();
    } else if (is_flat() && slot.has_dense_gradient()) {
      gradient = slot.place;
      slot.may_be_nonzero = true;
    } else {
      gradient = gradient.detach();
      gradient.zero_();
    }
  }
}

inline void BucketedGradients::rebuild_buckets() {
  TORCH_CHECK(slots_.empty() || slots_.front().is_hooked,
              "rebuild_buckets: nothing watches the order of gradients; use flat storage, "
              "check_during_backward or on_ready");
  reattach_gradients();
  const std::lock_guard lock(mutex_);
  const c10::NoGradGuard no_grad;
  std::vector<std::size_t> order = arrivals_;
  std::vector<bool> is_in_order(slots_.size());
  for (const std::size_t number : order) is_in_order[number] = true;
  for (const GradBucket& bucket : std::exchange(buckets_, {})) {
    for (const std::size_t number : bucket.parameters) {
      if (!is_in_order[number]) order.push_back(number);
    }
  }
  append_buckets(order);
  for (std::size_t number = 0; number < slots_.size(); ++number) settle(number);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
