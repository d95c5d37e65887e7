#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// average += share * (value - average), both of one dtype: the update of torch's AveragedModel.
/// Where `found_inf`, a tensor of one element on their device, is not 0, it leaves the average as
/// it is, bit for bit; so that there is no wait, the device chooses.
inline void move_average(at::Tensor& average, const at::Tensor& value, double share,
                         const at::Tensor& found_inf = {}) {
  if (!found_inf.defined()) {
    average.lerp_(value, share);
    return;
  }
  const at::Tensor ran = found_inf.eq(0).reshape({});
  at::where_out(average, ran, at::lerp(average, value, share), average);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
