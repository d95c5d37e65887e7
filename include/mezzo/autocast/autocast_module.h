/// \file
/// AutocastModule: a module whose forward pass runs under autocast in any thread. Not in
/// autocast_guard.h because libtorch's modules take twelve seconds to compile.
#pragma once

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/detail/autocast_region.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <ostream>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class M>
auto deduce_module_impl() {
  static_assert(ModelHandle<M> || ModuleVariable<M>,
                "mezzo::AutocastModule<M>: M is a module holder such as torch::nn::Linear, a "
                "std::shared_ptr to a module, or a class derived from torch::nn::Module");
  return std::type_identity<typename decltype(module_pointer(std::declval<M&>()))::element_type>();
}
/// LinearImpl for Linear, std::shared_ptr<LinearImpl> and LinearImpl itself.
template <class M>
using ModuleImplOf = typename decltype(deduce_module_impl<M>())::type;

/// Has a `forward` with this signature, which calls `Derived::call`.
template <class Derived, class Result, class... Args>
struct ForwardWithSignature {
  Result forward(Args... args) {
    return static_cast<Derived&>(*this).call(std::forward<Args>(args)...);
  }
};
template <class Derived, class Result, class Class, class... Args>
ForwardWithSignature<Derived, Result, Args...> forward_with_signature(Result (Class::*)(Args...));
template <class Derived, class Result, class Class, class... Args>
ForwardWithSignature<Derived, Result, Args...> forward_with_signature(Result (Class::*)(Args...)
                                                                          const);

/// Adds a `forward` that calls `Derived::call`. Its signature is that of `Impl::forward`, which
/// torch::nn::Sequential deduces from `&Derived::forward`; it is a template if `Impl::forward` is
/// one or is overloaded.
template <class Derived, class Impl>
struct ForwardWithSignatureOf {
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return static_cast<Derived&>(*this).call(std::forward<Args>(args)...);
  }
};
template <class Derived, class Impl>
requires requires { forward_with_signature<Derived>(&Impl::forward); }
struct ForwardWithSignatureOf<Derived, Impl>
    : decltype(forward_with_signature<Derived>(&Impl::forward)) {};

}  // namespace detail

/// The module in an AutocastModule: wraps an `Impl`, with the same parameters, buffers, children
/// and state-dict names, and a `forward` of the same parameters. Use AutocastModule.
template <class Impl>
class AutocastModuleImpl : public torch::nn::Module,
                           public detail::ForwardWithSignatureOf<AutocastModuleImpl<Impl>, Impl> {
 public:
  /// Wraps `module`, whose `forward` runs in regions of `options`.
  AutocastModuleImpl(std::shared_ptr<Impl> module, const AutocastOptions& options)
      : module_(std::move(module)), options_(detail::validated_options(options)) {
    TORCH_CHECK(
        module_ != nullptr,
        "AutocastModule: module is an empty holder or a null pointer; construct the module first");
    // Before children are registered: each keeps its mode.
    torch::nn::Module::train(module_->is_training());
    register_members_of_module();
  }

  /// Returns `module()->forward(args...)` under the options.
  template <class... Args>
  decltype(auto) call(Args&&... args) {
    const detail::AutocastRegion region(options_);
    return detail::call_with_output_dtype(options_.output_dtype, [&]() -> decltype(auto) {
      return module_->forward(std::forward<Args>(args)...);
    });
  }

  /// Returns the wrapped module.
  const std::shared_ptr<Impl>& module() const noexcept { return module_; }

  /// Returns a copy of the wrapped module, wrapped with the same options.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    return std::make_shared<AutocastModuleImpl>(
        std::dynamic_pointer_cast<Impl>(module_->clone(device)), options_);
  }
  /// Sets training or evaluation mode.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    module_->train(on);  // last: it may keep some children in eval mode
  }
  /// Moves and casts the wrapped module.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override {
    module_->to(device, dtype, non_blocking);
  }
  /// Casts the wrapped module.
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    module_->to(dtype, non_blocking);
  }
  /// Moves the wrapped module.
  void to(torch::Device device, bool non_blocking = false) override {
    module_->to(device, non_blocking);
  }
  /// Returns whether torch::save saves the wrapped module.
  bool is_serializable() const override { return module_->is_serializable(); }
  /// Saves the wrapped module under its names.
  void save(torch::serialize::OutputArchive& archive) const override { module_->save(archive); }
  /// Loads a state saved by this or by the wrapped module.
  void load(torch::serialize::InputArchive& archive) override { module_->load(archive); }
  /// Prints "mezzo::AutocastModule(...)" around the wrapped module.
  void pretty_print(std::ostream& stream) const override {
    stream << "mezzo::AutocastModule(";
    module_->pretty_print(stream);
    stream << ")";
  }

 private:
  // Called by a parent's clone() with the child that the copy's reset() created.
  void clone_(torch::nn::Module& other, const std::optional<torch::Device>& device) override {
    const auto copy = std::dynamic_pointer_cast<AutocastModuleImpl>(other.clone(device));
    TORCH_CHECK(
        copy != nullptr,
        "clone: the child is an AutocastModule in the copy and not in the original; register "
        "the same modules in reset()");
    *this = *copy;
  }

  // Both modules have the same tensors and children under the same names, so in-place changes
  // through one are visible in the other.
  void register_members_of_module() {
    for (const auto& item : module_->named_parameters(/*recurse=*/false)) {
      register_parameter(item.key(), item.value(), item.value().requires_grad());
    }
    for (const auto& item : module_->named_buffers(/*recurse=*/false)) {
      register_buffer(item.key(), item.value());
    }
    for (const auto& item : module_->named_children()) {
      register_module(item.key(), item.value());
    }
  }

  std::shared_ptr<Impl> module_;
  AutocastOptions options_;  ///< validated
};

