#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>

// An average of one weight, wherever it is kept: in the state of an optimizer of mezzo's, or in an
// Ema. It is in float (double for double), and undefined before it begins.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Where there is no average yet it begins as `value()`, a tensor of its own; otherwise it follows
/// the weight to its device and dtype.
template <class Value>
void follow_weight(at::Tensor& average, const at::Tensor& weight, const Value& value) {
  if (!average.defined()) {
    check_is_warm(weight.device(), "an average");
    average = value();
  }
  average = average.to(weight.device(), wide_dtype(weight));
}

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
