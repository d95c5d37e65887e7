#pragma once

#include <mezzo/base/version.h>
#include <mezzo/scaling/detail/master_gradients.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class Stage : uint8_t { ready, unscaled, stepped };

/// What this iteration knows about one optimizer.
struct OptimizerRecord {
  Stage stage = Stage::ready;
  std::vector<at::Tensor> found_inf;  ///< one float of one element a device: 0, or 1 for an inf
  MasterGradients masters;            ///< what was unscaled onto masters, until the step took it
  /// Of an adopted optimizer, likewise: they decide about its step and not about the scale.
  std::vector<at::Tensor> found_elsewhere{};

  /// All that decides whether to step.
  std::vector<at::Tensor> checks() const {
    std::vector<at::Tensor> all = found_inf;
    all.insert(all.end(), found_elsewhere.begin(), found_elsewhere.end());
    return all;
  }
};

/// The parameters that an optimizer was seen with. Their tensors' memory may go, but not the
/// addresses that they are known by: no later tensor can be taken for one of them.
class RecordedParameters {
 public:
  explicit RecordedParameters(const torch::optim::Optimizer& optimizer) { add_all(optimizer); }

  /// Those that joined since count as well.
  void see(const torch::optim::Optimizer& optimizer) {
    if (!are_those_of(optimizer)) add_all(optimizer);
  }

  /// Whether `optimizer` holds any of them, in whatever group and place; of none, whether it holds
  /// none. Usually one look, at its first.
  bool any_in(const torch::optim::Optimizer& optimizer) const {
    const c10::TensorImpl* const first = first_of(optimizer);
    if (first == nullptr || seen_.empty()) return first == nullptr && seen_.empty();
    if (first == address(seen_.front())) return true;
    std::unordered_set<const c10::TensorImpl*> addresses;
    for (const WeakTensor& seen : seen_) addresses.insert(address(seen));
    return any_of(optimizer, [&](const at::Tensor& parameter) {
      return addresses.contains(parameter.unsafeGetTensorImpl());
    });
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static const c10::TensorImpl* address(const WeakTensor& tensor) {
    return tensor._unsafe_get_target();
  }

  template <class Test>
  static bool any_of(const torch::optim::Optimizer& optimizer, const Test& test) {
    return std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
      return std::ranges::any_of(group.params(), test);
    });
  }

  static const c10::TensorImpl* first_of(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      if (!group.params().empty()) return group.params().front().unsafeGetTensorImpl();
    }
    return nullptr;
  }

  bool are_those_of(const torch::optim::Optimizer& optimizer) const {
    auto seen = seen_.begin();
    const bool has_other = any_of(optimizer, [&](const at::Tensor& parameter) {
      return seen == seen_.end() || address(*seen++) != parameter.unsafeGetTensorImpl();
    });
    return !has_other;
  }

  void add_all(const torch::optim::Optimizer& optimizer) {
    std::size_t count = seen_.size();
    for (const auto& group : optimizer.param_groups()) count += group.params().size();
    seen_.reserve(count);
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        seen_.emplace_back(parameter.getIntrusivePtr());
      }
    }
  }

  std::vector<WeakTensor> seen_;
};

/// The records of one iteration. An optimizer is known by its address together with any parameter
/// that it was seen with: groups and parameters may be rearranged, leave and join between two
/// calls. (One rebuilt in place over some of the same parameters counts as the same.)
class OptimizerRecords {
 public:
  OptimizerRecord& of(const torch::optim::Optimizer& optimizer) {
    Entry* const known = entry_of(optimizer);
    if (known == nullptr) return entries_.emplace_back(optimizer).record;
    known->parameters.see(optimizer);
    return known->record;
  }

  /// Null where nothing is known of it.
  OptimizerRecord* find(const torch::optim::Optimizer& optimizer) {
    Entry* const known = entry_of(optimizer);
    return known == nullptr ? nullptr : &known->record;
  }
  const OptimizerRecord* find(const torch::optim::Optimizer& optimizer) const {
    return const_cast<OptimizerRecords*>(this)->find(optimizer);
  }

  void forget(const torch::optim::Optimizer& optimizer) {
    std::erase_if(entries_, [&](const Entry& entry) { return entry.optimizer == &optimizer; });
  }

  /// The same, but what was found still counts.
  void release(const torch::optim::Optimizer& optimizer) {
    const OptimizerRecord* const record = find(optimizer);
    released_.insert(released_.end(), record->found_inf.begin(), record->found_inf.end());
    forget(optimizer);
  }

  bool empty() const noexcept { return entries_.empty() && released_.empty(); }
  void clear() noexcept {
    entries_.clear();
    released_.clear();
  }

  std::vector<at::Tensor> found_inf() const {
    std::vector<at::Tensor> all = released_;
    for (const Entry& entry : entries_) {
      all.insert(all.end(), entry.record.found_inf.begin(), entry.record.found_inf.end());
    }
    return all;
  }

 private:
  struct Entry {
    explicit Entry(const torch::optim::Optimizer& of) : optimizer(&of), parameters(of) {}
    const torch::optim::Optimizer* optimizer;
    RecordedParameters parameters;
    OptimizerRecord record{};
  };

  Entry* entry_of(const torch::optim::Optimizer& optimizer) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == &optimizer && entry.parameters.any_in(optimizer)) return &entry;
    }
    return nullptr;
  }

  std::vector<at::Tensor> released_;
  std::deque<Entry> entries_;  // a deque: references to records stay valid as others are added
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
