/// \file
/// AutocastAutogradFunction: autocast for custom autograd functions (torch.amp.custom_fwd and
/// custom_bwd). Includes torch/csrc/autograd/custom_function.h, which takes nine seconds to
/// compile.
#pragma once

#include <mezzo/autocast/autocast_state.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An AutocastState that can be stored in `ctx->saved_data`.
struct AutocastStateHolder : torch::CustomClassHolder {
  AutocastState state = AutocastState::current();
};

inline constexpr const char* kAutocastStateKey = "mezzo.autocast";

template <class T, at::ScalarType CastInputs>
struct AutocastAutogradFunctionImpl
    : torch::autograd::Function<AutocastAutogradFunctionImpl<T, CastInputs>> {
  using Context = torch::autograd::AutogradContext;

  template <class... Args>
  static auto forward(Context* ctx, Args&&... args) {
    if constexpr (CastInputs == at::ScalarType::Undefined) {
      save_state(ctx);
      return T::forward(ctx, std::forward<Args>(args)...);
    } else {
      const auto convert = [](const at::Tensor& tensor) {
        return eligible_autocast_device(tensor).has_value() ? tensor.to(CastInputs) : tensor;
      };
      return forward_with_autocast_disabled(ctx, map_tensors(std::forward<Args>(args), convert)...);
    }
  }

  static torch::autograd::variable_list backward(Context* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->saved_data.at(kAutocastStateKey).toCapsule();
    const AutocastStateGuard guard(static_cast<const AutocastStateHolder&>(*saved).state);
    return T::backward(ctx, std::move(gradients));
  }

 private:
  template <class... Args>
  static auto forward_with_autocast_disabled(Context* ctx, Args&&... args) {
    const AutocastDisabledGuard disabled;
    save_state(ctx);
    return T::forward(ctx, std::forward<Args>(args)...);
  }

  static void save_state(Context* ctx) {
    ctx->saved_data[kAutocastStateKey] =
        at::IValue::make_capsule(c10::make_intrusive<AutocastStateHolder>());
  }
};

}  // namespace detail

/// Base of autograd functions whose backward runs under the autocast state of their forward:
///
///     struct Multiply : mezzo::AutocastAutogradFunction<Multiply> {
///       static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor a,
///                                    torch::Tensor b);
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
///                                                      torch::autograd::variable_list gradients);
///     };
///     auto c = Multiply::apply(a, b);
///
/// `forward` and `backward` are declared as for torch::autograd::Function. An existing function is
/// wrapped where it is used: `mezzo::AutocastAutogradFunction<TheirFunction>::apply(x)`.
///
/// Without `CastInputs` (custom_fwd without cast_inputs) `forward` runs under the caller's state,
/// and `backward` under the same state in any thread and region: a bfloat16 forward has a bfloat16
/// backward.
///
/// With `CastInputs`, such as `AutocastAutogradFunction<Multiply, torch::kFloat>`, for kernels of
/// one dtype (custom_fwd(cast_inputs=...)): floating-point arguments, except double, on a device
/// whose autocast is enabled are cast, also in optionals, containers, tuples and structs with a
/// member `tensors()`, and `forward` and `backward` run with autocast disabled. Where autocast is
/// disabled nothing is cast. Gradients have the dtype of the caller's argument.
///
/// As with torch::autograd::Function, autograd tracks arguments that are a Tensor, an optional
/// Tensor or a TensorList, and not those in other containers. `ctx->saved_data` has one key of
/// mezzo, "mezzo.autocast". No host sync. Thread-safe.
template <class T, at::ScalarType CastInputs = at::ScalarType::Undefined>
struct AutocastAutogradFunction {
  static_assert(
      CastInputs == at::ScalarType::Undefined || CastInputs == at::ScalarType::Half ||
          CastInputs == at::ScalarType::BFloat16 || CastInputs == at::ScalarType::Float ||
          CastInputs == at::ScalarType::Double,
      "mezzo::AutocastAutogradFunction: CastInputs is torch::kHalf, kBFloat16, kFloat or kDouble");

  /// Runs `T::forward` and records `T::backward`. Returns what `T::forward` returns.
  template <class... Args>
  static auto apply(Args&&... args) {
    return detail::AutocastAutogradFunctionImpl<T, CastInputs>::apply(std::forward<Args>(args)...);
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
