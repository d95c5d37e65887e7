/// \file
/// Signs that somebody may write to a weight without a new version of it. To look at the values
/// instead would not pay: a fingerprint of a weight takes as long as its cast, and on CUDA a host
/// sync as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <mutex>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The node that collects the gradients of a leaf, empty if there never was one. Every graph that
/// leads to the leaf keeps it alive, and the first graph after its end makes another one. So equal
/// owners, expired at the first look, say that no gradient came between two looks.
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
