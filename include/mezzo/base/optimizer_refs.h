/// \file
/// OptimizerRefs: a function argument of one optimizer, several in braces, or a range of pointers.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <ranges>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class P>
concept OptimizerPointer = requires(const P& pointer) {
  { *pointer } -> std::convertible_to<torch::optim::Optimizer&>;
  { pointer != nullptr } -> std::convertible_to<bool>;
};

}  // namespace detail

/// `optimizer`, `{first, second}`, `{}` for none, or a range of pointers to optimizers. The
/// optimizers must outlive this object.
class OptimizerRefs {
 public:
  OptimizerRefs() = default;
  /// References one optimizer.
  OptimizerRefs(torch::optim::Optimizer& optimizer) : optimizers_{&optimizer} {}
  /// References several optimizers, or none. \throws c10::Error for a duplicate
  OptimizerRefs(std::initializer_list<std::reference_wrapper<torch::optim::Optimizer>> optimizers) {
    for (torch::optim::Optimizer& optimizer : optimizers) optimizers_.push_back(&optimizer);
    check();
  }
  /// References the optimizers of a range of pointers.
  /// \throws c10::Error for a null pointer or a duplicate
  template <std::ranges::input_range Optimizers>
  requires detail::OptimizerPointer<std::ranges::range_value_t<Optimizers>> OptimizerRefs(
      const Optimizers& optimizers) {
    for (const auto& pointer : optimizers) {
      TORCH_CHECK(pointer != nullptr, "optimizer ", optimizers_.size(),
                  " is a null pointer; construct the optimizer before passing its pointer");
      optimizers_.push_back(&*pointer);
    }
    check();
  }

  /// Returns the optimizers in order.
  const std::vector<torch::optim::Optimizer*>& optimizers() const noexcept { return optimizers_; }

 private:
  void check() const {
    for (std::size_t i = 0; i < optimizers_.size(); ++i) {
      for (std::size_t other = 0; other < i; ++other) {
        TORCH_CHECK(optimizers_[i] != optimizers_[other], "optimizer ", i,
                    " is the same object as optimizer ", other, "; pass each optimizer once");
      }
    }
  }

  std::vector<torch::optim::Optimizer*> optimizers_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
