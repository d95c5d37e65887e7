/// \file
/// The callable behind cast_functions.h.
#pragma once

#include <mezzo/autocast/detail/eligible.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
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
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}));
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
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
