/// \file
/// The function that autograd sees in place of the user's: it sets autocast, converts, and calls
/// theirs.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/base/detail/for_each_tensor.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Switches autocast off for every device type: "off" is how libtorch calls an excluded key.
struct AutocastOff {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

/// Whether autocast would convert `tensor` in a thread where its keys `active` are on: floating
/// point on a device with autocast, double left alone.
inline bool is_converted(const at::Tensor& tensor, c10::DispatchKeySet active) {
  return tensor.defined() && tensor.is_floating_point() &&
         tensor.scalar_type() != at::ScalarType::Double && tensor.key_set().has_any(active);
}

/// The autocast keys, one a device type, that are on in this thread.
inline c10::DispatchKeySet active_autocast_keys() {
  return c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_;
}

/// An AutocastState in the form that `ctx->saved_data` takes.
struct SavedAutocastState : torch::CustomClassHolder {
  AutocastState state = AutocastState::capture();
};

inline constexpr const char* kSavedAutocastState = "mezzo.autocast";

template <class T, at::ScalarType CastInputs>
struct CastFunction : torch::autograd::Function<CastFunction<T, CastInputs>> {
  using Context = torch::autograd::AutogradContext;

  template <class... Args>
  static auto forward(Context* ctx, Args&&... args) {
    if constexpr (CastInputs == at::ScalarType::Undefined) {
      save_state(ctx);
      return T::forward(ctx, std::forward<Args>(args)...);
    } else {
      const auto active = active_autocast_keys();
      const AutocastOff off;
      save_state(ctx);
      const auto convert = [active](const at::Tensor& tensor) {
        return is_converted(tensor, active) ? tensor.to(CastInputs) : tensor;
      };
      return T::forward(ctx, map_tensors(std::forward<Args>(args), convert)...);
    }
  }

  static torch::autograd::variable_list backward(Context* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->saved_data.at(kSavedAutocastState).toCapsule();
    const AutocastState::Scope scope(static_cast<const SavedAutocastState&>(*saved).state);
    return T::backward(ctx, std::move(gradients));
  }

 private:
  static void save_state(Context* ctx) {
    ctx->saved_data[kSavedAutocastState] =
        at::IValue::make_capsule(c10::make_intrusive<SavedAutocastState>());
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
