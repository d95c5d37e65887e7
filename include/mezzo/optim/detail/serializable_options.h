#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/version.h>

#include <cstddef>
#include <tuple>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Base (CRTP) of the options of an optimizer that torch lacks. `Derived` has a TORCH_ARG for each
/// option, `lr` included, and:
///
///     static constexpr std::array kKeys;      the names of the options in archives
///     static auto values(auto& self);         std::tie of the options, in that order
///
/// As a template it adds no virtual functions to a translation unit that does not use it.
template <class Derived>
class SerializableOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  double get_lr() const override { return derived().lr(); }
  void set_lr(const double lr) override { static_cast<Derived&>(*this).lr(lr); }

  void serialize(torch::serialize::InputArchive& archive) override {
    std::size_t i = 0;
    const auto read = [&]<class Value>(Value& value) {
      c10::IValue serialized;
      archive.read(Derived::kKeys[i++], serialized);
      value = serialized.to<Value>();
    };
    std::apply([&](auto&... value) { (read(value), ...); },
               Derived::values(static_cast<Derived&>(*this)));
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    std::size_t i = 0;
    std::apply(
        [&](auto&... value) { (archive.write(Derived::kKeys[i++], c10::IValue(value)), ...); },
        Derived::values(derived()));
  }
  friend bool operator==(const Derived& left, const Derived& right) {
    return Derived::values(left) == Derived::values(right);
  }

 private:
  const Derived& derived() const { return static_cast<const Derived&>(*this); }
};

/// Whether options of a group with default values are replaced by the optimizer's, as torch's are
/// since 2.12.
inline constexpr bool kGroupsInheritOptions = TORCH_VERSION_MAJOR > 2 ||
                                              (TORCH_VERSION_MAJOR == 2 &&
                                               TORCH_VERSION_MINOR >= 12);

/// Replaces each option of a group that has its default value by the optimizer's.
template <class Options>
void inherit_options(Options& group, const Options& defaults) {
  const Options initial;
  const auto values = Options::values(group);
  const auto inherited = Options::values(defaults);
  const auto initial_values = Options::values(initial);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto inherit = [](auto& value, const auto& other, const auto& first) {
      if (value == first) value = other;
    };
    (inherit(std::get<I>(values), std::get<I>(inherited), std::get<I>(initial_values)), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<decltype(initial_values)>>());
}

/// Restores the options of a group that was just added: since 2.12 torch replaces options of
/// unknown classes, or of another optimizer, by the defaults.
template <class Options>
void restore_group_options(torch::optim::OptimizerParamGroup& group,
                           const torch::optim::OptimizerParamGroup& source,
                           const torch::optim::OptimizerOptions& defaults) {
  constexpr bool kIsMezzoOptions = requires { Options::kKeys; };
  if (!source.has_options()) return;
  const bool is_same_class = dynamic_cast<const Options*>(&source.options()) != nullptr;
  if (is_same_class && !kIsMezzoOptions) return;
  group.set_options(source.options().clone());
  if constexpr (kIsMezzoOptions && kGroupsInheritOptions) {
    if (!is_same_class) return;
    inherit_options(static_cast<Options&>(group.options()), static_cast<const Options&>(defaults));
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
