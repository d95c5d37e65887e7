/// \file
/// Plain functions that take part in autocast: what Python says with `custom_fwd(cast_inputs=...)`
/// and Apex with `half_function`, `float_function` and `promote_function`.
///
///     auto loss = mezzo::float_function(my_loss);
///     auto mix = mezzo::half_function([&](torch::Tensor x) { return fused_kernel(x, table); });
///
/// In a region of autocast the returned callable casts the tensors among its arguments and runs the
/// function with autocast off, so that nothing inside is cast again; elsewhere it just calls. It
/// forwards all arguments, also those without tensors, perfectly, and returns what the function
/// returns.
///
/// Cast are the floating tensors, double ones excepted, that are on a device whose autocast is
/// enabled in the calling thread: bare, in std::optional, std::vector, std::array, c10::ArrayRef,
/// std::pair, std::tuple, in maps' values, in these within one another, and in structs that list
/// theirs with a member `tensors()`. What holds tensors is passed on as a temporary copy with cast
/// tensors, so the function cannot hand results back through it. Casts are differentiable.
///
/// A lvalue function is copied; pass std::ref(function) to keep a reference. An op that is
/// registered with TORCH_LIBRARY needs none of this: name it in an OpPolicy.
#pragma once

#include <mezzo/autocast/detail/cast_function.h>
#include <mezzo/base/version.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// `function` on inputs of this dtype. In PyTorch: `custom_fwd(cast_inputs=dtype)`.
/// \throws c10::Error unless dtype is float32, half or bfloat16
template <class F>
[[nodiscard]] auto cast_inputs(at::ScalarType dtype, F&& function) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
              "cast_inputs: dtype is ", dtype,
              "; it should be torch::kFloat, torch::kHalf or torch::kBFloat16");
  return detail::CastingFunction<std::decay_t<F>, detail::ToDtype>(std::forward<F>(function),
                                                                   {dtype});
}

/// `function` in float32: for what overflows or loses too much. In Apex: `float_function`.
template <class F>
[[nodiscard]] auto float_function(F&& function) {
  return cast_inputs(at::kFloat, std::forward<F>(function));
}

/// `function` in the dtype that the calling region lowers to. In Apex: `half_function`.
template <class F>
[[nodiscard]] auto half_function(F&& function) {
  return detail::CastingFunction<std::decay_t<F>, detail::ToRegionDtype>(std::forward<F>(function),
                                                                         {});
}

/// `function` in the widest dtype among the tensors that it is given; half and bfloat16 meet in
/// float32. In Apex: `promote_function`.
template <class F>
[[nodiscard]] auto promote_function(F&& function) {
  return detail::CastingFunction<std::decay_t<F>, detail::ToWidest>(std::forward<F>(function), {});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
