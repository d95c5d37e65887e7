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
#include <mezzo/autocast/detail/op_policy/override_registry.h>
#include <mezzo/autocast/detail/weight_cache/caching_kernel.h>
#include <mezzo/base/version.h>

#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Op, Places places>
void cache_weights_of() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  override_registry().cache_weights_of(op, [&op](c10::DeviceType device, OpSlot slot) {
    using Kernel = CachingKernel<Op, places>;
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
        std::make_unique<Kernel>(op, device, slot));
  });
}

/// Ops that a device does not lower, as the CPU does not the cells, are left alone there: those
/// that they are made of meet the cache.
inline void cache_weights_of_ops() {
  using namespace at::_ops;
  using enum Place;
  constexpr Places kInputWeightBias{other, weight, weight};
  cache_weights_of<linear, kInputWeightBias>();
  constexpr Places kFactors{left, right};
  cache_weights_of<mm, kFactors>();
  cache_weights_of<matmul, kFactors>();
  cache_weights_of<bmm, kFactors>();
  constexpr Places kBiasAndFactors{right, left, right};
  cache_weights_of<addmm, kBiasAndFactors>();
  cache_weights_of<addbmm, kBiasAndFactors>();
  cache_weights_of<baddbmm, kBiasAndFactors>();
  cache_weights_of<conv1d, kInputWeightBias>();
  cache_weights_of<conv1d_padding, kInputWeightBias>();
  cache_weights_of<conv2d, kInputWeightBias>();
  cache_weights_of<conv2d_padding, kInputWeightBias>();
  cache_weights_of<conv3d, kInputWeightBias>();
  cache_weights_of<conv3d_padding, kInputWeightBias>();
  cache_weights_of<conv_tbc, kInputWeightBias>();
  cache_weights_of<conv_transpose1d, kInputWeightBias>();
  cache_weights_of<conv_transpose2d_input, kInputWeightBias>();
  cache_weights_of<conv_transpose3d_input, kInputWeightBias>();
  cache_weights_of<_convolution, kInputWeightBias>();
  cache_weights_of<prelu, Places{other, weight}>();
  constexpr Places kCell{other, other, weight, weight, weight, weight};
  cache_weights_of<lstm_cell, kCell>();
  cache_weights_of<gru_cell, kCell>();
  cache_weights_of<rnn_tanh_cell, kCell>();
  cache_weights_of<rnn_relu_cell, kCell>();
  cache_weights_of<mkldnn_rnn_layer, Places{other, weight, weight, weight, weight}>();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
