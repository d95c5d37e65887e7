#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/optim/detail/optimizer_words.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <string>
#include <unordered_set>
#include <vector>

// Refusing weights that a step would train twice.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Names two tensors of `dense` that share memory, for a message.
inline std::string overlap_words(const std::vector<at::Tensor>& dense,
                                 const OptimizerWords& optimizer) {
  for (std::size_t i = 0; i < dense.size(); ++i) {
    for (std::size_t other = 0; other < i; ++other) {
      if (!may_overlap({dense[i], dense[other]})) continue;
      return c10::str(optimizer.parameter(dense[other]), " and ", optimizer.parameter(dense[i]));
    }
  }
  return "two parameters";
}

/// \throws c10::Error where a parameter is given twice or two share memory: two threads would step
///   the same memory at once, or two masters would be rounded into it
inline void refuse_duplicates(const std::vector<at::Tensor>& all, const OptimizerWords& optimizer) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& parameter : all) {
    TORCH_CHECK(known.insert(parameter.unsafeGetTensorImpl()).second, optimizer, ": ",
                optimizer.parameter(parameter),
                " is given twice, as model->parameters() gives a weight that two modules share; "
                "give it once");
    const bool is_dense = parameter.layout() == at::kStrided;
    if (is_dense && parameter.is_non_overlapping_and_dense()) dense.push_back(parameter);
  }
  TORCH_CHECK(!may_overlap(dense), optimizer, ": ", overlap_words(dense, optimizer),
              " share memory, which a step would change twice; give the tensor once that both are "
              "views of, or clone() one of them");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
