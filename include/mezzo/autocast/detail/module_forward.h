/// \file
/// From a module's type to its implementation class and to a forward with the very same signature.
#pragma once

#include <mezzo/base/version.h>

#include <torch/nn/module.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// LinearImpl for Linear, std::shared_ptr<LinearImpl> and LinearImpl itself.
template <class M>
struct ModuleImplOf {
  static_assert(std::is_base_of_v<torch::nn::Module, M>,
                "mezzo::AutocastModule<M>: M is a module holder such as torch::nn::Linear, a "
                "std::shared_ptr to a module, or a class derived from torch::nn::Module");
  using type = M;
};
template <class M>
requires requires { typename M::ContainedType; }
struct ModuleImplOf<M> {
  using type = typename M::ContainedType;
};
template <class Impl>
struct ModuleImplOf<std::shared_ptr<Impl>> {
  using type = Impl;
};
template <class M>
using module_impl_of = typename ModuleImplOf<M>::type;

template <class Impl>
concept HasOneForward = requires {
  &Impl::forward;
};

/// `decltype(&Impl::forward)`, or int where there is no such thing, so that one static_assert can
/// say so.
template <class Impl>
struct ForwardPointer {
  using type = int;
};
template <HasOneForward Impl>
struct ForwardPointer<Impl> {
  using type = decltype(&Impl::forward);
};

/// Gives `Derived` a non-template `forward` with the parameters and result of `Forward`, which goes
/// through `Derived::call`. A container such as torch::nn::Sequential reads them off
/// `&Derived::forward`.
template <class Derived, class Forward>
class ForwardLike {};

template <class Derived, class Result, class Class, class... Args>
class ForwardLike<Derived, Result (Class::*)(Args...)> {
 public:
  Result forward(Args... args) {
    return static_cast<Derived&>(*this).call(std::forward<Args>(args)...);
  }
};
template <class Derived, class Result, class Class, class... Args>
class ForwardLike<Derived, Result (Class::*)(Args...) const>
    : public ForwardLike<Derived, Result (Class::*)(Args...)> {};
template <class Derived, class Result, class Class, class... Args>
class ForwardLike<Derived, Result (Class::*)(Args...) noexcept>
    : public ForwardLike<Derived, Result (Class::*)(Args...)> {};
template <class Derived, class Result, class Class, class... Args>
class ForwardLike<Derived, Result (Class::*)(Args...) const noexcept>
    : public ForwardLike<Derived, Result (Class::*)(Args...)> {};

/// What FORWARD_HAS_DEFAULT_ARGS declares for a module is protected in it; this asks any module.
struct DefaultArguments : torch::nn::Module {
  static bool exist(torch::nn::Module& module) {
    return (module.*(&DefaultArguments::_forward_has_default_args))();
  }
  static unsigned int required(torch::nn::Module& module) {
    return (module.*(&DefaultArguments::_forward_num_required_args))();
  }
  static std::vector<torch::nn::AnyValue> complete(torch::nn::Module& module,
                                                   std::vector<torch::nn::AnyValue>&& arguments) {
    return (module.*(&DefaultArguments::_forward_populate_default_args))(std::move(arguments));
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
