/// \file
/// Calls a model, and casts the tensors of its arguments and result.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The dtypes that a level casts a call's arguments and result to.
struct CastDtypes {
  std::optional<at::ScalarType> input;
  std::optional<at::ScalarType> output;
};

/// Returns an argument for `forward`: a cast copy if it can hold tensors, otherwise the argument.
template <class Argument>
decltype(auto) forward_argument(std::optional<at::ScalarType> dtype, Argument&& argument) {
  if constexpr (carries_tensors<Argument>()) {
    OwningType<Argument> value = owned(std::forward<Argument>(argument));
    if (dtype) return cast_tensors(std::move(value), *dtype);
    return value;
  } else {
    return std::forward<Argument>(argument);
  }
}

/// Calls `run`, and returns its result with the tensors cast.
template <class Run>
decltype(auto) cast_result(std::optional<at::ScalarType> dtype, const Run& run) {
  using Result = std::invoke_result_t<const Run&>;
  if constexpr (std::is_void_v<Result>) {
    run();
  } else if constexpr (carries_tensors<Result>()) {
    OwningType<Result> value = owned(run());
    if (dtype) return cast_tensors(std::move(value), *dtype);
    return value;
  } else {
    return run();
  }
}

/// Calls `module.forward(args...)`, and casts the tensors of its arguments and result.
template <class Module, class... Args>
decltype(auto) run_cast(Module& module, const CastDtypes& dtypes, Args&&... args) {
  return cast_result(dtypes.output, [&]() -> decltype(auto) {
    return module.forward(forward_argument(dtypes.input, std::forward<Args>(args))...);
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
