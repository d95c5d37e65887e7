#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The options of param groups, which may be plain ones of libtorch's class. A step reads them where
// they are and never replaces them, for whoever changes them may hold a reference.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// libtorch's class of options where it has one of that name, else mezzo's own: what a group's
/// options are in any case.
template <class Options>
using LibtorchsOr =
    std::conditional_t<std::constructible_from<Options, const typename Options::LibtorchOptions&>,
                       typename Options::LibtorchOptions, Options>;

inline void check_are_options(bool are_options, std::size_t group, const char* optimizer) {
  TORCH_CHECK(are_options, optimizer, ": the options of parameter group ", group,
              " are not mezzo::optim::", optimizer,
              "Options; give OptimizerParamGroup a std::make_unique of those");
}

/// A NaN fails too.
inline void check_at_least_0(const char* optimizer, const char* option, double value) {
  TORCH_CHECK(is_at_least(value, 0), optimizer, ": ", option, " is ", value,
              "; it should be at least 0");
}

inline void check_betas(const char* optimizer, const std::tuple<double, double>& betas) {
  const auto [beta1, beta2] = betas;
  TORCH_CHECK(is_at_least(beta1, 0) && beta1 < 1 && is_at_least(beta2, 0) && beta2 < 1, optimizer,
              ": betas are ", beta1, " and ", beta2, "; they should be at least 0 and less than 1");
}

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
  check_are_options(own.has_value(), group, optimizer);
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
