/// \file
/// The kernel in front of an op that consumes weights: it does what libtorch's lower_precision
/// kernels do, but asks the region's WeightCache, where there is one, for the weights. Unboxed: an
/// op costs a few nanoseconds more. And the ops that get one.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_convolution_ops.h>
#include <ATen/ops/addbmm_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/conv1d_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/conv3d_ops.h>
#include <ATen/ops/conv_tbc_ops.h>
#include <ATen/ops/conv_transpose1d_ops.h>
#include <ATen/ops/conv_transpose2d_ops.h>
#include <ATen/ops/conv_transpose3d_ops.h>
#include <ATen/ops/gru_cell_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/lstm_cell_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mkldnn_rnn_layer_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/prelu_ops.h>
#include <ATen/ops/rnn_relu_cell_ops.h>
#include <ATen/ops/rnn_tanh_cell_ops.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <mezzo/autocast/detail/eligible.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/override_registry.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A kernel as the dispatcher hands it out, which can be called boxed only, as one that can be
/// called with the op's own arguments.
class PassedOn final : public c10::OperatorKernel {
 public:
  explicit PassedOn(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

/// Of an op's first arguments; those behind are other.
using ArgumentRoles = std::array<ArgumentRole, 6>;

template <class Op, ArgumentRoles roles, class Schema = typename Op::schema>
class CachingKernel;

template <class Op, ArgumentRoles roles, class Result, class... Args>
class CachingKernel<Op, roles, Result(Args...)> final : public c10::OperatorKernel {
 public:
  /// Takes over from whatever kernel `op` has now.
  CachingKernel(const c10::OperatorHandle& op, c10::DeviceType device, OpSlot slot)
      : op_(op),
        device_(device),
        device_index_(policy_device_index(device)),
        slot_(slot),
        previous_(c10::KernelFunction::makeFromBoxedFunctor(
            std::make_unique<PassedOn>(op.getComputedKernelForDispatchKey(autocast_key(device))))) {
  }

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    if (!is_lowered()) {
      return previous_.template call<Result, Args...>(op_, keys, std::forward<Args>(args)...);
    }
    const ThreadCache& cache = thread_caches()[device_index_];
    // In a trace a copy would be a constant.
    const bool asks = cache.casts != nullptr && !keys.has(c10::DispatchKey::Tracer);
    return run(asks ? &cache : nullptr, std::index_sequence_for<Args...>(), args...);
  }

 private:
  /// Unless a policy says otherwise: then the policy's kernel knows what to do, which is the
  /// previous one or stands in front of this.
  bool is_lowered() const {
    const PolicyEdits* edits = thread_policies()[device_index_].get();
    const auto category = edits == nullptr ? std::nullopt : edits->find(slot_);
    return category.value_or(OpCategory::lower_precision) == OpCategory::lower_precision;
  }

  /// As libtorch's kernel does; `cache` is none where weights are cast as everything else is.
  template <std::size_t... I>
  Result run(const ThreadCache* cache, std::index_sequence<I...>, const Args&... args) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    const auto dtype = at::autocast::get_autocast_dtype(device_);
    return Op::call(cast(cache, dtype, role(I), args)...);
  }

  static constexpr ArgumentRole role(std::size_t argument) {
    return argument < roles.size() ? roles[argument] : ArgumentRole::other;
  }

  at::Tensor cast(const ThreadCache* cache, at::ScalarType dtype, ArgumentRole role,
                  const at::Tensor& tensor) const {
    if (!is_eligible(tensor, device_) || tensor.scalar_type() == dtype) {
      return tensor;
    }
    return cache == nullptr || role == ArgumentRole::other
               ? at::autocast::cached_cast(dtype, tensor, device_)
               : cache->casts->lower(tensor, dtype, role, cache->since);
  }

  std::optional<at::Tensor> cast(const ThreadCache* cache, at::ScalarType dtype, ArgumentRole role,
                                 const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() ? std::optional(cast(cache, dtype, role, *tensor)) : std::nullopt;
  }

  std::vector<at::Tensor> cast(const ThreadCache* cache, at::ScalarType dtype, ArgumentRole role,
                               const at::TensorList& tensors) const {
    std::vector<at::Tensor> lowered;
    lowered.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      lowered.push_back(cast(cache, dtype, role, tensor));
    }
    return lowered;
  }

  template <class T>
  const T& cast(const ThreadCache*, at::ScalarType, ArgumentRole, const T& value) const {
    return value;
  }

  c10::OperatorHandle op_;
  c10::DeviceType device_;
  std::size_t device_index_;
  OpSlot slot_;
  c10::KernelFunction previous_;
};

template <class Op, ArgumentRoles roles>
void install_cache_kernel() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  override_registry().install_cache_kernel(op, [&op](c10::DeviceType device, OpSlot slot) {
    using Kernel = CachingKernel<Op, roles>;
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
        std::make_unique<Kernel>(op, device, slot));
  });
}

/// Ops that a device does not lower, as the CPU does not the cells, are left alone there: those
/// that they are made of meet the cache.
inline void install_cache_kernels() {
  using namespace at::_ops;
  using enum ArgumentRole;
  constexpr ArgumentRoles kInputWeightBias{other, weight, weight};
  install_cache_kernel<linear, kInputWeightBias>();
  constexpr ArgumentRoles kFactors{left_factor, right_factor};
  install_cache_kernel<mm, kFactors>();
  install_cache_kernel<matmul, kFactors>();
  install_cache_kernel<bmm, kFactors>();
  constexpr ArgumentRoles kBiasAndFactors{right_factor, left_factor, right_factor};
  install_cache_kernel<addmm, kBiasAndFactors>();
  install_cache_kernel<addbmm, kBiasAndFactors>();
  install_cache_kernel<baddbmm, kBiasAndFactors>();
  install_cache_kernel<conv1d, kInputWeightBias>();
  install_cache_kernel<conv1d_padding, kInputWeightBias>();
  install_cache_kernel<conv2d, kInputWeightBias>();
  install_cache_kernel<conv2d_padding, kInputWeightBias>();
  install_cache_kernel<conv3d, kInputWeightBias>();
  install_cache_kernel<conv3d_padding, kInputWeightBias>();
  install_cache_kernel<conv_tbc, kInputWeightBias>();
  install_cache_kernel<conv_transpose1d, kInputWeightBias>();
  install_cache_kernel<conv_transpose2d_input, kInputWeightBias>();
  install_cache_kernel<conv_transpose3d_input, kInputWeightBias>();
  install_cache_kernel<_convolution, kInputWeightBias>();
  install_cache_kernel<prelu, ArgumentRoles{other, weight}>();
  constexpr ArgumentRoles kCell{other, other, weight, weight, weight, weight};
  install_cache_kernel<lstm_cell, kCell>();
  install_cache_kernel<gru_cell, kCell>();
  install_cache_kernel<rnn_tanh_cell, kCell>();
  install_cache_kernel<rnn_relu_cell, kCell>();
  install_cache_kernel<mkldnn_rnn_layer, ArgumentRoles{other, weight, weight, weight, weight}>();
  cache_ops_are_installed() = true;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
