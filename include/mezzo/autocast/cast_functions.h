/// \file
/// Wrappers that make functions take part in autocast: Python's `custom_fwd(cast_inputs=...)`, and
/// Apex's `half_function`, `float_function` and `promote_function`.
///
///     auto loss = mezzo::float_function(my_loss);
///     auto mix = mezzo::half_function([&](torch::Tensor x) { return fused_kernel(x, table); });
///
/// In an autocast region the returned callable casts the tensors among its arguments and calls the
/// function with autocast disabled, so that nothing inside is cast again; elsewhere it only calls
/// the function. It forwards other arguments perfectly and returns the function's result; a copy
/// where that is a reference to tensors.
///
/// Casts floating-point tensors, except double, on a device whose autocast is enabled in the
/// calling thread: as arguments, in std::optional, std::vector, std::array, c10::ArrayRef,
/// std::pair, std::tuple, in values of maps, in nested containers, and in structs that list their
/// tensors with a member `tensors()`. An argument with tensors is passed as a temporary copy, so it
/// cannot return results. Casts are differentiable.
///
/// Copies an lvalue function; pass std::ref(function) to keep a reference. For an op registered
/// with TORCH_LIBRARY use OpOverrides instead.
#pragma once

#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// `R`, decayed if it is a reference to tensors, which may refer to a cast argument.
template <class R>
using DecayTensorReference =
    std::conditional_t<std::is_reference_v<R> && contains_tensors<R>(), std::decay_t<R>, R>;

/// The dtype that CastInputs casts to: a fixed one, the region's, or the widest of the arguments.
enum class CastTarget { fixed, autocast_dtype, promote };

/// Calls a function with cast arguments and autocast disabled. Outside regions only calls it.
struct CastInputs {
  CastTarget target;
  at::ScalarType fixed = at::kFloat;

  template <class F, class... Args>
  requires std::invocable<F&, Args...> DecayTensorReference<std::invoke_result_t<F&, Args...>>
  operator()(F& function, Args&&... args) const {
    if (!is_any_autocast_enabled()) {
      return std::invoke(function, std::forward<Args>(args)...);
    }
    const at::ScalarType common = target == CastTarget::promote ? promote(args...) : fixed;
    const auto cast = [&](const at::Tensor& tensor) {
      const auto device = eligible_autocast_device(tensor);
      if (!device.has_value()) return tensor;
      const auto dtype =
          target == CastTarget::autocast_dtype ? at::autocast::get_autocast_dtype(*device) : common;
      return at::autocast::cached_cast(dtype, tensor, *device);
    };
    // Braces evaluate the casts now, while autocast is enabled.
    std::tuple<decltype(map_tensors(std::forward<Args>(args), cast))...> arguments{
        map_tensors(std::forward<Args>(args), cast)...};
    const AutocastDisabledGuard disabled;
    return std::apply(
        [&function](
            auto&&... each) -> DecayTensorReference<std::invoke_result_t<F&, decltype(each)...>> {
          return std::invoke(function, std::forward<decltype(each)>(each)...);
        },
        std::move(arguments));
  }

 private:
  template <class... Args>
  static at::ScalarType promote(const Args&... args) {
    std::optional<at::ScalarType> promoted;
    const auto visit = [&promoted](const at::Tensor& tensor) {
      if (eligible_autocast_device(tensor).has_value())
        promoted = promote_type(promoted, tensor.scalar_type());
    };
    (for_each_tensor(args, visit), ...);
    return promoted.value_or(at::kFloat);
  }
};

template <class F>
auto wrap_with_cast_inputs(CastInputs casts, F&& function) {
  return WrappedFunction<std::decay_t<F>, CastInputs>(std::forward<F>(function), casts);
}

}  // namespace detail

/// Returns a callable that casts inputs to `dtype` and calls `function`: PyTorch's
/// `custom_fwd(cast_inputs=dtype)`.
/// \throws c10::Error unless dtype is float32, float16 or bfloat16
template <class F>
[[nodiscard]] auto cast_inputs(at::ScalarType dtype, F&& function) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
              "cast_inputs: dtype is ", dtype,
              "; it should be torch::kFloat, torch::kHalf or torch::kBFloat16");
  return detail::wrap_with_cast_inputs({detail::CastTarget::fixed, dtype},
                                       std::forward<F>(function));
}

/// Returns a callable that runs `function` in float32, for functions that overflow or lose
/// precision: Apex's `float_function`.
template <class F>
[[nodiscard]] auto float_function(F&& function) {
  return cast_inputs(at::kFloat, std::forward<F>(function));
}

/// Returns a callable that runs `function` in the dtype of the calling region: Apex's
/// `half_function`.
template <class F>
[[nodiscard]] auto half_function(F&& function) {
  return detail::wrap_with_cast_inputs({detail::CastTarget::autocast_dtype},
                                       std::forward<F>(function));
}

/// Returns a callable that runs `function` in the widest dtype of its tensors, float32 for float16
/// and bfloat16: Apex's `promote_function`.
template <class F>
[[nodiscard]] auto promote_function(F&& function) {
  return detail::wrap_with_cast_inputs({detail::CastTarget::promote}, std::forward<F>(function));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
