#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/dense_memory.h>
#include <mezzo/optim/detail/kept_weights.h>
#include <mezzo/optim/detail/trained_once.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The masters of an optimizer that knows nothing of them.
class KeptMasters {
 public:
  static constexpr const char* kName = "MasterWeights";

  /// Undefined where none was made.
  at::Tensor find(const at::Tensor& parameter) const {
    const auto found = kept_.find(parameter.unsafeGetTensorImpl());
    return found == kept_.end() ? at::Tensor() : found->second.master;
  }

  /// In agreement with the parameter as it is now; made if there is none. Compares values: an
  /// optimizer of libtorch's that steps alone writes through `data()`, which bumps no version.
  const at::Tensor& settled(const at::Tensor& parameter) {
    const c10::NoGradGuard no_grad;
    Kept& kept = kept_[parameter.unsafeGetTensorImpl()];
    if (!kept.master.defined()) {
      kept.parameter = parameter;
      kept.master = parameter.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    } else {
      check_shape_of(kept.master, "a master", parameter, kName);
      follow_writes(parameter, kept.master);
    }
    kept.master.set_requires_grad(parameter.requires_grad());  // an optimizer may look at it
    return kept.master;
  }

  /// The parameter becomes its master, rounded to nearest.
  void round(const at::Tensor& parameter) const {
    const c10::NoGradGuard no_grad;
    parameter.detach().copy_(kept_.at(parameter.unsafeGetTensorImpl()).master);
  }

  /// From a file; the next `settled` compares it with the parameter.
  void replace(std::vector<std::pair<at::Tensor, at::Tensor>> parameters_and_masters) {
    std::unordered_map<const c10::TensorImpl*, Kept> fresh;
    for (auto& [parameter, master] : parameters_and_masters) {
      fresh[parameter.unsafeGetTensorImpl()] = {parameter, std::move(master)};
    }
    kept_ = std::move(fresh);
  }

  /// Looks at the parameters when there are others, or more, than there were.
  void follow(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::vector<const c10::TensorImpl*> now;
    std::vector<at::Tensor> low_precision;
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        if (!is_low_precision(parameter)) continue;
        now.push_back(parameter.unsafeGetTensorImpl());
        low_precision.push_back(parameter);
      }
    }
    if (now == followed_) return;
    refuse_duplicates(low_precision, kName);
    const std::unordered_set<const c10::TensorImpl*> there(now.begin(), now.end());
    std::erase_if(kept_, [&](const auto& entry) { return there.count(entry.first) == 0; });
    followed_ = std::move(now);
  }

 private:
  struct Kept {
    at::Tensor parameter;  // held, so that its address cannot come to name another tensor
    at::Tensor master;
  };

  std::unordered_map<const c10::TensorImpl*, Kept> kept_;
  std::vector<const c10::TensorImpl*> followed_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
