#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/version.h>

#include <cstddef>
#include <initializer_list>
#include <ostream>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How messages name an optimizer, and which of its parameters they mean.
struct OptimizerDescription {
  const char* name;
  const std::vector<torch::optim::OptimizerParamGroup>& groups;

  /// "parameter 3 of group 0 (float32 [10] on cpu)". Looks through all groups, which only a message
  /// may.
  std::string describe(const at::Tensor& parameter) const {
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const std::vector<at::Tensor>& params = groups[group].params();
      for (std::size_t i = 0; i < params.size(); ++i) {
        if (!params[i].is_same(parameter)) continue;
        return c10::str("parameter ", i, " of group ", group, " (", describe(parameter), ")");
      }
    }
    return c10::str("a parameter (", describe(parameter), ")");
  }

  /// Returns the parameters of all groups.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& group : groups) {
      all.insert(all.end(), group.params().begin(), group.params().end());
    }
    return all;
  }

  friend std::ostream& operator<<(std::ostream& stream, const OptimizerDescription& description) {
    return stream << description.name;
  }
};

/// Options of an optimizer that libtorch lacks. `Derived` derives from it, and has, beside an
/// argument (TORCH_ARG) for each option, `lr` among them:
///
///     static constexpr std::array kKeys;      the names of the options in files
///     static auto values(auto& self);          std::tie of the options, in that order
///
/// It is a template, so that a unit that only sees the class compiles no virtual functions.
template <class Derived>
class SerializableOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  double get_lr() const override { return derived().lr(); }
  void set_lr(const double lr) override { static_cast<Derived&>(*this).lr(lr); }

  void serialize(torch::serialize::InputArchive& archive) override {
    std::size_t i = 0;
    const auto read = [&]<class Value>(Value& value) {
      c10::IValue filed;
      archive.read(Derived::kKeys[i++], filed);
      value = filed.to<Value>();
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

/// Whether the options of a group that have their constructor's values take those of the optimizer,
/// as libtorch's own options do since 2.12.
inline constexpr bool kGroupsInheritOptions = TORCH_VERSION_MAJOR > 2 ||
                                              (TORCH_VERSION_MAJOR == 2 &&
                                               TORCH_VERSION_MINOR >= 12);

/// Gives each option of a group that has its constructor's value the optimizer's.
template <class Options>
void inherit_options(Options& group, const Options& defaults) {
  const Options initial;
  const auto values = Options::values(group), inherited = Options::values(defaults);
  const auto constructed = Options::values(initial);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto inherit = [](auto& value, const auto& other, const auto& first) {
      if (value == first) value = other;
    };
    (inherit(std::get<I>(values), std::get<I>(inherited), std::get<I>(constructed)), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<decltype(constructed)>>());
}

/// Restores the options of a group that was just added: from 2.12 on libtorch replaces options of
/// classes that it does not know, or that are another optimizer's, by the defaults.
template <class Options>
void restore_group_options(torch::optim::OptimizerParamGroup& group,
                           const torch::optim::OptimizerParamGroup& given,
                           const torch::optim::OptimizerOptions& defaults) {
  constexpr bool kIsMezzoOptions = requires { Options::kKeys; };
  if (!given.has_options()) return;
  const bool is_same_class = dynamic_cast<const Options*>(&given.options()) != nullptr;
  if (is_same_class && !kIsMezzoOptions) return;
  group.set_options(given.options().clone());
  if constexpr (kIsMezzoOptions && kGroupsInheritOptions) {
    if (!is_same_class) return;
    inherit_options(static_cast<Options&>(group.options()), static_cast<const Options&>(defaults));
  }
}

/// Returns the loss that `closure` computes with autograd on; undefined without a closure.
inline at::Tensor call_closure(const torch::optim::Optimizer::LossClosure& closure) {
  const c10::AutoGradMode with_grad(true);
  return closure ? closure() : at::Tensor();
}

// What every optimizer checks of its groups.

/// A group may be empty, as one rank's part of a model can be; but a model without parameters has
/// not registered its layers.
inline void check_has_parameters(bool has_parameters, const char* optimizer) {
  TORCH_CHECK(has_parameters, optimizer,
              ": optimizer got an empty parameter list. In C++: give model->parameters() of a "
              "model that has registered its layers with register_module");
}

/// Returns `parameters`, of which there must be some, as a group.
inline std::vector<torch::optim::OptimizerParamGroup> make_single_group(
    std::vector<at::Tensor> parameters, const char* optimizer) {
  check_has_parameters(!parameters.empty(), optimizer);
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

/// Returns the options of a group, of the class that is named `wanted`.
/// \throws c10::Error if they are another optimizer's
template <class Options>
const Options& get_group_options(const torch::optim::OptimizerParamGroup& group, std::size_t number,
                                 const char* optimizer, const char* wanted) {
  const auto* const options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK(options != nullptr, optimizer, ": the options of parameter group ", number,
              " are not ", wanted, "; give OptimizerParamGroup a std::make_unique of those");
  return *options;
}

/// \throws c10::Error for a number below 0, or betas outside of [0, 1); a NaN is neither
inline void check_hyperparams(const char* optimizer,
                              std::initializer_list<std::pair<const char*, double>> at_least_0,
                              const std::tuple<double, double>& betas = {}) {
  for (const auto& [option, value] : at_least_0) {
    TORCH_CHECK(is_at_least(value, 0), optimizer, ": ", option, " is ", value,
                "; it should be at least 0");
  }
  const auto [beta1, beta2] = betas;
  TORCH_CHECK(is_at_least(beta1, 0) && beta1 < 1 && is_at_least(beta2, 0) && beta2 < 1, optimizer,
              ": betas are ", beta1, " and ", beta2, "; they should be at least 0 and less than 1");
}

/// Warns once that a parameter of 16 bits is trained without a master.
inline void warn_rounded_weights(const at::Tensor& parameter, const OptimizerDescription& optimizer,
                                 const char* remedy) {
  TORCH_WARN_ONCE(optimizer, ": ", optimizer.describe(parameter),
                  " is rounded to 16 bits after each step. Updates smaller than half a unit in the "
                  "last place are lost, so that training may stall",
                  parameter.scalar_type() == at::kHalf
                      ? ", and moments of float16 lose small numbers: the mean square of gradients "
                        "below 0.005 is 0 (with betas of 0.9 and 0.999)"
                      : "",
                  ". Use ", remedy, ".");
}

/// \throws c10::Error unless parameter and gradient are dense, alike, and can be trained
inline void check_dense_gradient(const at::Tensor& parameter,
                                 const OptimizerDescription& optimizer) {
  const at::Tensor& gradient = parameter.grad();
  TORCH_CHECK(!parameter.is_inference(), optimizer, ": ", optimizer.describe(parameter),
              " was made under c10::InferenceMode, and cannot be trained; make or load the model "
              "outside of it");
  TORCH_CHECK(gradient.layout() == at::kStrided && parameter.layout() == at::kStrided, optimizer,
              " takes dense parameters and gradients, and the gradient of ",
              optimizer.describe(parameter), " is ", describe(gradient),
              "; give this parameter to a torch::optim::SGD of its own, which takes sparse ones, "
              "or make the embedding with sparse(false)");
  TORCH_CHECK(gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              optimizer, ": ", optimizer.describe(parameter), " has a gradient that is ",
              describe(gradient),
              "; call zero_grad() after the model was moved or resized, and backward() after that");
  TORCH_CHECK(
      is_dense_memory(parameter), optimizer, ": ", optimizer.describe(parameter),
      " has gaps in its memory, or elements that share it; give the whole tensor that it is "
      "a view of, or make it contiguous() before the optimizer is made");
}

/// \throws c10::Error if an EmaGuard has put an average in the place of `parameter`: its master, or
/// what a file has of it, would be made from the average
inline void check_not_averaged(const at::Tensor& parameter, const OptimizerDescription& optimizer) {
  TORCH_CHECK(!is_averaged(parameter), optimizer, ": ", optimizer.describe(parameter),
              " holds an average, for an EmaGuard is alive; let that scope end first");
}

/// \throws c10::Error where a parameter is given twice or two share memory: two threads would step
///   the same memory at once, or two masters would be rounded into it
inline void check_no_duplicates(const std::vector<at::Tensor>& all,
                                const OptimizerDescription& optimizer) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::vector<at::Tensor> strided;
  for (const at::Tensor& parameter : all) {
    TORCH_CHECK(known.insert(parameter.unsafeGetTensorImpl()).second, optimizer, ": ",
                optimizer.describe(parameter),
                " is given twice, as model->parameters() gives a weight that two modules share; "
                "give it once");
    if (parameter.layout() == at::kStrided) strided.push_back(parameter);
  }
  const auto shared = find_overlap(strided);
  TORCH_CHECK(!shared, optimizer, ": ", optimizer.describe(shared->first), " and ",
              optimizer.describe(shared->second),
              " share memory, which a step would change twice; give the tensor once that both are "
              "views of, or clone() one of them");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
