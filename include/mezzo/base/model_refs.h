/// \file
/// ModelRefs: a function argument of one model, several in braces, or a range of models.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
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

/// A module by itself, as in pytorch/examples: `Net model;`. Not const, since forward is not const.
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

/// Returns a non-owning shared_ptr.
template <ModuleVariable M>
std::shared_ptr<M> module_pointer(M& model) {
  return {std::shared_ptr<void>(), &model};
}

/// Converts a model to a pointer to its module.
struct ModelRef {
  template <ModelHandle M>
  ModelRef(const M& model) : module(module_pointer(model)) {}
  template <ModuleVariable M>
  ModelRef(M& model) : module(module_pointer(model)) {}
  std::shared_ptr<torch::nn::Module> module;
};

}  // namespace detail

/// `model`, `{generator, discriminator}`, or a range of models. A model is a module holder, a
/// shared_ptr to a module, or a module. A module is referenced, not copied: it must outlive this
/// object.
class ModelRefs {
 public:
  /// References one model; shares the ownership of a holder or shared_ptr.
  /// \throws c10::Error for an empty holder or pointer
  template <std::convertible_to<detail::ModelRef> M>  // not ModelRefs itself
  // NOLINTNEXTLINE(bugprone-forwarding-reference-overload)
  ModelRefs(M&& model) : ModelRefs({detail::ModelRef(std::forward<M>(model))}) {}
  /// References several models. \throws c10::Error for none, an empty one, or a duplicate
  ModelRefs(std::initializer_list<detail::ModelRef> models) {
    for (const detail::ModelRef& model : models) modules_.push_back(model.module);
    check();
  }
  /// References the models of a range. \throws c10::Error as the initializer list
  template <std::ranges::input_range Models>
  requires(!detail::ModelHandle<Models> && !std::derived_from<Models, torch::nn::Module>) &&
      detail::ModelHandle<std::ranges::range_value_t<Models>> ModelRefs(const Models& models) {
    for (const auto& model : models) modules_.push_back(detail::module_pointer(model));
    check();
  }

  /// Returns the modules in order.
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const noexcept {
    return modules_;
  }

 private:
  void check() const {
    TORCH_CHECK(!modules_.empty(), "models: the list is empty; pass a model, or several in braces");
    for (std::size_t i = 0; i < modules_.size(); ++i) {
      TORCH_CHECK(modules_[i] != nullptr, "model ", i,
                  " is empty; construct the module before passing its holder");
      for (std::size_t other = 0; other < i; ++other) {
        TORCH_CHECK(modules_[i] != modules_[other], "model ", i, " (", modules_[i]->name(),
                    ") is the same module as model ", other, "; pass each model once");
      }
    }
  }

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
