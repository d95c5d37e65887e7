/// \file
/// AutocastAutogradFunction: autocast for custom autograd functions, as torch.amp.custom_fwd and
/// custom_bwd in Python.
///
/// Brings in torch/csrc/autograd/custom_function.h, about nine seconds of compile time.
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

/// An AutocastState in the form that `ctx->saved_data` takes.
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
    const AutocastStateGuard scope(static_cast<const AutocastStateHolder&>(*saved).state);
    return T::backward(ctx, std::move(gradients));
  }

 private:
  template <class... Args>
  static auto forward_with_autocast_disabled(Context* ctx, Args&&... args) {
    const AutocastDisabledGuard off;
    save_state(ctx);
    return T::forward(ctx, std::forward<Args>(args)...);
  }

  static void save_state(Context* ctx) {
    ctx->saved_data[kAutocastStateKey] =
        at::IValue::make_capsule(c10::make_intrusive<AutocastStateHolder>());
  }
};

}  // namespace detail

/// A base for autograd functions whose backward runs under the autocast state of its forward:
///
///     struct Multiply : mezzo::AutocastAutogradFunction<Multiply> {
///       static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor a,
///                                    torch::Tensor b);
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
///                                                      torch::autograd::variable_list gradients);
///     };
///     auto c = Multiply::apply(a, b);
///
/// `forward` and `backward` are those of torch::autograd::Function, to the letter. A function
/// written for it needs no change, or is wrapped where it is used:
/// `mezzo::AutocastAutogradFunction<TheirFunction>::apply(x)`.
///
/// Without `CastInputs`, `forward` runs under the caller's state, and `backward` under the same
/// one, wherever and under whatever state the backward pass runs: a bfloat16 forward has a bfloat16
/// backward. (As custom_fwd without cast_inputs.)
///
/// With `CastInputs`, say `AutocastAutogradFunction<Multiply, torch::kFloat>`, for kernels that
/// need one dtype: where autocast is enabled for a tensor's device type, floating-point arguments
/// on that device are converted, all but double, and `forward` and `backward` run with autocast
/// off. Tensors in optionals, containers, tuples and structs with a member `tensors()` are
/// converted too. Where autocast is off nothing is converted. (As custom_fwd(cast_inputs=...).)
/// Gradients come back in the dtype of the argument that the caller gave; libtorch sees to it.
///
/// As with torch::autograd::Function, autograd follows arguments that are a Tensor, an optional
/// Tensor or a TensorList, and not those inside other containers. `ctx->saved_data` holds one key
/// of mezzo's, "mezzo.autocast". No host sync. Any thread.
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
