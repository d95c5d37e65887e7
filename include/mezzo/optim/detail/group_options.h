#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// The options of param groups, which may be plain ones of libtorch's class: these are read where
// they are, and never replaced by a step, for whoever changes them may hold a reference.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// libtorch's options as mezzo's, with what libtorch's lack from `defaults`.
template <class Options>
std::optional<Options> widened(const torch::optim::OptimizerOptions& options,
                               const torch::optim::OptimizerOptions& defaults) {
  using Plain = typename Options::LibtorchOptions;
  if constexpr (std::constructible_from<Options, const Plain&>) {
    if (const auto* const plain = dynamic_cast<const Plain*>(&options)) {
      Options own(*plain);
      own.keep_unread(static_cast<const Options&>(defaults));
      return own;
    }
  }
  return std::nullopt;
}

/// What a step takes from the options of group number `group`.
/// \throws c10::Error where they are another optimizer's
template <class Options>
Options group_options(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      std::size_t group, const torch::optim::OptimizerOptions& defaults,
                      const char* optimizer) {
  const torch::optim::OptimizerOptions& options = groups[group].options();
  if (const auto* const own = dynamic_cast<const Options*>(&options)) return *own;
  const std::optional<Options> own = widened<Options>(options, defaults);
  TORCH_CHECK(own, optimizer, ": the options of parameter group ", group,
              " are not mezzo::optim::", optimizer,
              "Options; give OptimizerParamGroup a std::make_unique of those");
  return *own;
}

/// Gives `group`, just added from `given`, back the options that libtorch has replaced. From 2.12
/// on `add_param_group` takes a copy of the optimizer's defaults and merges into it what differs
/// from the constructor's values, in members that libtorch knows: what mezzo adds to libtorch's
/// options, and all options that libtorch has no class for, would be the defaults'. Members of
/// libtorch's stay as its version leaves them, so that a group inherits what one of `torch::optim`
/// does.
template <class Options>
void keep_given_options(torch::optim::OptimizerParamGroup& group,
                        const torch::optim::OptimizerParamGroup& given) {
  if (!given.has_options()) return;
  using Plain = typename Options::LibtorchOptions;
  constexpr bool kIsLibtorchs = std::constructible_from<Options, const Plain&>;
  std::unique_ptr<torch::optim::OptimizerOptions> options = given.options().clone();
  if constexpr (kIsLibtorchs) {
    auto* const own = dynamic_cast<Options*>(options.get());
    if (own == nullptr && dynamic_cast<Plain*>(options.get()) != nullptr) return;
    if (own != nullptr) static_cast<Plain&>(*own) = dynamic_cast<Plain&>(group.options());
  }
  group.set_options(std::move(options));
}

/// Gives `group` the options that a file has for it: in place, unless libtorch's options have no
/// place for them.
template <class Options>
void set_group_options(torch::optim::OptimizerParamGroup& group, const Options& loaded,
                       const torch::optim::OptimizerOptions& defaults) {
  if (auto* const own = dynamic_cast<Options*>(&group.options())) {
    *own = loaded;
    return;
  }
  if (loaded.adds_the_same(static_cast<const Options&>(defaults))) {
    using Plain = typename Options::LibtorchOptions;
    dynamic_cast<Plain&>(group.options()) = loaded;
  } else {
    group.set_options(loaded.clone());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
