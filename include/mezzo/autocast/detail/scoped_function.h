/// \file
/// A callable that enters something, a region or another thread's state, around every call.
#pragma once

#include <mezzo/base/version.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Calls `F` exactly as a plain `F` would be called: same overloads, arguments, value category,
/// result and noexcept. A `Scope` is built from `State` before the call and destroyed after it.
/// `Scope`'s constructor must not throw.
template <class F, class Scope, class State>
class ScopedFunction {
 public:
  template <class G>
  ScopedFunction(G&& function, State state)
      : function_(std::forward<G>(function)), state_(std::move(state)) {}

  template <class... Args>
  requires std::invocable<F&, Args...> std::invoke_result_t<F&, Args...>
  operator()(Args&&... args) & noexcept(std::is_nothrow_invocable_v<F&, Args...>) {
    const Scope scope(state_);
    return std::invoke(function_, std::forward<Args>(args)...);
  }

  template <class... Args>
  requires std::invocable<const F&, Args...> std::invoke_result_t<const F&, Args...>
  operator()(Args&&... args) const& noexcept(std::is_nothrow_invocable_v<const F&, Args...>) {
    const Scope scope(state_);
    return std::invoke(function_, std::forward<Args>(args)...);
  }

  template <class... Args>
  requires std::invocable<F, Args...> std::invoke_result_t<F, Args...>
  operator()(Args&&... args) && noexcept(std::is_nothrow_invocable_v<F, Args...>) {
    const Scope scope(state_);
    return std::invoke(std::move(function_), std::forward<Args>(args)...);
  }

 private:
  F function_;
  State state_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
