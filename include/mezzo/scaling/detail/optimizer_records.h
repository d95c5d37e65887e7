#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/trained_once.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gradients in float that stand at an optimizer's masters from `unscale_` to the end of the step
/// or of the iteration: no later iteration finds them there.
class MasterGradients {
 public:
  MasterGradients() = default;

  /// Gives each master a copy of its parameter's gradient, still scaled. `reads_all` says whether
  /// the caller is about to read the gradients of parameters without a master too.
  MasterGradients(const StepTaker& taker, bool reads_all) {
    const NoGraphGuard no_graph;
    // All are coalesced and checked before the first master gets one: it would keep it.
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      if (!parameter.grad().defined()) return;
      if (reads_all || taker.keeps_master(group, parameter)) (void)gradient_values(parameter);
    });
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      if (!parameter.grad().defined() || !taker.keeps_master(group, parameter)) return;
      const at::Tensor gradient =
          parameter.grad().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor master = taker.master_param(group, parameter);
      master.mutable_grad() = gradient;
      masters_.emplace(parameter.unsafeGetTensorImpl(), master);
    });
  }

  /// Those that stand at masters already, whoever wrote them.
  static MasterGradients standing(const StepTaker& taker) {
    MasterGradients found;
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      if (!taker.keeps_master(group, parameter)) return;
      const at::Tensor master = taker.master_param(group, parameter);
      if (!master.grad().defined()) return;
      found.masters_.emplace(parameter.unsafeGetTensorImpl(), master);
    });
    return found;
  }

  MasterGradients(MasterGradients&& other) noexcept : masters_(std::move(other.masters_)) {
    other.masters_.clear();
  }
  MasterGradients& operator=(MasterGradients&& other) noexcept {
    if (this == &other) return *this;
    drop();
    masters_.swap(other.masters_);
    return *this;
  }
  MasterGradients(const MasterGradients&) = delete;
  MasterGradients& operator=(const MasterGradients&) = delete;
  ~MasterGradients() { drop(); }

  bool empty() const noexcept { return masters_.empty(); }

  void drop() noexcept {
    for (auto& [parameter, master] : masters_) master.mutable_grad() = at::Tensor();
    masters_.clear();
  }

  /// Leaves the gradients where they are, to whoever wants them.
  void leave() noexcept { masters_.clear(); }

  /// The tensors whose gradients the step takes: these masters in place of their parameters.
  std::vector<at::Tensor> holders(const StepTaker& taker) const {
    std::vector<at::Tensor> holders;
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      const auto found = masters_.find(parameter.unsafeGetTensorImpl());
      const bool is_given = found != masters_.end();
      if (!is_given && !empty() && taker.keeps_master(group, parameter)) return;
      const at::Tensor& holder = is_given ? found->second : parameter;
      if (holder.grad().defined()) holders.push_back(holder);
    });
    return holders;
  }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> masters_;
};

enum class Stage : uint8_t { ready, unscaled, stepped };

/// What this iteration knows about one optimizer.
struct OptimizerRecord {
  Stage stage = Stage::ready;
  std::vector<at::Tensor> found_inf;  ///< one float of one element a device: 0, or 1 for an inf
  MasterGradients masters;            ///< what was unscaled onto masters, until the step took it
  /// Of an adopted optimizer, likewise: they decide about its step and not about the scale.
  std::vector<at::Tensor> found_elsewhere{};

  /// The step is over: its gradients leave the masters.
  void finish() {
    stage = Stage::stepped;
    masters.drop();
  }

  /// All that decides whether to step.
  std::vector<at::Tensor> checks() const {
    std::vector<at::Tensor> all = found_inf;
    all.insert(all.end(), found_elsewhere.begin(), found_elsewhere.end());
    return all;
  }
};

/// The records of one iteration. An optimizer is known by its address together with any parameter
/// that it was seen with: groups and parameters may be rearranged, leave and join between two
/// calls. (One rebuilt in place over some of the same parameters counts as the same.)
class OptimizerRecords {
 public:
  OptimizerRecord& of(const torch::optim::Optimizer& optimizer) {
    Entry* const known = entry_of(optimizer);
    if (known == nullptr) return entries_.emplace_back(optimizer).record;
    (void)known->parameters.look(optimizer.param_groups());
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

  /// Whether the gradients of `taker` lie unscaled on float masters, for its step to take.
  /// \throws c10::Error if they do and it is the inner optimizer of a MasterWeights, whose own
  ///   gradients still carry the scale
  bool of_masters(const StepTaker& taker) const {
    const OptimizerRecord* const record = find(taker.optimizer());
    const bool has_masters = record != nullptr && !record->masters.empty();
    TORCH_CHECK(
        taker.fused() != nullptr || !has_masters,
        "step(): the gradients were unscaled onto the float masters of a MasterWeights around "
        "this optimizer, which alone can step with them; pass the MasterWeights to step()");
    return has_masters;
  }

  void forget(const torch::optim::Optimizer& optimizer) {
    entries_.remove_if([&](const Entry& entry) { return entry.optimizer == &optimizer; });
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
    explicit Entry(const torch::optim::Optimizer& of)
        : optimizer(&of), parameters(of.param_groups()) {}
    const torch::optim::Optimizer* optimizer;
    SeenParameters parameters;
    OptimizerRecord record{};
  };

  Entry* entry_of(const torch::optim::Optimizer& optimizer) {
    for (Entry& entry : entries_) {
      if (entry.optimizer == &optimizer && entry.parameters.any_in(optimizer.param_groups()))
        return &entry;
    }
    return nullptr;
  }

  std::vector<at::Tensor> released_;
  std::list<Entry> entries_;  // a list: references to records stay valid as others are added
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
