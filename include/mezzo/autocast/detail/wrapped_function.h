/// \file
/// The callables that mezzo returns, and AutocastOptions::output_dtype: the tensors of bfloat16 and
/// half in a result, as another dtype.
#pragma once

#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a tensor of bfloat16 or half as one of `dtype`, and any other as it is.
inline at::Tensor cast_low_precision(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_low_precision(tensor) ? tensor.to(dtype) : tensor;
}

/// Whether the tensors of a `T` are found.
template <class T>
inline constexpr bool kHasCastableTensors = !std::is_reference_v<T> && contains_tensors<T>();

/// Calls `function()` and returns its result, with tensors of the dtype that `output` asks for.
/// \throws c10::Error if `output` is set and nobody knows the tensors of the result
template <class F>
decltype(auto) call_with_output_dtype(const std::optional<at::ScalarType>& output, F&& function) {
  using Result = std::invoke_result_t<F>;
  if constexpr (kHasCastableTensors<Result>) {
    Result result = std::forward<F>(function)();
    if (output) {
      for_each_tensor(result,
                      [&](at::Tensor& tensor) { tensor = cast_low_precision(tensor, *output); });
    }
    return result;
  } else {
    constexpr bool kHasNoTensors = std::is_scalar_v<Result> || std::is_void_v<Result>;
    TORCH_CHECK(kHasNoTensors || !output, "output_dtype: the AutocastOptions ask for results of ",
                *output, ", and this callable returns ",
                std::is_reference_v<Result> ? "a reference" : "a type that lists no tensors",
                "; return tensors by value (also in containers, pairs, tuples and optionals), give "
                "a struct of yours a member `auto tensors() { return std::tie(logits, loss); }`, "
                "or leave output out and call .to(torch::kFloat)");
    return std::forward<F>(function)();
  }
}

/// Holds a function, and calls `wrapper(function, args...)` where it is called itself. All
/// arguments and the result are forwarded perfectly.
template <class F, class Wrapper>
class WrappedFunction {
 public:
  template <class G>
  WrappedFunction(G&& function, Wrapper wrapper)
      : function_(std::forward<G>(function)), wrapper_(std::move(wrapper)) {}

  template <class... Args>
  requires std::invocable<const Wrapper&, F&, Args...>
  decltype(auto) operator()(Args&&... args) {
    return wrapper_(function_, std::forward<Args>(args)...);
  }
  template <class... Args>
  requires std::invocable<const Wrapper&, const F&, Args...>
  decltype(auto) operator()(Args&&... args) const {
    return wrapper_(function_, std::forward<Args>(args)...);
  }

 private:
  F function_;
  Wrapper wrapper_;
};

/// Calls a function in a `Guard` that is made of `state`, and casts its results as the state's
/// `output` says, if it has one.
template <class Guard, class State>
struct GuardedCall {
  State state;

  template <class F, class... Args>
  requires std::invocable<F&, Args...>
  decltype(auto) operator()(F& function, Args&&... args) const {
    const Guard guard(state);
    const auto call = [&]() -> decltype(auto) {
      return std::invoke(function, std::forward<Args>(args)...);
    };
    if constexpr (requires { state.output_dtype; }) {
      return call_with_output_dtype(state.output_dtype, call);
    } else {
      return call();
    }
  }
};

/// Returns `function` as a callable that runs in scopes of `state`.
template <class Guard, class F, class State>
auto wrap_in_guard(State state, F&& function) {
  using Wrapper = GuardedCall<Guard, State>;
  return WrappedFunction<std::decay_t<F>, Wrapper>(std::forward<F>(function), {std::move(state)});
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
