/// \file
/// The kernel in front of an op that consumes weights: it does what libtorch's lower_precision
/// kernels do, but asks the region's WeightCache for the weights. Unboxed: what passes through
/// without a cache costs a few nanoseconds.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/autocast/detail/op_policy/eligible.h>
#include <mezzo/autocast/detail/op_policy/policy_edits.h>
#include <mezzo/autocast/detail/weight_cache/thread_caches.h>
#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

const c10::KernelFunction& private_kernel(const c10::SafeKernelFunction& safe);

// Up to libtorch 2.11 a SafeKernelFunction can be called boxed only, which costs more than some
// ops. An explicit instantiation may name the private member that holds the kernel itself.
template <c10::KernelFunction c10::SafeKernelFunction::*Member>
struct ReadPrivateKernel {
  friend const c10::KernelFunction& private_kernel(const c10::SafeKernelFunction& safe) {
    return safe.*Member;
  }
};
template struct ReadPrivateKernel<&c10::SafeKernelFunction::kernel_>;

template <class Safe>
const c10::KernelFunction& wrapped_kernel(const Safe& safe) {
  if constexpr (requires { safe.kernelFunction(); }) {
    return safe.kernelFunction();
  } else {
    return private_kernel(safe);
  }
}

/// What stands at an op's first arguments; those behind are other.
using Places = std::array<Place, 6>;

template <class Op, Places places, class Schema = typename Op::schema>
class CachingKernel;

template <class Op, Places places, class Result, class... Args>
class CachingKernel<Op, places, Result(Args...)> final : public c10::OperatorKernel {
 public:
  /// Takes over from whatever kernel `op` has now.
  CachingKernel(const c10::OperatorHandle& op, c10::DeviceType device, OpSlot slot)
      : op_(op),
        device_(device),
        device_index_(policy_device_index(device)),
        slot_(slot),
        previous_(op.getComputedKernelForDispatchKey(autocast_key(device))) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    const ThreadCache& cache = thread_caches()[device_index_];
    if (cache.casts == nullptr || keys.has(c10::DispatchKey::Tracer) || !is_lowered()) {
      return wrapped_kernel(previous_).template call<Result, Args...>(op_, keys,
                                                                      std::forward<Args>(args)...);
    }
    return run(cache, std::index_sequence_for<Args...>(), args...);
  }

 private:
  /// Unless a policy says otherwise: then its own kernel knows what to do, which is the previous
  /// one or stands in front of this.
  bool is_lowered() const {
    const PolicyEdits* edits = thread_policies()[device_index_].get();
    const auto category = edits == nullptr ? std::nullopt : edits->find(slot_);
    return category.value_or(OpCategory::lower_precision) == OpCategory::lower_precision;
  }

  template <std::size_t... I>
  Result run(const ThreadCache& cache, std::index_sequence<I...>, const Args&... args) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    const auto dtype = at::autocast::get_autocast_dtype(device_);
    return Op::call(cast(cache, dtype, place(I), args)...);
  }

  static constexpr Place place(std::size_t argument) {
    return argument < places.size() ? places[argument] : Place::other;
  }

  at::Tensor cast(const ThreadCache& cache, at::ScalarType dtype, Place place,
                  const at::Tensor& tensor) const {
    if (!is_eligible(tensor, device_) || tensor.scalar_type() == dtype) {
      return tensor;
    }
    return place == Place::other ? at::autocast::cached_cast(dtype, tensor, device_)
                                 : cache.casts->lower(tensor, dtype, place, cache.since);
  }

  std::optional<at::Tensor> cast(const ThreadCache& cache, at::ScalarType dtype, Place place,
                                 const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() ? std::optional(cast(cache, dtype, place, *tensor)) : std::nullopt;
  }

  std::vector<at::Tensor> cast(const ThreadCache& cache, at::ScalarType dtype, Place place,
                               const at::TensorList& tensors) const {
    std::vector<at::Tensor> lowered;
    lowered.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      lowered.push_back(cast(cache, dtype, place, tensor));
    }
    return lowered;
  }

  template <class T>
  const T& cast(const ThreadCache&, at::ScalarType, Place, const T& value) const {
    return value;
  }

  c10::OperatorHandle op_;
  c10::DeviceType device_;
  std::size_t device_index_;
  OpSlot slot_;
  c10::SafeKernelFunction previous_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
