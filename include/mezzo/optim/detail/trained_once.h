#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/dense_memory.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

// What would train a weight twice in a step, or with another scale than it has.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Two threads would step the same memory at once; or two masters would be rounded into it.
inline void refuse_duplicates(const std::vector<at::Tensor>& all, const char* optimizer) {
  std::vector<const void*> parameters;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& parameter : all) {
    parameters.push_back(parameter.unsafeGetTensorImpl());
    const bool is_dense = parameter.layout() == at::kStrided;
    if (is_dense && parameter.is_non_overlapping_and_dense()) dense.push_back(parameter);
  }
  std::sort(parameters.begin(), parameters.end());
  TORCH_CHECK(std::adjacent_find(parameters.begin(), parameters.end()) == parameters.end(),
              optimizer, ": a parameter is given twice; give each once, tied ones too");
  TORCH_CHECK(!may_overlap(dense), optimizer,
              ": two parameters share memory; give one tensor for what is tied");
}

/// Those of `some` that are not among `known`.
inline std::vector<at::Tensor> missing_from(const std::vector<at::Tensor>& known,
                                            const std::vector<at::Tensor>& some) {
  std::unordered_set<const c10::TensorImpl*> inside;
  for (const at::Tensor& parameter : known) inside.insert(parameter.unsafeGetTensorImpl());
  std::vector<at::Tensor> missing;
  for (const at::Tensor& parameter : some) {
    if (inside.count(parameter.unsafeGetTensorImpl()) == 0) missing.push_back(parameter);
  }
  return missing;
}

/// The parameters that an optimizer was last seen to have, as far as it takes to notice others: a
/// tensor may have been put in another's place, or been given another's memory.
class SeenParameters {
 public:
  /// Whether they are others than at the last call.
  bool look(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::size_t number = 0;
    bool is_same = true;
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        const One one(parameter);
        if (number == seen_.size()) seen_.push_back({});
        is_same = is_same && seen_[number] == one;
        seen_[number++] = one;
      }
    }
    is_same = is_same && seen_.size() == number;
    seen_.resize(number);
    return !is_same;
  }

  /// So that the next look finds others: what was seen was refused.
  void forget() noexcept { seen_.clear(); }

 private:
  struct One {
    const void* tensor = nullptr;
    const void* storage = nullptr;
    int64_t offset = 0;
    int64_t count = 0;

    One() = default;
    explicit One(const at::Tensor& parameter)
        : tensor(parameter.unsafeGetTensorImpl()), count(parameter.numel()) {
      if (!parameter.has_storage()) return;
      storage = parameter.storage().unsafeGetStorageImpl();
      offset = parameter.storage_offset();
    }
    bool operator==(const One&) const = default;
  };

  std::vector<One> seen_;
};

/// The parameter's own gradient still carries the loss scale then.
inline void refuse_unscaled_master(const at::Tensor& master, const char* optimizer) {
  TORCH_CHECK(!master.defined() || !master.grad().defined(), optimizer,
              ": step() takes the gradients of the parameters, and a master has one of its own, "
              "which GradScaler::unscale_ writes; step with scaler.step(optimizer), or end the "
              "iteration with scaler.update()");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
