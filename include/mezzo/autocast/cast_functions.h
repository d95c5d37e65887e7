/// \file
/// Plain functions that take part in autocast, as with Python's `custom_fwd(cast_inputs=...)` and
/// Apex's `half_function`, `float_function` and `promote_function`.
///
///     auto loss = mezzo::float_function(my_loss);
///     auto mix = mezzo::half_function([&](torch::Tensor x) { return fused_kernel(x, table); });
///
/// In a region of autocast the returned callable casts the tensors among its arguments and runs the
/// function with autocast off, so that nothing inside is cast again; elsewhere it just calls. It
/// forwards all arguments, also those without tensors, perfectly, and returns what the function
/// returns.
///
/// A tensor is cast if it is floating, not double, and on a device whose autocast is enabled in the
/// calling thread: bare, in std::optional, std::vector, std::array, c10::ArrayRef, std::pair,
/// std::tuple, in maps' values, in these within one another, and in structs that list their tensors
/// with a member `tensors()`. An argument that holds tensors is passed on as a temporary copy with
/// cast tensors, so the function cannot hand results back through it. Casts are differentiable.
///
/// A lvalue function is copied; pass std::ref(function) to keep a reference. An op that is
/// registered with TORCH_LIBRARY needs none of this: name it in an OpPolicy.
#pragma once

#include <mezzo/autocast/detail/eligible.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool autocast_is_on() {
  return std::any_of(kPolicyDevices.begin(), kPolicyDevices.end(),
                     [](auto device) { return at::autocast::is_autocast_enabled(device); });
}

/// The dtype of every cast tensor: fixed, the region's, or the widest among the arguments. `plan`
/// looks at all arguments before any of them is cast.
struct ToDtype {
  at::ScalarType dtype;

  template <class... Args>
  ToDtype plan(const Args&...) const {
    return *this;
  }
  at::ScalarType operator()(c10::DeviceType) const { return dtype; }
};

struct ToRegionDtype {
  template <class... Args>
  ToRegionDtype plan(const Args&...) const {
    return {};
  }
  at::ScalarType operator()(c10::DeviceType device) const {
    return at::autocast::get_autocast_dtype(device);
  }
};

struct ToWidest {
  template <class... Args>
  ToDtype plan(const Args&... args) const {
    std::optional<at::ScalarType> widest;
    const auto look = [&widest](const at::Tensor& tensor) {
      if (casting_device(tensor).has_value()) {
        widest = wider(widest.value_or(tensor.scalar_type()), tensor.scalar_type());
      }
    };
    (for_each_tensor(args, look), ...);
    return {widest.value_or(at::kFloat)};
  }
};

/// Calls `F` on cast arguments with autocast off, and plainly where autocast is off.
template <class F, class Target>
class CastingFunction {
 public:
  template <class G>
  CastingFunction(G&& function, Target target)
      : function_(std::forward<G>(function)), target_(target) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return call(function_, std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return call(function_, std::forward<Args>(args)...);
  }

 private:
  template <class Function, class... Args>
  decltype(auto) call(Function& function, Args&&... args) const {
    if (!autocast_is_on()) {
      return std::invoke(function, std::forward<Args>(args)...);
    }
    const auto dtype_on = target_.plan(std::as_const(args)...);
    const auto cast = [&dtype_on](const at::Tensor& tensor) {
      const auto device = casting_device(tensor);
      return device.has_value() ? at::autocast::cached_cast(dtype_on(*device), tensor, *device)
                                : tensor;
    };
    // Braces, so that the casts happen before autocast is switched off.
    std::tuple<decltype(map_tensors(std::forward<Args>(args), cast))...> arguments{
        map_tensors(std::forward<Args>(args), cast)...};
    const AutocastOff off;
    return std::apply(
        [&function](auto&&... each) -> decltype(auto) {
          return std::invoke(function, std::forward<decltype(each)>(each)...);
        },
        std::move(arguments));
  }

  F function_;
  Target target_;
};

}  // namespace detail

/// Returns `function` as a callable that casts its inputs to `dtype`. In PyTorch:
/// `custom_fwd(cast_inputs=dtype)`.
/// \throws c10::Error unless dtype is float32, half or bfloat16
template <class F>
[[nodiscard]] auto cast_inputs(at::ScalarType dtype, F&& function) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
              "cast_inputs: dtype is ", dtype,
              "; it should be torch::kFloat, torch::kHalf or torch::kBFloat16");
  return detail::CastingFunction<std::decay_t<F>, detail::ToDtype>(std::forward<F>(function),
                                                                   {dtype});
}

/// Returns `function` as a callable that runs in float32, for functions that overflow or lose too
/// much. In Apex: `float_function`.
template <class F>
[[nodiscard]] auto float_function(F&& function) {
  return cast_inputs(at::kFloat, std::forward<F>(function));
}

/// Returns `function` as a callable that runs in the dtype of the calling region. In Apex:
/// `half_function`.
template <class F>
[[nodiscard]] auto half_function(F&& function) {
  return detail::CastingFunction<std::decay_t<F>, detail::ToRegionDtype>(std::forward<F>(function),
                                                                         {});
}

/// Returns `function` as a callable that runs in the widest dtype among the tensors that it is
/// given; half and bfloat16 meet in float32. In Apex: `promote_function`.
template <class F>
[[nodiscard]] auto promote_function(F&& function) {
  return detail::CastingFunction<std::decay_t<F>, detail::ToWidest>(std::forward<F>(function), {});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
