#pragma once

#include <mezzo/base/version.h>
#include <mezzo/scaling/detail/master_gradients.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <utility>
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

/// The records of one iteration. An optimizer is known by its address together with a parameter
/// that it holds, in whatever group and place: groups may be rearranged between two calls. The
/// record keeps the parameter alive: within an iteration neither a dead optimizer's address nor its
/// parameter's can come back as those of another. (One rebuilt in place over the same parameter
/// counts as the same.)
class OptimizerRecords {
 public:
  OptimizerRecord& of(const torch::optim::Optimizer& optimizer) {
    OptimizerRecord* const known = find(optimizer);
    if (known != nullptr) return *known;
    return entries_.emplace_back(&optimizer, first_parameter(optimizer), OptimizerRecord{}).record;
  }

  /// Null where nothing is known of it.
  const OptimizerRecord* find(const torch::optim::Optimizer& optimizer) const {
    for (const Entry& entry : entries_) {
      if (entry.optimizer == &optimizer && holds(optimizer, entry.parameter)) return &entry.record;
    }
    return nullptr;
  }
  OptimizerRecord* find(const torch::optim::Optimizer& optimizer) {
    return const_cast<OptimizerRecord*>(std::as_const(*this).find(optimizer));
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
    Entry(const torch::optim::Optimizer* optimizer_in, at::Tensor parameter_in, OptimizerRecord r)
        : optimizer(optimizer_in), parameter(std::move(parameter_in)), record(std::move(r)) {}
    const torch::optim::Optimizer* optimizer;
    at::Tensor parameter;
    OptimizerRecord record;
  };

  static at::Tensor first_parameter(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      if (!group.params().empty()) return group.params().front();
    }
    return {};
  }

  /// Usually the first parameter looked at, which is the one recorded. An optimizer without
  /// parameters matches an empty record.
  static bool holds(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
    if (!parameter.defined()) return !first_parameter(optimizer).defined();
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& held : group.params()) {
        if (held.is_same(parameter)) return true;
      }
    }
    return false;
  }

  std::vector<at::Tensor> released_;
  std::deque<Entry> entries_;  // a deque: references to records stay valid as others are added
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
