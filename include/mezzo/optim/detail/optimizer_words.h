#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <ostream>
#include <string>
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
