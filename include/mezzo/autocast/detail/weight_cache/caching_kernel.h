/// \file
/// The kernel in front of an op that consumes weights: it does what libtorch's lower_precision
/// kernels do, but asks the region's WeightCache, where there is one, for the weights. Boxed: one
/// kernel serves all ops, which are a table of names and roles. And that table.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/override_kernel.h>
#include <mezzo/autocast/detail/op_policy/override_registry.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Of an op's first arguments; those behind are other.
using ArgumentRoles = std::array<ArgumentRole, 6>;

class CachingKernel final : public c10::OperatorKernel {
 public:
  /// Takes over from whatever kernel `op` has now.
  CachingKernel(const c10::OperatorHandle& op, const ArgumentRoles& roles, c10::DeviceType device,
                OpSlot slot)
      : roles_(roles),
        arity_(op.schema().arguments().size()),
        device_(device),
        device_index_(policy_device_index(device)),
        slot_(slot),
        previous_(op.getComputedKernelForDispatchKey(autocast_key(device))) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    if (!is_lowered()) {
      previous_.callBoxed(op, keys, stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key(device_));
    // In a trace a copy would be a constant.
    const ThreadCache cache =
        keys.has(c10::DispatchKey::Tracer) ? ThreadCache() : thread_caches()[device_index_];
    const auto dtype = at::autocast::get_autocast_dtype(device_);
    c10::IValue* arguments = stack->data() + (stack->size() - arity_);
    for (std::size_t i = 0; i < arity_; ++i) {
      const ArgumentRole role = i < roles_.size() ? roles_[i] : ArgumentRole::other;
      cast_argument(arguments[i], dtype, device_, cache, role);
    }
    op.callBoxed(stack);
  }

 private:
  /// Unless a policy says otherwise: then the policy's kernel knows what to do, which is the
  /// previous one or stands in front of this.
  bool is_lowered() const {
    const PolicyEdits* edits = thread_policies()[device_index_].get();
    const auto category = edits == nullptr ? std::nullopt : edits->find(slot_);
    return category.value_or(OpCategory::lower_precision) == OpCategory::lower_precision;
  }

  ArgumentRoles roles_;
  std::size_t arity_;
  c10::DeviceType device_;
  std::size_t device_index_;
  OpSlot slot_;
  c10::SafeKernelFunction previous_;
};

/// An op that asks caches, by its full name.
struct CachedOp {
  const char* name;
  ArgumentRoles roles;
};

/// All of them. Those that a device does not lower, as the CPU does not the cells, are left alone
/// there: the ops that they are made of meet the cache.
inline constexpr auto cached_ops() {
  using enum ArgumentRole;
  constexpr ArgumentRoles kInputWeightBias{other, weight, weight};
  constexpr ArgumentRoles kFactors{left_factor, right_factor};
  constexpr ArgumentRoles kBiasAndFactors{right_factor, left_factor, right_factor};
  constexpr ArgumentRoles kCell{other, other, weight, weight, weight, weight};
  return std::array<CachedOp, 24>{{
      {"aten::linear", kInputWeightBias},
      {"aten::mm", kFactors},
      {"aten::matmul", kFactors},
      {"aten::bmm", kFactors},
      {"aten::addmm", kBiasAndFactors},
      {"aten::addbmm", kBiasAndFactors},
      {"aten::baddbmm", kBiasAndFactors},
      {"aten::conv1d", kInputWeightBias},
      {"aten::conv1d.padding", kInputWeightBias},
      {"aten::conv2d", kInputWeightBias},
      {"aten::conv2d.padding", kInputWeightBias},
      {"aten::conv3d", kInputWeightBias},
      {"aten::conv3d.padding", kInputWeightBias},
      {"aten::conv_tbc", kInputWeightBias},
      {"aten::conv_transpose1d", kInputWeightBias},
      {"aten::conv_transpose2d.input", kInputWeightBias},
      {"aten::conv_transpose3d.input", kInputWeightBias},
      {"aten::_convolution", kInputWeightBias},
      {"aten::prelu", {other, weight}},
      {"aten::lstm_cell", kCell},
      {"aten::gru_cell", kCell},
      {"aten::rnn_tanh_cell", kCell},
      {"aten::rnn_relu_cell", kCell},
      {"aten::mkldnn_rnn_layer", {other, weight, weight, weight, weight}},
  }};
}

inline void install_cache_kernels() {
  for (const auto& [name, roles] : cached_ops()) {
    const auto op = find_op(name);
    TORCH_CHECK(op.has_value(), "install_op_overrides: this libtorch (", TORCH_VERSION,
                ") has no operator ", name, "; use libtorch 2.11, or leave the WeightCache out");
    check_no_other_mezzo_overrides(*op);
  }
  for (const auto& [name, roles] : cached_ops()) {
    const auto op = find_op(name);
    const auto kernel = [&op, &asked = roles](c10::DeviceType device, OpSlot slot) {
      return c10::KernelFunction::makeFromBoxedFunctor(
          std::make_unique<CachingKernel>(*op, asked, device, slot));
    };
    override_registry().install_cache_kernel(*op, kernel);
  }
  cache_ops_are_installed() = true;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