/// A module whose forward runs under autocast in any thread, also in the threads of
/// torch::nn::parallel::parallel_apply and data_parallel, where a guard around the call has no
/// effect.
///
///     mezzo::AutocastModule net(Net(), {.device_type = torch::kCUDA});
///     torch::Tensor out = net(images);  // Net's arguments and result
///     torch::nn::Sequential layers(mezzo::AutocastModule(conv, options), ReLU());
///
/// `M` is a module holder (torch::nn::Linear, any TORCH_MODULE), a std::shared_ptr to a module, or
/// a module class. The module is shared, not copied: parameters(), state dict, to(), train(),
/// torch::save and torch::load act on M's tensors under M's names, without a prefix, so checkpoints
/// load with and without the wrapper; clone() returns a wrapped copy. Two differences: tensors that
/// M registers after it was wrapped are not listed, and apply(f) is called with this class instead
/// of M (and with M's children): initialize M first.
/// \throws c10::Error for an empty holder and for options that AutocastGuard throws for
template <class M>
class AutocastModule : public torch::nn::ModuleHolder<AutocastModuleImpl<detail::ModuleImplOf<M>>> {
  using Impl = detail::ModuleImplOf<M>;
  using Holder = torch::nn::ModuleHolder<AutocastModuleImpl<Impl>>;

 public:
  /// Wraps the module of a holder.
  AutocastModule(const torch::nn::ModuleHolder<Impl>& module, const AutocastOptions& options)
      : AutocastModule(module.is_empty() ? nullptr : module.ptr(), options) {}
  /// Wraps the module of a pointer.
  AutocastModule(std::shared_ptr<Impl> module, const AutocastOptions& options)
      : Holder(std::make_shared<AutocastModuleImpl<Impl>>(std::move(module), options)) {}
  /// Holds the result of `register_module("fc", mezzo::AutocastModule(fc, options))`.
  AutocastModule(std::shared_ptr<AutocastModuleImpl<Impl>> module) : Holder(std::move(module)) {}
  /// Makes an empty holder, as `torch::nn::Linear(nullptr)` does.
  AutocastModule(std::nullptr_t) : Holder(nullptr) {}
  /// Deleted: pass options in braces.
  AutocastModule(const auto&, detail::DeviceOrType auto) = delete;  // {.device_type = torch::kCUDA}

  /// Returns the result of M's forward under the options. Keeps default arguments.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->call(std::forward<Args>(args)...);
  }
};

/// Deduces the class of the module.
template <class M>
AutocastModule(M, AutocastOptions) -> AutocastModule<M>;
template <class M>
AutocastModule(M, detail::DeviceOrType auto) -> AutocastModule<M>;

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
