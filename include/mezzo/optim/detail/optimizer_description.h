#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

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
      "or call contiguous() before the optimizer is constructed");
}

/// \throws c10::Error while an EmaGuard replaces `parameter` by its average, which would end up in
///   a master or an archive
inline void check_no_ema_guard(const at::Tensor& parameter, const OptimizerDescription& optimizer) {
  TORCH_CHECK(!is_averaged(parameter), optimizer, ": ", optimizer.describe_param(parameter),
              " holds an average while an EmaGuard is alive; end its scope first");
}

/// \throws c10::Error if a parameter appears twice or two share memory: two threads would update
///   the same memory, or two masters would be rounded into it
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
