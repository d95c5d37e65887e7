/// \file
/// The callables that mezzo returns, and the cast of results to AutocastOptions::output_dtype.
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

/// Returns `tensor.to(dtype)` if the tensor is float16 or bfloat16, else `tensor`.
inline at::Tensor cast_low_precision(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_low_precision(tensor) ? tensor.to(dtype) : tensor;
}

/// Returns `function()`, with float16 and bfloat16 tensors cast to `output_dtype` if it is set.
/// \throws c10::Error if it is set and the result is a reference or a type that lists no tensors
template <class F>
decltype(auto) call_with_output_dtype(const std::optional<at::ScalarType>& output_dtype,
                                      F&& function) {
  using Result = std::invoke_result_t<F>;
  if constexpr (!std::is_reference_v<Result> && contains_tensors<Result>()) {
    Result result = std::invoke(std::forward<F>(function));
    if (output_dtype) {
      for_each_tensor(
          result, [&](at::Tensor& tensor) { tensor = cast_low_precision(tensor, *output_dtype); });
    }
    return result;
  } else {
    constexpr bool kHasNoTensors = std::is_scalar_v<Result> || std::is_void_v<Result>;
    TORCH_CHECK(kHasNoTensors || !output_dtype, "output_dtype is ", *output_dtype,
                ", and the callable returns ",
                std::is_reference_v<Result> ? "a reference" : "a type that lists no tensors",
                "; return tensors by value (also in containers, pairs, tuples and optionals), add "
                "`auto tensors() { return std::tie(logits, loss); }` to your struct, or leave "
                "output_dtype unset and call .to(torch::kFloat)");
    return std::invoke(std::forward<F>(function));
  }
}

/// A callable that calls `wrapper(function, args...)`. Forwards arguments and result perfectly.
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

/// Calls a function while a `Guard(state)` exists. Casts the result if the state has an
/// output_dtype.
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

/// Returns a callable that runs `function` while a `Guard(state)` exists.
template <class Guard, class F, class State>
auto wrap_in_guard(State state, F&& function) {
  using Wrapper = GuardedCall<Guard, State>;
  return WrappedFunction<std::decay_t<F>, Wrapper>(std::forward<F>(function), {std::move(state)});
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
