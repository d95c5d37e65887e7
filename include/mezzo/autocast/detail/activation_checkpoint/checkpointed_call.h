/// \file
/// A function with its arguments, kept so that it can be called again.
#pragma once

#include <ATen/core/Tensor.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What backward needs to know of a call: nothing of its types.
class CheckpointedCall {
 public:
  CheckpointedCall() = default;
  virtual ~CheckpointedCall() = default;
  CheckpointedCall(const CheckpointedCall&) = delete;
  CheckpointedCall& operator=(const CheckpointedCall&) = delete;

  /// Calls the function and returns the tensors in its result.
  virtual std::vector<at::Tensor> result_tensors() = 0;
};

template <class T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// A module holder or a pointer to a module: Sequential, for one, has no call operator that works.
template <class F, class... Args>
concept PointsToModule = requires(F& function, Args&... args) {
  function->forward(args...);
};

template <class F, class... Args>
concept CallableTwice = PointsToModule<F, Args...> || std::is_invocable_v<F&, Args&...>;

template <class F, class... Args>
requires CallableTwice<F, Args...>
decltype(auto) call_stored(F& function, Args&... args) {
  if constexpr (PointsToModule<F, Args...>) {
    return function->forward(args...);
  } else {
    return std::invoke(function, args...);
  }
}

/// The result of a call as a value; void where there is no such call, for others to complain about.
template <class F, class... Args>
struct ValueResult {
  using Type = void;
};
template <class F, class... Args>
requires CallableTwice<F, Args...>
struct ValueResult<F, Args...> {
  using Type = std::decay_t<decltype(call_stored(std::declval<F&>(), std::declval<Args&>()...))>;
};

/// The arguments are stored as std::bind_front stores them, but for a TensorList, which would
/// dangle.
template <class F, class... Args>
class StoredCall final : public CheckpointedCall {
 public:
  static constexpr bool kCallable = CallableTwice<F, Args...>;
  using Result = typename ValueResult<F, Args...>::Type;

  template <class G, class... GivenArgs>
  explicit StoredCall(G&& function, GivenArgs&&... args)
      : function_(std::forward<G>(function)), args_(owned(std::forward<GivenArgs>(args))...) {}

  /// Calls the function with the stored arguments as lvalues, which leaves them for the next call.
  Result operator()() {
    return std::apply(
        [this](Args&... args) -> Result { return detail::call_stored(function_, args...); }, args_);
  }

  std::vector<at::Tensor> result_tensors() override {
    auto result = (*this)();
    return tensors_in(result);
  }

  std::vector<at::Tensor> argument_tensors() const { return tensors_in(args_); }

 private:
  F function_;
  std::tuple<Args...> args_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
