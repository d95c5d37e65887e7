/// \file
/// WrappedFunction, the class of the callables that mezzo returns.
#pragma once

#include <mezzo/base/version.h>

#include <concepts>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
