#pragma once

#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>
#include <type_traits>
#include <utility>

// AutocastSetting::output: the tensors of bfloat16 and half in a result, as another dtype.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a tensor of bfloat16 or half as one of `dtype`, and any other as it is.
inline at::Tensor raised(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && is_low_precision(tensor) ? tensor.to(dtype) : tensor;
}

/// Whether the tensors of a `T` are found.
template <class T>
inline constexpr bool kIsRaised = !std::is_reference_v<T> && carries_tensors<T>();

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
