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

/// Name and param groups of an optimizer, for error messages.
struct OptimizerDescription {
  const char* name;
  const std::vector<torch::optim::OptimizerParamGroup>& groups;

  /// Returns "parameter 3 of group 0 (float32 [10] on cpu)". Searches all groups.
  std::string describe_param(const at::Tensor& parameter) const {
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const std::vector<at::Tensor>& params = groups[group].params();
      for (std::size_t i = 0; i < params.size(); ++i) {
        if (!params[i].is_same(parameter)) continue;
        return c10::str("parameter ", i, " of group ", group, " (", detail::describe(parameter),
                        ")");
      }
    }
    return c10::str("a parameter (", detail::describe(parameter), ")");
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
  const auto values = Options::values(group), inherited = Options::values(defaults);
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

/// Calls `closure` with grad mode enabled and returns its loss; undefined without a closure.
inline at::Tensor call_closure(const torch::optim::Optimizer::LossClosure& closure) {
  const c10::AutoGradMode with_grad(true);
  return closure ? closure() : at::Tensor();
}

/// \throws c10::Error if there are no param groups. A group may be empty, as one rank's partition.
inline void check_has_parameters(bool has_parameters, const char* optimizer) {
  TORCH_CHECK(has_parameters, optimizer,
              ": optimizer got an empty parameter list. In C++: pass model->parameters() of a "
              "model that registers its layers with register_module");
}

/// Returns one group of `parameters`. \throws c10::Error if empty
inline std::vector<torch::optim::OptimizerParamGroup> make_single_group(
    std::vector<at::Tensor> parameters, const char* optimizer) {
  check_has_parameters(!parameters.empty(), optimizer);
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

/// Returns the options of a group, of the class named `expected`.
/// \throws c10::Error if they are another optimizer's
template <class Options>
const Options& get_group_options(const torch::optim::OptimizerParamGroup& group, std::size_t index,
                                 const char* optimizer, const char* expected) {
  const auto* const options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK(options != nullptr, optimizer, ": the options of parameter group ", index,
              " are not ", expected, "; pass OptimizerParamGroup a std::make_unique of those");
  return *options;
}

/// \throws c10::Error for a value below 0 or betas outside [0, 1), NaN included
inline void check_hyperparams(const char* optimizer,
                              std::initializer_list<std::pair<const char*, double>> nonnegative,
                              const std::tuple<double, double>& betas = {}) {
  for (const auto& [option, value] : nonnegative) {
    TORCH_CHECK(is_at_least(value, 0), optimizer, ": ", option, " is ", value,
                "; it should be at least 0");
  }
  const auto [beta1, beta2] = betas;
  TORCH_CHECK(is_at_least(beta1, 0) && beta1 < 1 && is_at_least(beta2, 0) && beta2 < 1, optimizer,
              ": betas are ", beta1, " and ", beta2, "; they should be at least 0 and less than 1");
}

/// Warns once that a 16-bit parameter is trained without a master.
inline void warn_rounded_weights(const at::Tensor& parameter, const OptimizerDescription& optimizer,
                                 const char* remedy) {
  TORCH_WARN_ONCE(optimizer, ": ", optimizer.describe_param(parameter),
                  " is rounded to 16 bits after each step. Updates smaller than half a unit in the "
                  "last place are lost, so training may stall",
                  parameter.scalar_type() == at::kHalf
                      ? ", and float16 moments underflow: exp_avg_sq of gradients below 0.005 is 0 "
                        "(with betas of 0.9 and 0.999)"
                      : "",
                  ". Use ", remedy, ".");
}

/// \throws c10::Error unless parameter and gradient are dense and of the same shape and device
inline void check_dense_gradient(const at::Tensor& parameter,
                                 const OptimizerDescription& optimizer) {
  const at::Tensor& gradient = parameter.grad();
  TORCH_CHECK(!parameter.is_inference(), optimizer, ": ", optimizer.describe_param(parameter),
              " is an inference tensor and cannot be trained; make or load the model outside "
              "c10::InferenceMode");
  TORCH_CHECK(gradient.layout() == at::kStrided && parameter.layout() == at::kStrided, optimizer,
              " does not support sparse gradients, and the gradient of ",
              optimizer.describe_param(parameter), " is ", describe(gradient),
              "; pass this parameter to a separate torch::optim::SGD, which supports them, or make "
              "the embedding with sparse(false)");
  TORCH_CHECK(gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes(),
              optimizer, ": ", optimizer.describe_param(parameter), " has a gradient that is ",
              describe(gradient),
              "; call zero_grad() after the model was moved or resized, and backward() after that");
  TORCH_CHECK(
      is_dense_memory(parameter), optimizer, ": ", optimizer.describe_param(parameter),
      " has non-contiguous or overlapping storage; pass the whole tensor that it is a view of, "
      "or call contiguous() before the optimizer is made");
}

/// \throws c10::Error while an EmaGuard replaces `parameter` by its average, from which a master or a
///   saved value would be made
inline void check_not_averaged(const at::Tensor& parameter, const OptimizerDescription& optimizer) {
  TORCH_CHECK(!is_averaged(parameter), optimizer, ": ", optimizer.describe_param(parameter),
              " holds an average while an EmaGuard is alive; end its scope first");
}

/// \throws c10::Error if a parameter appears twice or two share memory: two threads would update the
///   same memory, or two masters would be rounded into it
inline void check_no_duplicates(const std::vector<at::Tensor>& all,
                                const OptimizerDescription& optimizer) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> strided;
  for (const at::Tensor& parameter : all) {
    TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second, optimizer, ": ",
                optimizer.describe_param(parameter),
                " appears twice, as a weight that two modules share does in model->parameters(); "
                "pass it once");
    if (parameter.layout() == at::kStrided) strided.push_back(parameter);
  }
  const auto shared = find_overlap(strided);
  TORCH_CHECK(
      !shared, optimizer, ": ", optimizer.describe_param(shared->first), " and ",
      optimizer.describe_param(shared->second),
      " share memory, which a step would update twice; pass the tensor that both are views of, "
      "or clone() one of them");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
