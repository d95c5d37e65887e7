/// \file
/// The ops whose weights a WeightCache holds.
#pragma once

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
#include <c10/macros/Export.h>
#include <mezzo/detail/op_policy/override_registry.h>
#include <mezzo/detail/weight_cache/caching_kernel.h>
#include <mezzo/version.h>

#include <concepts>
#include <cstdint>
#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A set of argument positions.
template <std::same_as<int>... Positions>
constexpr std::uint32_t arguments(Positions... positions) {
  return ((std::uint32_t{1} << positions) | ...);
}

template <class Op, std::uint32_t Weights, std::uint32_t Either = 0>
void cache_weights_of() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  override_registry().cache_weights_of(op, [&op](c10::DeviceType device, OpSlot slot) {
    using Kernel = CachingKernel<Op, Weights, Either>;
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
        std::make_unique<Kernel>(op, device, slot));
  });
}

/// Ops that a device does not lower, as the CPU does not the cells, are left alone there: those
/// that they are made of meet the cache.
inline void cache_weights_of_ops() {
  using namespace at::_ops;
  constexpr auto kAfterInput = arguments(1, 2);  // weight and bias
  cache_weights_of<linear, kAfterInput>();
  cache_weights_of<mm, 0, arguments(0, 1)>();
  cache_weights_of<matmul, 0, arguments(0, 1)>();
  cache_weights_of<bmm, 0, arguments(0, 1)>();
  cache_weights_of<addmm, 0, arguments(0, 1, 2)>();
  cache_weights_of<addbmm, 0, arguments(0, 1, 2)>();
  cache_weights_of<baddbmm, 0, arguments(0, 1, 2)>();
  cache_weights_of<conv1d, kAfterInput>();
  cache_weights_of<conv1d_padding, kAfterInput>();
  cache_weights_of<conv2d, kAfterInput>();
  cache_weights_of<conv2d_padding, kAfterInput>();
  cache_weights_of<conv3d, kAfterInput>();
  cache_weights_of<conv3d_padding, kAfterInput>();
  cache_weights_of<conv_tbc, kAfterInput>();
  cache_weights_of<conv_transpose1d, kAfterInput>();
  cache_weights_of<conv_transpose2d_input, kAfterInput>();
  cache_weights_of<conv_transpose3d_input, kAfterInput>();
  cache_weights_of<_convolution, kAfterInput>();
  cache_weights_of<prelu, arguments(1)>();
  constexpr auto kAfterState = arguments(2, 3, 4, 5);  // two weights and two biases
  cache_weights_of<lstm_cell, kAfterState>();
  cache_weights_of<gru_cell, kAfterState>();
  cache_weights_of<rnn_tanh_cell, kAfterState>();
  cache_weights_of<rnn_relu_cell, kAfterState>();
  cache_weights_of<mkldnn_rnn_layer, arguments(1, 2, 3, 4)>();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
