/// \file
/// The callables that mezzo returns, and AutocastSetting::output: the tensors of bfloat16 and half
/// in a result, as another dtype.
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
inline at::Tensor raised(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_low_precision(tensor) ? tensor.to(dtype) : tensor;
}

/// Whether the tensors of a `T` are found.
template <class T>
inline constexpr bool kIsRaised = !std::is_reference_v<T> && contains_tensors<T>();

/// Calls `function()` and returns its result, with tensors of the dtype that `output` asks for.
/// \throws c10::Error if `output` is set and nobody knows the tensors of the result
template <class F>
decltype(auto) with_output(const std::optional<at::ScalarType>& output, F&& function) {
  using Result = std::invoke_result_t<F>;
  if constexpr (kIsRaised<Result>) {
    Result result = std::forward<F>(function)();
    if (output) {
      for_each_tensor(result, [&](at::Tensor& tensor) { tensor = raised(tensor, *output); });
    }
    return result;
  } else {
    constexpr bool kHoldsNoTensor = std::is_scalar_v<Result> || std::is_void_v<Result>;
    TORCH_CHECK(kHoldsNoTensor || !output, "output: the AutocastSetting asks for results of ",
                *output, ", and this callable returns ",
                std::is_reference_v<Result> ? "a reference" : "a type that lists no tensors",
                "; return tensors by value (also in containers, pairs, tuples and optionals), give "
                "a struct of yours a member `auto tensors() { return std::tie(logits, loss); }`, "
                "or leave output out and call .to(torch::kFloat)");
    return std::forward<F>(function)();
  }
}

/// Holds a function, and calls `around(function, args...)` where it is called itself. All arguments
/// and the result are forwarded perfectly.
template <class F, class Around>
class WrappedFunction {
 public:
  template <class G>
  WrappedFunction(G&& function, Around around)
      : function_(std::forward<G>(function)), around_(std::move(around)) {}

  template <class... Args>
  requires std::invocable<const Around&, F&, Args...>
  decltype(auto) operator()(Args&&... args) {
    return around_(function_, std::forward<Args>(args)...);
  }
  template <class... Args>
  requires std::invocable<const Around&, const F&, Args...>
  decltype(auto) operator()(Args&&... args) const {
    return around_(function_, std::forward<Args>(args)...);
  }

 private:
  F function_;
  Around around_;
};

/// Calls a function in a `Scope` that is made of `state`, and casts its results as the state's
/// `output` says, if it has one.
template <class Scope, class State>
struct InScope {
  State state;

  template <class F, class... Args>
  requires std::invocable<F&, Args...>
  decltype(auto) operator()(F& function, Args&&... args) const {
    const Scope scope(state);
    const auto call = [&]() -> decltype(auto) {
      return std::invoke(function, std::forward<Args>(args)...);
    };
    if constexpr (requires { state.output; }) {
      return with_output(state.output, call);
    } else {
      return call();
    }
  }
};

/// Returns `function` as a callable that runs in scopes of `state`.
template <class Scope, class F, class State>
auto in_scopes_of(State state, F&& function) {
  using Around = InScope<Scope, State>;
  return WrappedFunction<std::decay_t<F>, Around>(std::forward<F>(function), {std::move(state)});
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
