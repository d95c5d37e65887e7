#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <initializer_list>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How messages name an optimizer, and which of its parameters they mean.
struct OptimizerWords {
  const char* name;
  const std::vector<torch::optim::OptimizerParamGroup>& groups;

  /// "parameter 3 of group 0 (float32 [10] on cpu)". Looks through all groups, which only a message
  /// may.
  std::string parameter(const at::Tensor& parameter) const {
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const std::vector<at::Tensor>& own = groups[group].params();
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (!own[i].is_same(parameter)) continue;
        return c10::str("parameter ", i, " of group ", group, " (", tensor_words(parameter), ")");
      }
    }
    return c10::str("a parameter (", tensor_words(parameter), ")");
  }

  friend std::ostream& operator<<(std::ostream& stream, const OptimizerWords& words) {
    return stream << words.name;
  }
};

// What every optimizer checks of its groups.

/// A group may be empty, as one rank's part of a model can be; but a model without parameters has
/// not registered its layers.
inline void check_has_parameters(bool has_parameters, const char* optimizer) {
  TORCH_CHECK(has_parameters, optimizer,
              ": optimizer got an empty parameter list. In C++: give model->parameters() of a "
              "model that has registered its layers with register_module");
}

inline void check_are_options(bool are_options, std::size_t group, const char* optimizer) {
  TORCH_CHECK(are_options, optimizer, ": the options of parameter group ", group,
              " are not mezzo::optim::", optimizer,
              "Options; give OptimizerParamGroup a std::make_unique of those");
}

/// \throws c10::Error for a number below 0, or betas outside of [0, 1); a NaN is neither
inline void check_numbers(const char* optimizer,
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
