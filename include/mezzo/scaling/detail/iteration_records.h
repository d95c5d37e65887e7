#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <list>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What was called last for an optimizer in this iteration.
enum class Stage : uint8_t { ready, unscaled, stepped };

/// What this iteration knows about one optimizer.
struct OptimizerRecord {
  Stage stage = Stage::ready;
  /// A float of one element on the scale's device: not 0 where a check found an inf or NaN that
  /// counts for the next scale. Undefined before any check.
  at::Tensor found_inf{};
};

/// The records of one iteration. An optimizer is recognised by its address and by at least one
/// parameter that it had at the last call: groups and parameters may be rearranged, leave and join
/// between two calls. An optimizer rebuilt in place over some of the same parameters counts as the
/// same.
class IterationRecords {
 public:
  /// Returns the record of `optimizer`, a new one where nothing is known of it. Valid until
  /// `forget` or `clear`.
  OptimizerRecord& of(const torch::optim::Optimizer& optimizer) {
    Entry* const known = entry_of(optimizer);
    Entry& entry = known != nullptr ? *known : entries_.emplace_back(Entry{&optimizer});
    entry.parameters.clear();
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        entry.parameters.emplace_back(parameter.getIntrusivePtr());
      }
    }
    return entry.record;
  }

  /// Returns the record of `optimizer`, or null where nothing is known of it.
  const OptimizerRecord* find(const torch::optim::Optimizer& optimizer) const {
    Entry* const known = const_cast<IterationRecords*>(this)->entry_of(optimizer);
    return known == nullptr ? nullptr : &known->record;
  }

  /// Forgets `optimizer`; an inf found in its gradients still counts.
  void forget(const torch::optim::Optimizer& optimizer) {
    entries_.remove_if([&](const Entry& entry) {
      if (entry.optimizer != &optimizer) return false;
      if (entry.record.found_inf.defined()) forgotten_.push_back(entry.record.found_inf);
      return true;
    });
  }

  bool empty() const noexcept { return entries_.empty() && forgotten_.empty(); }
  void clear() noexcept {
    entries_.clear();
    forgotten_.clear();
  }

  /// Returns the flags of all checks that count for the next scale.
  std::vector<at::Tensor> found_inf() const {
    std::vector<at::Tensor> all = forgotten_;
    for (const Entry& entry : entries_) {
      if (entry.record.found_inf.defined()) all.push_back(entry.record.found_inf);
    }
    return all;
  }

  /// Returns the flags of optimizers that were unscaled and have not stepped.
  std::vector<at::Tensor> found_without_step() const {
    std::vector<at::Tensor> all;
    for (const Entry& entry : entries_) {
      const OptimizerRecord& record = entry.record;
      if (record.stage == Stage::unscaled && record.found_inf.defined()) {
        all.push_back(record.found_inf);
      }
    }
    return all;
  }

 private:
  // Weak, so that the memory goes with the model, and no later tensor takes a known address.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    const torch::optim::Optimizer* optimizer;
    std::vector<WeakTensor> parameters{};
    OptimizerRecord record{};
  };

  Entry* entry_of(const torch::optim::Optimizer& optimizer) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == &optimizer && is_of(entry, optimizer)) return &entry;
    }
    return nullptr;
  }

  /// Whether `optimizer` has one of the entry's parameters. Usually one comparison, of the first
  /// with the first.
  static bool is_of(const Entry& entry, const torch::optim::Optimizer& optimizer) {
    if (entry.parameters.empty()) return true;
    std::unordered_set<const c10::TensorImpl*> known;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const c10::TensorImpl* const one = parameter.unsafeGetTensorImpl();
        if (one == entry.parameters.front()._unsafe_get_target()) return true;
        if (known.empty()) {
          for (const WeakTensor& each : entry.parameters) known.insert(each._unsafe_get_target());
        }
        if (known.count(one) != 0) return true;
      }
    }
    return false;
  }

  std::vector<at::Tensor> forgotten_;
  std::list<Entry> entries_;  // a list: references to records stay valid as others are added
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
