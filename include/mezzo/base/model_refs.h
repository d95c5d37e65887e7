/// \file
/// Function arguments that take one model or optimizer, several in braces, or a range of them.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class M>
concept ModuleHolderLike = requires(const M& holder) {
  typename M::ContainedType;
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
  { holder.is_empty() } -> std::convertible_to<bool>;
};

/// A module holder such as torch::nn::Linear, or a std::shared_ptr to a module.
template <class M>
concept ModelHandle =
    ModuleHolderLike<M> || std::convertible_to<const M&, std::shared_ptr<torch::nn::Module>>;

/// A module that is a variable itself, as in pytorch/examples: `Net model;`. A const module does
/// not qualify, since forward is not const.
template <class M>
concept ModuleVariable = std::derived_from<M, torch::nn::Module> && !std::is_const_v<M>;

template <ModelHandle M>
auto module_pointer(const M& model) {
  if constexpr (ModuleHolderLike<M>) {
    using Pointer = std::decay_t<decltype(model.ptr())>;
    return model.is_empty() ? Pointer() : Pointer(model.ptr());
  } else {
    return model;
  }
}

/// Returns a non-owning shared_ptr; the caller keeps the module alive.
template <ModuleVariable M>
std::shared_ptr<M> module_pointer(M& model) {
  return {std::shared_ptr<void>(), &model};
}

/// One model of a list.
struct ModelRef {
  template <ModelHandle M>
  ModelRef(const M& model) : module(module_pointer(model)) {}
  template <ModuleVariable M>
  ModelRef(M& model) : module(module_pointer(model)) {}
  std::shared_ptr<torch::nn::Module> module;
};

}  // namespace detail

/// `model`, `{generator, discriminator}`, or a range of models. A model is a module holder, a
/// shared_ptr to a module, or a module itself. A module passed by itself is
/// referenced, not copied: it must stay at its address while the list is in use.
class ModelRefs {
 public:
  /// Lists one model: the ownership of a holder or shared_ptr is shared; a module must stay at its
  /// address while the list is in use. \throws c10::Error for an empty holder or pointer
  template <std::convertible_to<detail::ModelRef> M>  // which no ModelRefs is
  // NOLINTNEXTLINE(bugprone-forwarding-reference-overload)
  ModelRefs(M&& model) : ModelRefs({detail::ModelRef(std::forward<M>(model))}) {}
  /// Lists several models. \throws c10::Error for none, an empty one, or the same one twice
  ModelRefs(std::initializer_list<detail::ModelRef> models) {
    for (const detail::ModelRef& model : models) modules_.push_back(model.module);
    check();
  }
  /// Lists the models of a range. \throws c10::Error for none, an empty one, or the same one twice
  template <std::ranges::input_range Models>
  requires(!detail::ModelHandle<Models> && !std::derived_from<Models, torch::nn::Module>) &&
      detail::ModelHandle<std::ranges::range_value_t<Models>> ModelRefs(const Models& models) {
    for (const auto& model : models) modules_.push_back(detail::module_pointer(model));
    check();
  }

  /// Returns the modules, in the order in which they were given.
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const noexcept {
    return modules_;
  }

 private:
  void check() const {
    TORCH_CHECK(!modules_.empty(), "models: none was given; give a model, or several in braces");
    for (std::size_t i = 0; i < modules_.size(); ++i) {
      TORCH_CHECK(modules_[i] != nullptr, "model ", i,
                  " is empty; construct the module before its holder is passed");
      for (std::size_t other = 0; other < i; ++other) {
        TORCH_CHECK(modules_[i] != modules_[other], "model ", i, " (", modules_[i]->name(),
                    ") is model ", other, " again; give each model once");
      }
    }
  }

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

namespace detail {

template <class P>
concept OptimizerPointer = requires(const P& pointer) {
  { *pointer } -> std::convertible_to<torch::optim::Optimizer&>;
  { pointer != nullptr } -> std::convertible_to<bool>;
};

}  // namespace detail

/// `optimizer`, `{first, second}`, `{}` for none, or a range of pointers to optimizers.
class OptimizerRefs {
 public:
  OptimizerRefs() = default;
  /// Lists one optimizer, which must outlive the list.
  OptimizerRefs(torch::optim::Optimizer& optimizer) : optimizers_{&optimizer} {}
  /// Lists several optimizers, or none. \throws c10::Error for the same one twice
  OptimizerRefs(std::initializer_list<std::reference_wrapper<torch::optim::Optimizer>> optimizers) {
    for (torch::optim::Optimizer& listed : optimizers) optimizers_.push_back(&listed);
    check();
  }
  /// Lists the optimizers that a range of pointers points to.
  /// \throws c10::Error for a null pointer, or the same optimizer twice
  template <std::ranges::input_range Optimizers>
  requires detail::OptimizerPointer<std::ranges::range_value_t<Optimizers>> OptimizerRefs(
      const Optimizers& optimizers) {
    for (const auto& pointer : optimizers) {
      TORCH_CHECK(pointer != nullptr, "optimizer ", optimizers_.size(),
                  " is a null pointer; make the optimizer before its pointer is passed");
      optimizers_.push_back(&*pointer);
    }
    check();
  }

  /// Returns the optimizers, in the order in which they were given.
  const std::vector<torch::optim::Optimizer*>& optimizers() const noexcept { return optimizers_; }

 private:
  void check() const {
    for (std::size_t i = 0; i < optimizers_.size(); ++i) {
      for (std::size_t other = 0; other < i; ++other) {
        TORCH_CHECK(optimizers_[i] != optimizers_[other], "optimizer ", i, " is optimizer ", other,
                    " again; give each optimizer once");
      }
    }
  }

  std::vector<torch::optim::Optimizer*> optimizers_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
